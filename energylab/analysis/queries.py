"""Prediction from a context set: queries that see the pairs, and not each other.

This is how prior-fitted networks are trained and asked (Müller et al. 2022, arXiv 2112.10510), and how a model of this
package is compared with them. Theirs also see the context as a set; here it has an order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from energylab.models import InContextRegressor

BATCH = 32
"""Sequences that a model meets at once."""


class QueryPrediction(NamedTuple):
    """Of y at each query."""

    mean: Tensor
    variance: Tensor | None
    """None for a point prediction."""


@torch.no_grad()
def predict_queries(model: InContextRegressor, x: Tensor, y: Tensor, queries: Tensor) -> QueryPrediction:
    """Predictions (B, Q) at ``queries`` (B, Q, d_x) from the pairs x (B, n, d_x), y (B, n).

    Each query makes a sequence of its own, behind the n pairs, so it costs Q forward passes of n + 1 pairs for a task. The
    dtype and the device are the model's.
    """
    weight = next(model.parameters())
    x, y, queries = (values.to(weight) for values in (x, y, queries))
    tasks, number = queries.shape[:2]
    contexts = x[:, None].expand(-1, number, -1, -1)
    inputs = torch.cat([contexts, queries[:, :, None]], dim=2).flatten(0, 1)
    # no prediction sees its own target, so it may be anything
    targets = torch.nn.functional.pad(y[:, None].expand(-1, number, -1), (0, 1)).flatten(0, 1)
    outputs = [model(*part) for part in zip(inputs.split(BATCH), targets.split(BATCH), strict=True)]
    columns = [outputs] if isinstance(outputs[0], Tensor) else zip(*outputs, strict=True)
    last = [torch.cat(list(column))[:, -1].unflatten(0, (tasks, number)) for column in columns]
    return QueryPrediction(last[0], last[1] if len(last) > 1 else None)
