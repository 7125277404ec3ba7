"""The sampler and its floor: against formulas, gpytorch and Monte Carlo; the same from anywhere."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import random
import subprocess
import sys

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch

from energylab.tasks import FactorisationError, GaussianProcessPrior
from energylab.tasks import gaussian_process as module
from energylab.tasks.covariance import KERNELS
from energylab.tasks.gaussian_process import PRESETS, one_step_ahead

TENSORS = ("x", "y", "f", "floor_mean", "floor_variance", "floor_variance_f", "lengthscale", "output_scale")


def sample(prior, *args, **options):
    if isinstance(prior, str):
        prior = GaussianProcessPrior.preset(prior)
    return prior.sample(*args, **{"dtype": torch.float64, **options})


def assert_same(left, right):
    """Bit for bit."""
    assert left.kernel == right.kernel
    for name in TENSORS:
        assert torch.equal(getattr(left, name), getattr(right, name)), name


def rows(batch, part):
    return dataclasses.replace(
        batch, kernel=batch.kernel[part], **{name: getattr(batch, name)[part] for name in TENSORS}
    )


# --- the floor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_floor_against_a_refit_of_every_prefix(preset):
    prior = GaussianProcessPrior.preset(preset, noise_std=0.1, mean=0.7)
    batch = sample(prior, 12, 9)
    for task in range(12):
        one = rows(batch, slice(task, task + 1))
        K = prior.covariance(one.kernel[0], one.x, one.lengthscale, one.output_scale)[0]
        for k in range(9):
            solved = torch.linalg.solve(K[:k, :k] + 0.01 * torch.eye(k, dtype=torch.float64), K[:k, k])
            mean = 0.7 + solved @ (one.y[0, :k] - 0.7)
            variance = K[k, k] - solved @ K[:k, k]
            assert one.floor_mean[0, k].item() == pytest.approx(mean.item(), abs=1e-10)
            assert one.floor_variance_f[0, k].item() == pytest.approx(variance.item(), abs=1e-10)
            assert one.floor_variance[0, k].item() == pytest.approx(variance.item() + 0.01, abs=1e-10)


class Posterior(gpytorch.models.ExactGP):
    def __init__(self, x, y, lengthscale, noise_variance):
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full_like(y, noise_variance))
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel().double()
        self.covar_module.lengthscale = lengthscale

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_floor_against_the_exact_posterior_of_gpytorch():
    prior = GaussianProcessPrior.preset("rbf")
    batch = sample(prior, 2, 7)
    for task in range(2):
        x, y = batch.x[task], batch.y[task]
        for k in range(1, 7):
            model = Posterior(x[:k], y[:k], batch.lengthscale[task], 0.01 + prior.jitter).eval()
            with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
                posterior = model(x[k : k + 1])
            assert batch.floor_mean[task, k].item() == pytest.approx(posterior.mean.item(), abs=1e-7)
            assert batch.floor_variance_f[task, k].item() == pytest.approx(posterior.variance.item(), abs=1e-7)


@pytest.mark.parametrize("preset", PRESETS)
def test_floor_z_scores_are_standard_and_white(preset):
    batch = sample(preset, 1500, 32)
    z = (batch.y - batch.floor_mean) / batch.floor_variance.sqrt()
    assert scipy.stats.kstest(z.numpy().ravel(), "norm").pvalue > 1e-3
    deviation = z.numel() ** -0.5
    assert z.mean().abs() < 4 * deviation
    assert (z.square().mean() - 1).abs() < 4 * 2**0.5 * deviation
    assert (z[:, 1:] * z[:, :-1]).mean().abs() < 4 * deviation
    z_f = (batch.f - batch.floor_mean) / batch.floor_variance_f.sqrt()
    assert (z_f.square().mean() - 1).abs() < 0.05


def test_published_floor_of_the_rbf_preset():
    batch = sample("rbf", 4096, 64, stream="test")
    contexts = [0, 1, 2, 4, 8, 16, 32, 63]
    published = torch.tensor([1.00, 0.88, 0.80, 0.64, 0.42, 0.24, 0.15, 0.11], dtype=torch.float64)
    expected = batch.floor_variance.mean(0).sqrt()[contexts]
    realised = (batch.y - batch.floor_mean).square().mean(0).sqrt()[contexts]
    assert (expected - published).abs().max() < 0.02
    assert (realised - published).abs().max() < 0.03  # the realised one has a standard deviation of 0.01 at k = 0


def test_log_densities_add_up_to_the_likelihood():
    K = torch.tensor([[[2.0, 0.5, 0.3], [0.5, 1.0, 0.2], [0.3, 0.2, 1.5]]], dtype=torch.float64)
    y = torch.tensor([[0.3, -1.2, 2.0]], dtype=torch.float64)
    density = one_step_ahead(torch.linalg.cholesky(K), y, mean=0.1)[2]
    for k in range(1, 4):
        expected = scipy.stats.multivariate_normal.logpdf(y[0, :k], [0.1] * k, K[0, :k, :k])
        assert density[0, :k].sum().item() == pytest.approx(expected, abs=1e-12)


# --- the distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [*KERNELS, "rbf*periodic", "rbf+matern12"])
def test_sample_covariance(kernel):
    """With all tasks on one grid, their second moments are estimates of K."""
    prior = GaussianProcessPrior(
        kernels=(kernel,), lengthscale=(0.6, 0.6), output_scale=(0.8, 0.8), input_layout="grid"
    )
    batch = sample(prior, 20_000, 6)
    one = rows(batch, slice(0, 1))
    K = prior.covariance(kernel, one.x, one.lengthscale, one.output_scale)[0]
    for values, expected in ((batch.f, K), (batch.y, K + 0.01 * torch.eye(6, dtype=torch.float64))):
        estimate = values.mT @ values / len(batch)
        variance = expected.diagonal()
        error = ((variance[:, None] * variance + expected.square()) / len(batch)).sqrt()
        assert ((estimate - expected) / error).abs().max() < 4.5
        assert (values.mean(0) / (variance / len(batch)).sqrt()).abs().max() < 4.5
    assert (batch.y - batch.f).std().item() == pytest.approx(0.1, rel=0.02)


def test_inputs_and_hyperparameters_follow_their_laws():
    batch = sample(GaussianProcessPrior.preset("mixture", input_dim=3), 2000, 4)
    assert scipy.stats.kstest(batch.x.numpy().ravel(), scipy.stats.uniform(-2, 4).cdf).pvalue > 1e-3
    unit = batch.lengthscale.numpy() / 3**0.5
    assert scipy.stats.kstest(unit, scipy.stats.loguniform(0.25, 1).cdf).pvalue > 1e-3
    counts = [batch.kernel.count(kernel) for kernel in KERNELS]
    assert sum(counts) == 2000
    assert scipy.stats.chisquare(counts).pvalue > 1e-3

    batch = sample("np-standard", 2000, 4)
    assert scipy.stats.kstest(batch.lengthscale.numpy(), scipy.stats.uniform(0.1, 0.5).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(batch.output_scale.numpy(), scipy.stats.uniform(0.1, 0.9).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(batch.lengthscale, batch.output_scale)[0, 1]) < 0.1


def test_kernels_are_drawn_per_task():
    """A task of the mixture is that of the prior with its kernel alone."""
    mixture = sample("mixture", 40, 12)
    assert set(mixture.kernel) == set(KERNELS)
    for kernel in KERNELS:
        alone = sample(GaussianProcessPrior(kernels=(kernel,)), 40, 12)
        members = [task for task, name in enumerate(mixture.kernel) if name == kernel]
        assert torch.equal(mixture.y[members], alone.y[members])
        assert torch.equal(mixture.floor_mean[members], alone.floor_mean[members])


def test_input_layouts():
    uniform, ordered = (
        sample(GaussianProcessPrior(input_layout=kind, input_dim=2), 3, 20) for kind in ("uniform", "sorted")
    )
    assert not (uniform.x[:, 1:, 0] > uniform.x[:, :-1, 0]).all()
    assert (ordered.x[:, 1:, 0] > ordered.x[:, :-1, 0]).all()
    order = uniform.x[:, :, 0].argsort(1)
    assert torch.equal(uniform.x.gather(1, order[:, :, None].expand(-1, -1, 2)), ordered.x)
    grid = sample(GaussianProcessPrior(input_layout="grid", input_range=(0, 8)), 2, 5)
    assert grid.x[:, :, 0].tolist() == [[0, 2, 4, 6, 8]] * 2


# --- the same from anywhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_points", [1, 23, 64])
def test_a_task_does_not_depend_on_its_batch(preset, num_points, monkeypatch):
    prior = GaussianProcessPrior.preset(preset, max_points=None)
    whole = sample(prior, 40, num_points, step=5)
    for size in (1, 3, 33):
        assert_same(sample(prior, size, num_points, step=5), rows(whole, slice(0, size)))
    assert_same(sample(prior, 9, num_points, step=5, first_task=7), rows(whole, slice(7, 16)))
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 5 * num_points**2)
    assert_same(sample(prior, 40, num_points, step=5), whole)


@pytest.mark.parametrize("preset", ["rbf", "mixture"])
@pytest.mark.parametrize("input_dim", [1, 3])
def test_more_points_extend_a_task(preset, input_dim):
    prior = GaussianProcessPrior.preset(preset, input_dim=input_dim)
    short, long = sample(prior, 20, 11), sample(prior, 20, 22)
    assert short.kernel == long.kernel
    assert torch.equal(short.lengthscale, long.lengthscale)
    assert torch.equal(short.x, long.x[:, :11])
    for name in ("f", "y", "floor_mean", "floor_variance"):
        assert torch.allclose(getattr(short, name), getattr(long, name)[:, :11], rtol=0, atol=1e-9)


def test_the_same_from_worker_processes_and_after_a_restart():
    prior = GaussianProcessPrior.preset("mixture")
    here = [sample(prior, 6, 24, step=step) for step in range(4)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as workers:
        jobs = [workers.submit(prior.sample, 6, 24, step=step, dtype=torch.float64) for step in range(4)]
        for batch, job in zip(here, jobs, strict=True):
            assert_same(job.result(), batch)
    assert_same(sample(prior, 6, 24, step=3), here[3])


def test_seeds_streams_and_steps_differ():
    batches = [
        sample("rbf", 50, 20, seed=seed, stream=stream, step=step)
        for seed, stream, step in [(0, "train", 0), (1, "train", 0), (0, "test", 0), (0, "train", 1)]
    ]
    for name in ("x", "y", "f", "lengthscale"):
        values = torch.cat([getattr(batch, name).flatten() for batch in batches])
        assert len(values.unique()) == len(values), name


@pytest.mark.parametrize("num_points", [24, 801])
def test_threads_do_not_matter(num_points):
    threads = torch.get_num_threads()
    batches = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            batches.append(sample("rbf", 2, num_points))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert_same(*batches)


def test_the_callers_settings_do_not_matter():
    expected = sample("mixture", 12, 24)
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert_same(sample("mixture", 12, 24), expected)
    finally:
        torch.set_default_dtype(default)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(sample("mixture", 12, 24), expected)
    with torch.device("meta"):
        assert_same(sample("mixture", 12, 24), expected)


def test_the_global_generators_are_left_alone():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - it is the global one that is watched
    torch.manual_seed(1)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    first = sample("mixture", 8, 24)
    assert random.getstate() == before[0]
    assert str(np.random.get_state()) == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    torch.manual_seed(2)
    assert_same(sample("mixture", 8, 24), first)


def test_float32_is_the_float64_task_rounded_once():
    single, double = sample("rbf", 8, 24, dtype=torch.float32), sample("rbf", 8, 24)
    for name in TENSORS:
        assert getattr(single, name).dtype == torch.float32
        assert torch.equal(getattr(single, name), getattr(double, name).float())


def test_the_tasks_are_those_of_the_protocol():
    """Stored results were measured on them: numbers taken when gp-icl-v1 was fixed."""
    batch = sample("mixture", 3, 4, stream="test")
    assert batch.kernel == ["matern32", "rbf", "rbf"]
    for name, last in {
        "x": [0.07673962749429641, -1.0951390472301772, 1.3121931571967056],
        "y": [0.5674891556289268, 0.03887786116323344, 1.4721047777664364],
        "floor_mean": [-0.4990369202553464, 0.46162934823304114, 0.008169613631136885],
    }.items():
        assert getattr(batch, name)[:, -1].flatten().tolist() == pytest.approx(last, abs=1e-9)


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_one_point_and_no_context(preset):
    batch = sample(preset, 5, 1)
    assert batch.x.shape == (5, 1, 1)
    prior = GaussianProcessPrior.preset(preset)
    assert batch.floor_mean.abs().max() < 1e-15
    expected = batch.output_scale**2 * (1 + prior.jitter)
    assert torch.allclose(batch.floor_variance_f[:, 0], expected, rtol=0, atol=1e-15)
    assert torch.allclose(batch.floor_variance[:, 0], expected + prior.noise_std**2, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_points_are_nothing_special(kernel):
    """gpytorch's own sampling turns to an approximation above 800 points."""
    prior = GaussianProcessPrior(kernels=(kernel,))
    at_800, at_801 = sample(prior, 1, 800), sample(prior, 1, 801)
    for name in ("f", "floor_mean", "floor_variance"):
        assert torch.allclose(getattr(at_800, name), getattr(at_801, name)[:, :800], rtol=0, atol=1e-7)
    K = prior.covariance(kernel, at_801.x, at_801.lengthscale, at_801.output_scale)[0]
    solved = torch.linalg.solve(K[:800, :800] + 0.01 * torch.eye(800, dtype=torch.float64), K[:800, 800])
    assert at_801.floor_mean[0, 800].item() == pytest.approx((solved @ at_801.y[0, :800]).item(), abs=1e-9)
    assert at_801.floor_variance_f[0, 800].item() == pytest.approx(
        (K[800, 800] - solved @ K[:800, 800]).item(), abs=1e-9
    )


def test_two_thousand_points():
    batch = sample("fixed", 1, 2000)
    z = (batch.y - batch.floor_mean) / batch.floor_variance.sqrt()
    assert abs(z.square().mean().item() - 1) < 4 * (2 / 2000) ** 0.5


@pytest.mark.parametrize("kernel", KERNELS)
def test_noise_free_tasks_are_accepted(kernel):
    batch = sample(GaussianProcessPrior(kernels=(kernel,), noise_std=0), 20, 64)
    assert torch.equal(batch.y, batch.f)
    assert torch.equal(batch.floor_variance, batch.floor_variance_f)
    assert (batch.floor_variance > 0).all()
    z = (batch.y - batch.floor_mean) / batch.floor_variance.sqrt()
    assert abs(z.square().mean().item() - 1) < 0.2


@pytest.mark.parametrize("kernel", KERNELS)
def test_duplicate_inputs(kernel):
    """Two targets at one input: the second is predicted from the first, noise and jitter apart."""
    prior = GaussianProcessPrior(kernels=(kernel,), jitter=1e-6)
    x = torch.zeros(1, 2, 1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    K = prior.covariance(kernel, x, one, one) + 0.01 * torch.eye(2, dtype=torch.float64)
    mean, variance, _ = one_step_ahead(torch.linalg.cholesky(K), torch.tensor([[0.5, 9.0]], dtype=torch.float64))
    total = 1 + 1e-6 + 0.01
    assert mean[0, 1].item() == pytest.approx(0.5 / total, abs=1e-12)
    assert variance[0, 1].item() == pytest.approx(total - 1 / total, abs=1e-12)
    # A grid of whole periods, and inputs closer than a double can tell apart.
    assert sample(GaussianProcessPrior(kernels=("periodic",), input_layout="grid"), 4, 65).y.isfinite().all()
    crowded = sample(GaussianProcessPrior(kernels=(kernel,), input_range=(1.0, 1.0 + 1e-15)), 4, 32)
    assert len(crowded.x[0].unique()) < 32
    assert crowded.floor_mean.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_offset_by_500(kernel):
    """The same task up to the rounding of its inputs, which at 500 is 1e-13 and moves a rough function by its root."""
    near, far = (
        sample(GaussianProcessPrior(kernels=(kernel,), input_range=(low, low + 4)), 10, 24) for low in (-2.0, 498.0)
    )
    assert torch.allclose(near.x + 500, far.x, rtol=0, atol=1e-12)
    for name in ("f", "floor_mean", "floor_variance"):
        assert torch.allclose(getattr(near, name), getattr(far, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("input_dim", [2, 20])
def test_many_inputs(input_dim):
    batch = sample(GaussianProcessPrior.preset("mixture", input_dim=input_dim), 300, 30)
    assert batch.x.shape == (300, 30, input_dim)
    z = (batch.y - batch.floor_mean) / batch.floor_variance.sqrt()
    assert abs(z.square().mean().item() - 1) < 4 * (2 / 9000) ** 0.5


def test_a_failed_factorisation_names_its_task():
    prior = GaussianProcessPrior.preset("fixed", noise_std=0, jitter=0)
    with pytest.raises(FactorisationError, match=r"seed 3, stream 'test', step 7, task 12 .*jitter 0"):
        prior.sample(4, 64, seed=3, stream="test", step=7, first_task=12)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_all_floors_of_the_test_set_take_less_than_a_gibibyte():
    """In a process of its own, which also tells what the import brings along. Not by getrusage: a process inherits the
    peak of the one that started it.
    """
    code = """
import sys
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.predictors import marginal
prior = GaussianProcessPrior.preset("mixture")
batch = prior.sample(4096, 64)
marginal(batch.x, batch.y, prior, grid=1)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
print(*{"ray", "triton", "matplotlib"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, heavy = done.stdout.splitlines()
    assert int(peak) < 2**20  # KiB
    assert heavy == ""


# --- the prior as a value --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_prior_survives_json(preset):
    prior = GaussianProcessPrior.preset(preset, input_dim=4)
    again = GaussianProcessPrior(**json.loads(json.dumps(dataclasses.asdict(prior))))
    assert again == prior
    assert hash(again) == hash(prior)


def test_whole_numbers_are_the_same_prior():
    prior = GaussianProcessPrior(lengthscale=[1, 2], mean=0, noise_std=np.float64(1), input_dim=np.int64(2))
    assert json.dumps(dataclasses.asdict(prior)) == json.dumps(
        dataclasses.asdict(GaussianProcessPrior(lengthscale=(1.0, 2.0), mean=0.0, noise_std=1.0, input_dim=2))
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kernels", ()),
        ("kernels", "rbf"),
        ("kernels", ("rbf", 3)),
        ("kernels", 3),
        ("lengthscale", (0, 1)),
        ("lengthscale", (1, 0.5)),
        ("lengthscale", (1,)),
        ("lengthscale", 0.5),
        ("lengthscale", ("a", "b")),
        ("lengthscale", (1, float("inf"))),
        ("lengthscale_law", "normal"),
        ("output_scale", (-1, 1)),
        ("input_range", (2, 2)),
        ("input_range", (float("nan"), 2)),
        ("noise_std", -0.1),
        ("noise_std", float("nan")),
        ("noise_std", "0.1"),
        ("noise_std", True),
        ("jitter", -1e-9),
        ("period", 0),
        ("mean", float("inf")),
        ("input_dim", 0),
        ("input_dim", 21),
        ("input_dim", 1.5),
        ("max_points", 0),
        ("max_points", 50.5),
        ("input_layout", "random"),
        ("lengthscales", (1, 2)),
    ],
)
def test_a_bad_field_is_named_with_its_value(key, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        GaussianProcessPrior.preset("rbf", **{key: value})
    message = str(caught.value)
    assert message.startswith(f"{key}: expected ")
    assert message.endswith(f"got {value!r}")


def test_an_unknown_preset_or_kernel_is_named():
    with pytest.raises(ValueError, match="prior: expected one of fixed, rbf, mixture, np-standard, got 'fxed'"):
        GaussianProcessPrior.preset("fxed")
    with pytest.raises(ValueError, match=r"kernels: expected .*rbf, .*got \('cubic',\)"):
        GaussianProcessPrior(kernels=("cubic",))


def test_a_grid_has_one_input():
    with pytest.raises(ValueError, match="input_dim: expected 1 for input_layout 'grid', got 2"):
        GaussianProcessPrior(input_layout="grid", input_dim=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 0),
        ("num_points", 0),
        ("num_points", 2.5),
        ("seed", -1),
        ("step", -1),
        ("step", 2**32),
        ("first_task", -1),
        ("stream", 3),
        ("dtype", torch.int64),
    ],
)
def test_a_bad_request_is_named_with_its_value(key, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        GaussianProcessPrior().sample(**{"batch_size": 2, "num_points": 3, key: value})
    assert str(caught.value).startswith(f"{key}: expected ")
    assert str(caught.value).endswith(f"got {value!r}")


def test_a_prior_refuses_more_points_than_its_users_agree_on():
    prior = GaussianProcessPrior.preset("np-standard")
    assert prior.sample(2, 50).y.shape == (2, 50)
    with pytest.raises(ValueError, match=r"^num_points: expected at most 50, the max_points of the prior, got 51$"):
        prior.sample(2, 51)
    more = GaussianProcessPrior.preset("np-standard", max_points=None)
    assert torch.equal(sample(more, 2, 50).y, sample(prior, 2, 50).y)
