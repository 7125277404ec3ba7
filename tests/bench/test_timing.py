"""The parts of a benchmark that can be wrong without anybody noticing."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from energylab.analysis.cost import LiveBytes
from energylab.bench.timing import matrix_products, medians


def test_matrix_products_are_all_of_them_and_nothing_else():
    x, w = torch.randn(5, 8, 16, requires_grad=True), torch.randn(16, 24, requires_grad=True)

    def work():
        y = torch.nn.functional.linear(x, w.T).softmax(-1)
        (y @ y.mT).sum().backward()

    replay = matrix_products(work)
    with FlopCounterMode(display=False) as all_of_it:
        work()
    with FlopCounterMode(display=False) as replayed:
        replay()
    assert replayed.get_total_flops() == all_of_it.get_total_flops() > 0


def test_functions_are_called_in_turn():
    calls = []
    seconds = medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1)
    assert calls == ["a", "b"] * 4
    assert set(seconds) == {"a", "b"}


def test_live_bytes_follow_what_is_alive():
    old = torch.ones(1000)
    with LiveBytes() as live:
        a = old * 2
        assert live.now() == 4000
        b = a + 1
        a.mul_(2)
        view = b[::2]
        assert live.now() == 8000
        del a
        assert live.now() == 4000
        del b
        assert live.now() == 4000  # its view is still there
        del view
        assert live.now() == 0
    assert live.peak == pytest.approx(8000)
