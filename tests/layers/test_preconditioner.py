import pytest
import torch

from energylab.layers.preconditioner import KINDS, make_preconditioner


def dense(preconditioner, width: int) -> torch.Tensor:
    return preconditioner(torch.eye(width, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_starts_at_the_identity_and_stays_symmetric(kind):
    preconditioner = make_preconditioner(kind, 6, rank=2).double()
    start = dense(preconditioner, 6)
    if kind != "diagonal_low_rank_positive":  # its U cannot start at 0
        torch.testing.assert_close(start, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-6)
    for parameter in preconditioner.parameters():
        torch.nn.init.normal_(parameter)
    matrix = dense(preconditioner, 6)
    torch.testing.assert_close(matrix, matrix.mT)


def test_formulas():
    softplus = torch.nn.functional.softplus
    p = make_preconditioner("diagonal_low_rank", 6, rank=2).double()
    torch.nn.init.normal_(p.right)
    expected = softplus(p.diagonal).diag() + p.left @ p.right.mT + p.right @ p.left.mT
    torch.testing.assert_close(dense(p, 6), expected)
    p = make_preconditioner("diagonal_low_rank_positive", 6, rank=2).double()
    torch.testing.assert_close(dense(p, 6), softplus(p.diagonal).diag() + p.left @ p.left.mT)
    assert (torch.linalg.eigvalsh(dense(p, 6)) > 0).all()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_parameter_learns_from_the_start(kind):
    preconditioner = make_preconditioner(kind, 6, rank=2)
    (preconditioner(torch.randn(9, 6)) * torch.randn(9, 6)).sum().backward()
    silent = {name for name, p in preconditioner.named_parameters() if not p.grad.abs().sum() > 0}
    # at V = 0 only V has a gradient; U has one as soon as V has moved
    assert silent == ({"left"} if kind == "diagonal_low_rank" else set())
