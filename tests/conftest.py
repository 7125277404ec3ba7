import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_and_poisoned_memory():
    """One thread a worker; memory that nobody wrote is NaN, so that a test that reads it cannot pass."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
