"""The regressor: no leak of a target, every option trains, configs name what is wrong."""

import itertools

import pytest
import torch

from energylab.layers import norm
from energylab.models import InContextRegressor, ModelConfig, count_parameters
from energylab.training import initialise

SMALL = {"width": 16, "hidden": 24, "heads": 2}
VARIANTS = {
    "CEM": {},
    "Llama": {"attention": "llama", "mlp": "llama"},
    "CEM attention alone": {"mlp": "none", "diagonal": "none"},
    "CEM attention, Llama MLP": {"mlp": "llama", "diagonal": "per_head"},
    "Llama attention, CEM MLP": {"attention": "llama"},
    "rotary": {"positions": "rotary"},
    "refreshed": {"history": "refreshed", "recursions": 3},
    "a step size each, temperature": {"step_sizes": "per_step", "temperature": 2.0},
    "heads repel, looped": {"repelling_heads": 1, "loops": 2},
    "preconditioned": {"preconditioner": "diagonal_low_rank", "rank": 4},
    "gaussian": {"head": "gaussian"},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def predictions(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else torch.stack(output)


@every_variant
@pytest.mark.parametrize("tokens", ["interleaved", "split", "shifted", "independent"])
def test_a_target_reaches_only_later_predictions(options, tokens):
    model = InContextRegressor(ModelConfig(**SMALL, **options, tokens=tokens))
    x, y = torch.randn(2, 7, 1), torch.randn(2, 7)
    before = predictions(model(x, y))
    for j in range(7):
        changed = y.clone()
        changed[:, j] += 1
        after = predictions(model(x, changed))
        assert torch.equal(before[..., : j + 1], after[..., : j + 1])
        if j + 1 < 7:
            assert not torch.equal(before[..., j + 1], after[..., j + 1])


@every_variant
def test_an_input_reaches_its_own_prediction(options):
    model = InContextRegressor(ModelConfig(**SMALL, **options, input_dim=3))
    x, y = torch.randn(2, 5, 3), torch.randn(2, 5)
    changed = x.clone()
    changed[:, 2, 1] += 1
    before, after = predictions(model(x, y)), predictions(model(changed, y))
    assert torch.equal(before[..., :2], after[..., :2])
    assert (before[..., 2:] != after[..., 2:]).all()


@every_variant
def test_every_parameter_has_a_gradient(options):
    model = InContextRegressor(ModelConfig(**SMALL, **options))
    predictions(model(torch.randn(4, 6, 1), torch.randn(4, 6))).square().sum().backward()
    silent = {name.rsplit(".")[-1] for name, p in model.named_parameters() if not p.grad.abs().sum() > 0}
    assert silent <= {"left"}  # U of the preconditioner, while V is still 0


def test_traces_follow_the_model():
    config = ModelConfig(**SMALL, attention_recursions=3, mlp_recursions=1, depth=2)
    model = InContextRegressor(config)
    x, y = torch.randn(2, 5, 1), torch.randn(2, 5)
    traces = model.trace(x, y)
    assert [trace.name for trace in traces] == [
        "block 0 attention",
        "block 0 mlp",
        "block 1 attention",
        "block 1 mlp",
    ]
    assert [len(trace.energy) for trace in traces] == [4, 2, 4, 2]
    for trace in traces:
        assert trace.tokens == ("query", "pair") * 5
        assert trace.pairs.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert torch.equal(traces[0].states[0], model.embed(x, y))
    for before, after in itertools.pairwise(traces):
        assert torch.equal(before.states[-1], after.states[0])
    last = norm(traces[-1].states[-1][:, ::2])
    assert torch.equal(model(x, y), model.read_out(last).squeeze(-1))


def test_only_energy_layers_are_traced():
    llama = InContextRegressor(ModelConfig(**SMALL, attention="llama", mlp="llama"))
    assert llama.trace(torch.randn(2, 5, 1), torch.randn(2, 5)) == []
    mixed = InContextRegressor(ModelConfig(**SMALL, attention="llama", depth=1))
    assert [trace.name for trace in mixed.trace(torch.randn(2, 5, 1), torch.randn(2, 5))] == ["block 0 mlp"]


def test_recursions_add_no_parameters():
    counts = {count_parameters(InContextRegressor(ModelConfig(recursions=T))) for T in (1, 2, 4, 8)}
    assert len(counts) == 1


def test_a_step_size_each():
    layers = InContextRegressor(ModelConfig(step_sizes="per_step", attention_recursions=3, mlp_recursions=2)).layers
    assert [layer.step_size.tolist() for layer in layers[:2]] == [pytest.approx([1 / 3] * 3), pytest.approx([0.5] * 2)]


def test_the_gaussian_head_gives_a_variance():
    mean, variance = InContextRegressor(ModelConfig(**SMALL, head="gaussian"))(torch.randn(3, 4, 1), torch.randn(3, 4))
    assert mean.shape == variance.shape == (3, 4)
    assert (variance > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recursions": 0}, "recursions: expected an integer of at least 1, got 0"),
        ({"mlp_recursions": -1}, "mlp_recursions: expected an integer of at least 1, got -1"),
        ({"width": 64, "heads": 5}, "heads: expected a divisor of the width 64"),
        ({"depth": 0}, "depth: expected an integer of at least 1, got 0"),
        ({"attention": "gpt"}, "attention: expected one of cem, llama, got 'gpt'"),
        ({"mlp": "gpt"}, "mlp: expected one of cem, llama, none, got 'gpt'"),
        (
            {"attention": "llama", "mlp": "llama", "diagonal": "full"},
            "diagonal: expected one of none, shared, per_head",
        ),
        ({"tokens": "words"}, "tokens: expected one of"),
        ({"head": "two"}, "head: expected one of point, gaussian, got 'two'"),
        ({"rank": 100, "preconditioner": "diagonal_low_rank"}, "rank: expected 1 to the width 64, got 100"),
        ({"step_sizes": "two"}, "step_sizes: expected one of shared, per_step, got 'two'"),
        ({"temperature": -1.0}, "temperature: expected a positive number, got -1.0"),
        ({"initial_step_size": 0}, "initial_step_size: expected a positive number, got 0"),
        ({"history": "old"}, "history: expected one of fixed, refreshed, got 'old'"),
        ({"positions": "rotary", "width": 12, "heads": 4}, "head_dim: expected an even number"),
    ],
)
def test_bad_configs_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@pytest.mark.parametrize(("x", "y"), [((2, 5, 3), (2, 5)), ((2, 5), (2, 5)), ((2, 5, 1), (2, 4))])
def test_inputs_of_other_shapes_are_named(x, y):
    with pytest.raises(ValueError, match=r"x, y: expected shapes \(B, N, 1\) and \(B, N\), got"):
        InContextRegressor(ModelConfig(**SMALL))(torch.randn(x), torch.randn(y))


def test_recomputing_changes_memory_and_no_number():
    x, y = torch.randn(2, 5, 1), torch.randn(2, 5)
    gradients = []
    for recompute in (False, True):
        model = initialise(ModelConfig(width=16, heads=2, hidden=16, recursions=3, recompute=recompute), seed=0)
        model(x, y).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_signs_are_no_parameters() -> None:
    models = [InContextRegressor(ModelConfig(width=8, heads=2, repelling_heads=heads)) for heads in (0, 1)]
    assert count_parameters(models[0]) == count_parameters(models[1])
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    assert models[1].layers[0].sign.tolist() == [1, -1]


def test_the_first_step_size_is_one_over_T_unless_told() -> None:
    def step_sizes(**options) -> list[float]:
        model = InContextRegressor(ModelConfig(width=8, heads=2, recursions=2, mlp_recursions=4, **options))
        return [layer.step_size.tolist() for layer in model.layers[:2]]

    assert step_sizes() == [0.5, 0.25]
    assert step_sizes(initial_step_size=0.125) == [0.125, 0.125]
    assert step_sizes(initial_step_size=0.125, step_sizes="per_step") == [[0.125] * 2, [0.125] * 4]
