"""Composition scores under random rotations of what the earlier head writes: their mean, deviation and tail; formulas
in :mod:`headlab.parameters.composition`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

_DRAWS_AT_ONCE = 32
_MEAN_DRAWS = 32
_TERMS = 400
_FACTORS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98)
#: Shares of singular values more even than this are even but for rounding, and rotations change nothing.
_EVEN = 1e-6


def deviation(
    writes: Float[Tensor, "head rank"], reads: Float[Tensor, "kind head rank"], d: int
) -> Float[Tensor, "kind head head2"]:
    """Standard deviation of the squared score under rotations; NaN where they change nothing."""
    early, late = (shares.double().square().sum(-1) - 1 / d for shares in (writes, reads))
    variance = 2 * early[:, None] * late[:, None] / ((d - 1) * (d + 2))
    even = (early < _EVEN / d)[:, None] | (late < _EVEN / d)[:, None]
    return torch.where(even, torch.nan, variance.sqrt())


def rotations(
    writes: Float[Tensor, "head rank"],
    reads: Float[Tensor, "kind head rank2"],
    square: Float[Tensor, "kind head head2"],
    d: int,
    draws: int,
    seed: int,
    tell: Callable[[str], None],
) -> tuple[Float[Tensor, "kind head head2"], Float[Tensor, "kind head head2"]]:
    """Mean score of each pair over random rotations, and how many of them reach the pair's own squared score.

    In the singular vectors of both heads a rotation is a block T of a random orthogonal matrix, and the squared score
    is Σ_ij share_i T_ij² share′_j.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds, heads, width = reads.shape
    own = square.to(writes).nan_to_num(nan=torch.inf)
    flat = reads.reshape(kinds * heads, width)
    mean, hits = torch.zeros(square.shape), torch.zeros(square.shape)
    for start in range(0, draws, _DRAWS_AT_ONCE):
        n = min(_DRAWS_AT_ONCE, draws - start)
        normal = torch.randn(n, d, width, generator=generator).to(writes)
        turned = _orthonormal(normal)[:, : writes.shape[1]].square()
        for block in turned:
            drawn = (writes @ block @ flat.T).view(heads, kinds, heads).transpose(0, 1)
            mean += drawn.sqrt().cpu()
            hits += (drawn >= own * (1 - 1e-6)).cpu()
        if start % (8 * _DRAWS_AT_ONCE) == 0:
            tell(f"{start + n} of {draws} random rotations")
    return mean.double() / draws, hits.double()


def tail_bound(
    writes: Float[Tensor, "head rank"],
    reads: Float[Tensor, "kind head rank2"],
    square: Float[Tensor, "kind head head2"],
    d: int,
    seed: int,
) -> Float[Tensor, "kind head head2"]:
    """Chernoff's bound on how often rotations reach a squared score, at the best of a few λ.

    With f = 2 λ a_1 b_1 / c² the logarithm of the product is Σ_m f^m / 2m · Σ_i (a_i / a_1)^m · Σ_j (b_j / b_1)^m, and
    what is cut off after M terms is less than f^(M + 1) / (2 (M + 1) (1 − f)) times the last two sums.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = min(reads.shape[-1], d)
    normal = torch.randn(_MEAN_DRAWS, d, rank, generator=generator, dtype=torch.float64)
    mean = torch.linalg.eigvalsh(normal.mT @ normal).clamp(min=0).sqrt().mean()
    largest = [shares.double().max(-1).values.clamp(min=1e-300) for shares in (writes, reads)]
    powers = torch.arange(1, _TERMS + 1, dtype=torch.float64, device=writes.device)
    sums = [
        torch.stack([(shares.double() / top[..., None]).pow(m).sum(-1) for m in powers], -1)
        for shares, top in zip((writes, reads), largest, strict=True)
    ]
    x = square * float(mean**2) / (2 * largest[0][:, None] * largest[1][:, None, :]).cpu()
    best = torch.zeros_like(square)
    for f in _FACTORS:
        weight = f**powers / (2 * powers)
        product = torch.einsum("em,klm->kel", sums[0] * weight, sums[1])
        last = torch.einsum("e,kl->kel", sums[0][..., -1], sums[1][..., -1])
        product += last * f ** (_TERMS + 1) / (2 * (_TERMS + 1) * (1 - f))
        best = torch.minimum(best, product.cpu() - f * x)
    return best.exp().clamp(min=1e-300)


def _orthonormal(normal: Float[Tensor, "draw d rank"]) -> Float[Tensor, "draw d rank"]:
    """Random orthonormal columns, uniform over all such: QR with positive diagonal (Mezzadri 2007)."""
    q, r = torch.linalg.qr(normal)
    signs: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return signs


__all__ = ["deviation", "rotations", "tail_bound"]
