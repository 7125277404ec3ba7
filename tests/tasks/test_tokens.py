"""Token layouts: what each token holds, and that no target comes before its prediction."""

import pytest
import torch

from energylab.tasks import token_layout
from energylab.tasks.tokens import LAYOUTS


@pytest.fixture(name="pairs")
def _pairs():
    x = torch.arange(1.0, 13.0).reshape(2, 3, 2)
    y = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    return x, y


def test_interleaved_written_out(pairs):
    tokens = token_layout("interleaved").encode(*pairs)
    assert (
        tokens[0].tolist()
        == torch.tensor(
            [[1, 2, 0, 0], [1, 2, 0.1, 1], [3, 4, 0, 0], [3, 4, 0.2, 1], [5, 6, 0, 0], [5, 6, 0.3, 1]]
        ).tolist()
    )


def test_split_written_out(pairs):
    tokens = token_layout("split").encode(*pairs)
    assert (
        tokens[0].tolist()
        == torch.tensor(
            [[1, 2, 0, 0], [0, 0, 0.1, 1], [3, 4, 0, 0], [0, 0, 0.2, 1], [5, 6, 0, 0], [0, 0, 0.3, 1]]
        ).tolist()
    )


def test_shifted_written_out(pairs):
    tokens = token_layout("shifted").encode(*pairs)
    assert tokens[1].tolist() == torch.tensor([[7, 8, 0], [9, 10, 0.4], [11, 12, 0.5]]).tolist()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_points", [1, 2, 7])
@pytest.mark.parametrize("input_dim", [1, 3])
def test_contract(name, num_points, input_dim):
    layout = token_layout(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_points, input_dim, generator=generator, dtype=torch.float64)
    y = torch.randn(2, num_points, generator=generator, dtype=torch.float64)
    tokens = layout.encode(x, y)
    kinds, pairs = layout.kinds(num_points)
    positions = layout.query_positions(num_points)
    assert tokens.dtype == x.dtype
    assert tokens.shape == (2, len(kinds), layout.width(input_dim))
    assert len(pairs) == len(kinds)
    assert positions.dtype == torch.long
    # The prediction of y_k is read at a query of pair k, which shows x_k.
    assert [kinds[position] for position in positions] == ["query"] * num_points
    assert [pairs[position] for position in positions] == list(range(num_points))
    assert torch.equal(tokens[:, positions, :input_dim], x)
    # Every target is somewhere, so changing it changes tokens, but only behind the query position.
    for k in range(num_points):
        changed = y.clone()
        changed[:, k] += 1
        moved = (layout.encode(x, changed) != tokens).any(-1).any(0)
        assert not moved[: positions[k] + 1].any()
        assert moved.any() or (name == "shifted" and k == num_points - 1)


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="tokens: expected one of interleaved, split, independent, shifted, got 'pfn'"):
        token_layout("pfn")
