"""Matrices held as a product of two thin ones, as a head's W_QK and W_OV are.

A head's circuit is d_model × d_model but has the rank of a head, some tenth of that. Everything asked of it here (norm,
singular values, eigenvalues, products with other circuits) is had from matrices as small as the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from headlab.errors import PlanError


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """The matrix ``left @ right``, never multiplied out unless :meth:`dense` is called.

    Leading dimensions are a batch, such as the heads of a layer; ``matrix[3]`` picks from it.

    Attributes:
        left: [..., n, rank].
        right: [..., rank, m].

    Raises:
        PlanError: The two cannot be multiplied.
    """

    left: Float[Tensor, "*batch n rank"]
    right: Float[Tensor, "*batch rank m"]

    def __post_init__(self) -> None:
        if (
            self.left.dim() < 2
            or self.right.dim() < 2
            or self.left.shape[-1] != self.right.shape[-2]
        ):
            raise PlanError(
                f"factors of shapes {tuple(self.left.shape)} and {tuple(self.right.shape)} have no product; the last "
                "dimension of the first must be the last but one of the second"
            )

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
        """Matrices of the batch."""
        batch = self.shape[:-2]
        if not batch:
            raise PlanError(
                "a single factored matrix has no batch to pick from; its entries are in .dense()"
            )
        left = self.left.expand(*batch, *self.left.shape[-2:])
        right = self.right.expand(*batch, *self.right.shape[-2:])
        return FactoredMatrix(left[at], right[at])

    def __matmul__(self, other: FactoredMatrix | Tensor) -> FactoredMatrix | Tensor:
        """The product with a tensor is a tensor; with another factored matrix it stays factored, at the lower rank."""
        if isinstance(other, Tensor):
            return self.left @ (self.right @ other)
        middle = self.right @ other.left
        if self.rank <= other.rank:
            return FactoredMatrix(self.left, middle @ other.right)
        return FactoredMatrix(self.left @ middle, other.right)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """``tensor @ matrix``."""
        return (other @ self.left) @ self.right

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
        """Eigenvalues of a square matrix but for zeros: those of ``right @ left``."""
        self._check_square("eigenvalues")
        return torch.linalg.eigvals(self.right @ self.left)

    def svd(
        self,
    ) -> tuple[
        Float[Tensor, "*batch n rank"], Float[Tensor, "*batch rank"], Float[Tensor, "*batch rank m"]
    ]:
        """Singular vectors and values, U, S and Vᵀ, by QR of both factors and an SVD as small as the rank."""
        q_left, r_left = torch.linalg.qr(self.left)
        q_right, r_right = torch.linalg.qr(self.right.mT)
        u, s, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
        return q_left @ u, s, vh @ q_right.mT

    def __repr__(self) -> str:
        return f"FactoredMatrix {list(self.shape)} of rank {self.rank}"

    def _check_square(self, what: str) -> None:
        n, m = self.shape[-2:]
        if n != m:
            raise PlanError(f"a matrix of {n} × {m} has no {what}; it must be square")


__all__ = ["FactoredMatrix"]
