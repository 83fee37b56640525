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


def test_vectors_are_multiplied_with_every_matrix_of_the_batch() -> None:
    batch = FactoredMatrix(made(3, 4, 2), made(3, 2, 5, seed=1))
    dense = batch.dense()
    row, column = made(4, seed=2), made(5, seed=3)
    torch.testing.assert_close(row @ batch, torch.einsum("n,bnm->bm", row, dense))
    torch.testing.assert_close(batch @ column, torch.einsum("bnm,m->bn", dense, column))
    torch.testing.assert_close(row @ batch[1], row @ dense[1])
    torch.testing.assert_close(batch[1] @ column, dense[1] @ column)
    torch.testing.assert_close(made(7, 1, 6, 4) @ batch, made(7, 1, 6, 4) @ dense)


def test_an_index_picks_matrices_and_never_their_rows(heads: FactoredMatrix) -> None:
    shared = FactoredMatrix(made(3, 12, 4), made(4, 12, seed=1))
    for matrix in (heads, shared):
        dense = matrix.left @ matrix.right
        for at in (2, -1, [0, 2], slice(1, None), (..., 0), torch.tensor([True, False, True])):
            index = at[1] if isinstance(at, tuple) else at
            torch.testing.assert_close(matrix[at].dense(), dense[index])
        torch.testing.assert_close(torch.stack([one.dense() for one in matrix]), dense)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_costs_no_other_matrix_its_values(
    heads: FactoredMatrix, bad: float
) -> None:
    left, right = heads.left.clone(), heads.right.clone()
    left[1, 3, 2] = bad
    broken = FactoredMatrix(left, right)
    values, singular = broken.eigenvalues(), broken.svd()
    for ours, whole in zip((values, *singular), (heads.eigenvalues(), *heads.svd()), strict=True):
        assert ours[1].isnan().all()
        torch.testing.assert_close(ours[[0, 2]], whole[[0, 2]])
    right[2, 0, 0] = bad
    assert FactoredMatrix(left, right).svd()[1].isnan().all(-1).tolist() == [False, True, True]
    one = FactoredMatrix(left[1], right[1])
    assert one.eigenvalues().isnan().all()
    assert one.svd()[0].isnan().all()


def test_products_that_overflow_are_nan() -> None:
    huge = made(2, 3, 3).float() * 1e38
    huge[1] = torch.eye(3)
    matrix = FactoredMatrix(huge, huge)
    assert matrix.svd()[1].isnan().all(-1).tolist() == [True, False]
    assert matrix.eigenvalues().isnan().all(-1).tolist() == [True, False]


def test_operands_that_do_not_fit_are_one_error(heads: FactoredMatrix) -> None:
    import numpy as np

    for wrong in (None, 3, torch.tensor(1.0), np.ones(12), [1.0], "a"):
        with pytest.raises(PlanError, match="has no product with"):
            heads @ wrong
        with pytest.raises(PlanError, match="has no product with"):
            wrong @ heads
    with pytest.raises(PlanError, match="last but one"):
        heads @ made(11)
    with pytest.raises(PlanError, match="last but one"):
        made(2, 11) @ heads
    with pytest.raises(PlanError, match="leading dimensions"):
        heads @ FactoredMatrix(made(2, 12, 4), made(2, 4, 12))
    with pytest.raises(PlanError, match="leading dimensions"):
        FactoredMatrix(made(3, 12, 4), made(2, 4, 12))
    with pytest.raises(PlanError, match="float32"):
        heads @ torch.ones(12)
    with pytest.raises(PlanError, match="left=None"):
        FactoredMatrix(None, None)
    for at in (9, -4, (0, 1), 1.5):
        with pytest.raises(PlanError, match="picks nothing"):
            heads[at]
