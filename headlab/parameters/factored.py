"""Matrices held as a product of two thin ones, as a head's W_QK and W_OV are.

A head's circuit is d_model × d_model but has the rank of a head, some tenth of that. Everything asked of it here (norm,
singular values, eigenvalues, products with other circuits) is had from matrices as small as the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from headlab.errors import PlanError


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """The matrix ``left @ right``, never multiplied out unless :meth:`dense` is called.

    Leading dimensions are a batch, such as the heads of a layer; ``matrix[3]`` picks from it, and so does a loop.
    Products with tensors are torch's (and numpy's) for the matrix multiplied out: a tensor of one dimension is a vector
    that every matrix of the batch is multiplied with.

    Attributes:
        left: [..., n, rank].
        right: [..., rank, m].

    Raises:
        PlanError: The two cannot be multiplied.
    """

    left: Float[Tensor, "*batch n rank"]
    right: Float[Tensor, "*batch rank m"]

    #: An array's own @ would take this for a number; without, it asks :meth:`__rmatmul__`.
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        for name, factor in (("left", self.left), ("right", self.right)):
            if not isinstance(factor, Tensor) or factor.dim() < 2:
                raise PlanError(
                    f"{name}={_shown(factor)} must be a tensor of two dimensions or more"
                )
        _check_product(self.left, self.right)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        batch = torch.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2])
        return (*batch, self.left.shape[-2], self.right.shape[-1])

    @property
    def rank(self) -> int:
        """Width of the factors: the most that the rank can be."""
        return self.left.shape[-1]

    @property
    def T(self) -> FactoredMatrix:
        """The transpose of each matrix."""
        return FactoredMatrix(self.right.mT, self.left.mT)

    def __getitem__(self, at: Any) -> FactoredMatrix:
        """Matrices of the batch.

        Raises:
            PlanError: There is no batch, or the batch has no such place.
        """
        batch = self.shape[:-2]
        if not batch:
            raise PlanError(
                "a single factored matrix has no batch to pick from; its entries are in .dense()"
            )
        try:
            place = torch.arange(prod(batch)).view(batch)[at]
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise PlanError(
                f"{at!r:.60} picks nothing from a batch of shape {tuple(batch)}; entries are in .dense()"
            ) from error
        left, right = (
            factor.expand(*batch, *factor.shape[-2:]).reshape(-1, *factor.shape[-2:])
            for factor in (self.left, self.right)
        )
        return FactoredMatrix(left[place.to(left.device)], right[place.to(right.device)])

    def __iter__(self) -> Iterator[FactoredMatrix]:
        """The matrices along the first dimension of the batch."""
        if len(self.shape) < 3:
            raise PlanError("a single factored matrix has no batch to go through")
        return (self[at] for at in range(self.shape[0]))

    def __matmul__(self, other: FactoredMatrix | Tensor) -> FactoredMatrix | Tensor:
        """The product with a tensor is a tensor; with another factored matrix it stays factored, at the lower rank.

        Raises:
            PlanError: There is no such product.
        """
        if isinstance(other, FactoredMatrix):
            _check_product(self, other)
            middle = self.right @ other.left
            if self.rank <= other.rank:
                return FactoredMatrix(self.left, middle @ other.right)
            return FactoredMatrix(self.left @ middle, other.right)
        _check_factor(other)
        column = other[:, None] if other.dim() == 1 else other
        _check_product(self, column)
        product = self.left @ (self.right @ column)
        return product.squeeze(-1) if other.dim() == 1 else product

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """``tensor @ matrix``.

        Raises:
            PlanError: There is no such product.
        """
        _check_factor(other)
        row = other[None] if other.dim() == 1 else other
        _check_product(row, self)
        product = (row @ self.left) @ self.right
        return product.squeeze(-2) if other.dim() == 1 else product

    def dense(self) -> Float[Tensor, "*batch n m"]:
        """The matrix itself."""
        return self.left @ self.right

    def to(self, dtype: torch.dtype) -> FactoredMatrix:
        """Both factors in another type."""
        return FactoredMatrix(self.left.to(dtype), self.right.to(dtype))

    def norm(self) -> Float[Tensor, "*batch"]:
        """Frobenius norm, ``‖LR‖² = tr(LᵀL · RRᵀ)``."""
        square = ((self.left.mT @ self.left) * (self.right @ self.right.mT).mT).sum((-2, -1))
        return square.clamp(min=0).sqrt()

    def trace(self) -> Float[Tensor, "*batch"]:
        """Sum of the diagonal of a square matrix."""
        self._check_square("trace")
        return (self.left.mT * self.right).sum((-2, -1))

    def eigenvalues(self) -> Complex[Tensor, "*batch rank"]:
        """Eigenvalues of a square matrix but for zeros: those of ``right @ left``.

        Matrices of the batch that hold NaN or infinity have NaN for theirs.
        """
        self._check_square("eigenvalues")
        core = self.right @ self.left
        sound = _finite(core)
        # LAPACK ends the process on NaN, or never ends
        values = torch.linalg.eigvals(_or_zero(core, sound))
        unknown = torch.full_like(values, complex(torch.nan, torch.nan))
        return torch.where(sound[..., None], values, unknown)

    def svd(
        self,
    ) -> tuple[
        Float[Tensor, "*batch n rank"], Float[Tensor, "*batch rank"], Float[Tensor, "*batch rank m"]
    ]:
        """Singular vectors and values, U, S and Vᵀ, by QR of both factors and an SVD as small as the rank.

        Matrices of the batch that hold NaN or infinity have NaN for theirs.
        """
        sound_left, sound_right = _finite(self.left), _finite(self.right)
        q_left, r_left = torch.linalg.qr(_or_zero(self.left, sound_left))
        q_right, r_right = torch.linalg.qr(_or_zero(self.right, sound_right).mT)
        core = r_left @ r_right.mT
        sound = sound_left & sound_right & _finite(core)
        u, s, vh = torch.linalg.svd(_or_zero(core, sound), full_matrices=False)
        each = sound[..., None, None]
        return (
            torch.where(each, q_left @ u, torch.nan),
            torch.where(sound[..., None], s, torch.nan),
            torch.where(each, vh @ q_right.mT, torch.nan),
        )

    def __repr__(self) -> str:
        return f"FactoredMatrix {list(self.shape)} of rank {self.rank}"

    def _check_square(self, what: str) -> None:
        n, m = self.shape[-2:]
        if n != m:
            raise PlanError(f"a matrix of {n} × {m} has no {what}; it must be square")


def _finite(matrix: Float[Tensor, "*batch n m"]) -> Bool[Tensor, "*batch"]:
    return matrix.isfinite().all(-1).all(-1)


def _or_zero(
    matrix: Float[Tensor, "*batch n m"], sound: Bool[Tensor, "*batch"]
) -> Float[Tensor, "*batch n m"]:
    """Zeros in place of the matrices that are not sound."""
    return matrix if bool(sound.all()) else torch.where(sound[..., None, None], matrix, 0)


def _check_factor(other: Any) -> None:
    if not isinstance(other, Tensor) or other.dim() == 0:
        raise PlanError(
            f"a factored matrix has no product with {_shown(other)}; give a tensor or a factored matrix"
        )


def _check_product(first: FactoredMatrix | Tensor, second: FactoredMatrix | Tensor) -> None:
    """Refuse what has no product: widths, batches, types or devices that do not fit."""
    shapes = f"matrices of shapes {tuple(first.shape)} and {tuple(second.shape)} have no product"
    if first.shape[-1] != second.shape[-2]:
        raise PlanError(
            f"{shapes}; the last dimension of the first must be the last but one of the second"
        )
    try:
        torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    except RuntimeError as error:
        raise PlanError(f"{shapes}; their leading dimensions do not fit") from error
    one, other = (
        part.left if isinstance(part, FactoredMatrix) else part for part in (first, second)
    )
    for what, ours, theirs in (
        ("type", one.dtype, other.dtype),
        ("device", one.device, other.device),
    ):
        if ours != theirs:
            raise PlanError(f"matrices of {what} {ours} and {theirs} have no product; convert one")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"


__all__ = ["FactoredMatrix"]
