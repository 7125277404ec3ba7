"""A whole model compiles without a graph break and computes the same."""

import pytest
import torch

from energylab.models import InContextRegressor, ModelConfig

VARIANTS = {
    "shared": {},
    "plain, rotary": {"diagonal": "none", "positions": "rotary"},
    "per head, preconditioned": {"diagonal": "per_head", "preconditioner": "diagonal_low_rank", "rank": 4},
    "refreshed, Nesterov": {"history": "refreshed", "update_rule": "nesterov"},
    "quadratic, looped": {"activation": "quadratic", "loops": 2},
    "reference": {"backend": "reference"},
    "Llama": {"attention": "llama", "mlp": "llama"},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_compiled_equals_eager(options, backend):
    if backend == "inductor" and options not in (VARIANTS["shared"], VARIANTS["plain, rotary"]):
        pytest.skip("code generation is tried on two variants")
    torch._dynamo.reset()
    model = InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, depth=1, **options))
    x, y = torch.randn(2, 6, 1), torch.randn(2, 6)
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        output = function(x, y)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
