"""Queries that see the context and not each other."""

import pytest
import torch

from energylab.analysis.queries import predict_queries
from energylab.models import InContextRegressor, ModelConfig


@pytest.mark.parametrize("head", ["point", "gaussian"])
@pytest.mark.parametrize("num_pairs", [0, 4])
def test_each_query_stands_alone_behind_the_context(head, num_pairs):
    model = InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, depth=2, input_dim=2, head=head))
    x, y, queries = torch.randn(2, num_pairs, 2), torch.randn(2, num_pairs), torch.randn(2, 35, 2)
    mean, variance = predict_queries(model, x, y, queries)
    assert mean.shape == (2, 35)
    assert (variance is None) == (head == "point")
    with torch.no_grad():
        one = model(torch.cat([x[1], queries[1, 7:8]])[None], torch.cat([y[1], torch.tensor([99.0])])[None])
    last = [values[0, -1] for values in (one if head == "gaussian" else [one])]
    assert mean[1, 7].item() == pytest.approx(last[0].item(), abs=1e-5)
    if variance is not None:
        assert variance[1, 7].item() == pytest.approx(last[1].item(), abs=1e-5)

    moved = queries.clone()
    moved[:, 3] += 1
    again = predict_queries(model, x, y, moved).mean
    same = torch.arange(35) != 3
    assert torch.equal(again[:, same], mean[:, same])
    assert not torch.equal(again[:, 3], mean[:, 3])
    if num_pairs:
        y[:, -1] += 1
        assert (predict_queries(model, x, y, queries).mean != mean).all()
