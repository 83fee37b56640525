"""Factored matrices against the same computed densely in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headlab.errors import PlanError
from headlab.parameters.factored import FactoredMatrix


def made(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def heads() -> FactoredMatrix:
    return FactoredMatrix(made(3, 12, 4), made(3, 4, 12, seed=1))


def test_norm_trace_and_products(heads: FactoredMatrix) -> None:
    dense = heads.left @ heads.right
    torch.testing.assert_close(heads.norm(), torch.linalg.matrix_norm(dense))
    torch.testing.assert_close(heads.trace(), dense.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(heads.T.dense(), dense.mT)
    x = made(5, 12, seed=2)
    torch.testing.assert_close(x @ heads, x @ dense)
    torch.testing.assert_close(heads @ x.T, dense @ x.T)
    assert heads[1].shape == (12, 12)
    torch.testing.assert_close(heads[1].dense(), dense[1])


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (3, 3)])
def test_products_stay_factored_at_the_lower_rank(ranks: tuple[int, int]) -> None:
    first = FactoredMatrix(made(12, ranks[0]), made(ranks[0], 9, seed=1))
    second = FactoredMatrix(made(9, ranks[1], seed=2), made(ranks[1], 7, seed=3))
    product = first @ second
    assert isinstance(product, FactoredMatrix)
    assert product.rank == min(ranks)
    torch.testing.assert_close(product.dense(), first.dense() @ second.dense())


def test_singular_values_and_vectors(heads: FactoredMatrix) -> None:
    u, s, vh = heads.svd()
    torch.testing.assert_close(s, torch.linalg.svdvals(heads.dense())[:, :4])
    torch.testing.assert_close(u @ torch.diag_embed(s) @ vh, heads.dense())
    torch.testing.assert_close(u.mT @ u, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    torch.testing.assert_close(vh @ vh.mT, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))


def test_eigenvalues_are_the_nonzero_ones(heads: FactoredMatrix) -> None:
    for head in range(3):
        dense = torch.linalg.eigvals(heads[head].dense())
        largest = dense[dense.abs().argsort(descending=True)[:4]]
        ours = heads[head].eigenvalues()
        for value in ours:
            assert float((largest - value).abs().min()) < 1e-9
        torch.testing.assert_close(ours.sum().real, dense.sum().real)


def test_what_has_no_meaning_is_refused(heads: FactoredMatrix) -> None:
    with pytest.raises(PlanError, match="have no product"):
        FactoredMatrix(made(3, 4), made(5, 3))
    with pytest.raises(PlanError, match="no batch to pick from"):
        heads[0][0]
    with pytest.raises(PlanError, match="must be square"):
        FactoredMatrix(made(3, 2), made(2, 4)).eigenvalues()
