"""The mask of independent queries: on every variant, every backend, and at one position."""

import pytest
import torch
from test_models import SMALL, VARIANTS

from energylab.layers import CEMAttention, norm
from energylab.models import InContextRegressor, ModelConfig


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_queries_do_not_see_each_other(options):
    model = InContextRegressor(ModelConfig(**SMALL, **options, tokens="independent"))
    tokens = model.embed(torch.randn(2, 5, 1), torch.randn(2, 5))

    def run(h):
        for _, _, _, layer in model.path():
            h = layer(h)
        return h

    moved = tokens.clone()
    moved[:, 4] += 1  # the query of pair 2
    changed = (run(moved) != run(tokens)).any(-1).any(0)
    assert changed.tolist() == [position == 4 for position in range(10)]


@pytest.mark.parametrize("diagonal", ["none", "shared", "per_head"])
def test_backends_and_single_positions_agree(diagonal):
    h = torch.randn(2, 9, 16, dtype=torch.float64)
    reference, fast = (
        CEMAttention(16, 2, 3, diagonal=diagonal, mask="independent", backend=backend).double()
        for backend in ("reference", "auto")
    )
    fast.load_state_dict(reference.state_dict())
    torch.testing.assert_close(reference(h), fast(h))
    energy, z = reference.condition(h), norm(torch.randn_like(h))
    for i in range(9):
        one = z[:, i : i + 1]
        torch.testing.assert_close(energy.at(i).gradient(one), energy.gradient(z)[:, i : i + 1])
        torch.testing.assert_close(energy.at(i).value(one), energy.value(z)[:, i : i + 1])
    assert (reference.trace(h).energy.diff(dim=0) <= 1e-12).all()
