"""Composition between heads (Elhage et al. 2021, A Mathematical Framework): how much a later head reads of what an
earlier one writes.

With matrices acting from the right (u_i W_QK u_jᵀ scores a key j for a query i), the earlier head's W_OV enters the
later head's query side, key side or value side:

    Q = ‖W_OV W_QK‖ / (‖W_OV‖ ‖W_QK‖)    K = ‖W_QK W_OVᵀ‖ / (…)    V = ‖W_OV W_OV′‖ / (…)       (Frobenius norms)

**Nulls.** Turn what the earlier head writes by a random rotation of the residual stream: every singular value stays,
and only the alignment of the two heads is lost. For any two matrices whatever, the expected *squared* score is then
exactly 1 / d_model, as it is for random Gaussian matrices, the paper's baseline; so 1 / √d_model is the baseline here,
in closed form (the paper draws it). The variance has a closed form too. With e = Σ s⁴ / (Σ s²)² − 1 / d of each head's
singular values s,

    Var(score²) = 2 e e′ / ((d − 1)(d + 2)),

so that z = (score² − 1/d) / sd is exact. The mean score under rotations, and the p-value, one-sided for more
composition than rotations give, come from random rotations: a pair's score depends on no more of a rotation than a
block [rank, rank], so the same blocks serve every pair. Where no rotation drawn reaches a score, p is at most

    min over λ of exp(−λ score²) Π_ij (1 − 2 λ a_i b_j / c²)^(−1/2),    a, b = s² / Σ s² of either head,

Chernoff's bound with the moments of a Gaussian matrix in place of the block's: a Gaussian [d, rank] is an orthonormal U
times an independent H of mean c·1, and exp(λ Σ …) is convex in H, so by Jensen's inequality the Gaussian's moments are
the larger. p is the smaller of the two. q-values are Benjamini and Hochberg's over all pairs and kinds.

Weights are no sample, so scores have no interval; p speaks of alignment against random alignment and of nothing else.
Trained heads share dominant directions of the stream, so most pairs differ from random ones: rank pairs by effect or z.
Norms are folded into the matrices; sizes that depend on the token are no part of them
(:mod:`headlab.parameters.circuits`). Under RoPE, W_QK depends on the distance between query and key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import Head
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.circuits import Circuits, Distance, circuits
from headlab.parameters.factored import FactoredMatrix
from headlab.statistics import corrected

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

KINDS = ("Q", "K", "V")
_DRAWS_AT_ONCE = 32
_MEAN_DRAWS = 32
_TERMS = 400
_FACTORS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98)
#: Entries of a block of the product of all heads of two layers, at most.
_BUDGET = 1 << 25


@dataclass(frozen=True, eq=False, repr=False)
class Composition:
    """Composition scores of all pairs of heads; NaN where the second head lies in no later layer.

    Every array is [kind, layer, head, later layer, later head], kinds in the order Q, K, V.

    Attributes:
        model: Name of the model.
        scores: Elhage et al.'s scores, 0 … 1.
        null_mean: Mean score of the pair under random rotations of what the earlier head writes.
        z: How many standard deviations of the null the squared score lies above its mean, in closed form.
        p_value: How often random rotations reach this score: (1 + hits) / (1 + draws), or below that the bound.
        q_value: p corrected for all pairs and kinds.
        baseline: Root mean square score of random matrices, 1 / √d_model.
        distance: Distance between query and key that W_QK was taken at.
        draws: Random rotations.
    """

    model: str
    scores: Float[np.ndarray, "kind layer head layer2 head2"]
    null_mean: Float[np.ndarray, "kind layer head layer2 head2"]
    z: Float[np.ndarray, "kind layer head layer2 head2"]
    p_value: Float[np.ndarray, "kind layer head layer2 head2"]
    q_value: Float[np.ndarray, "kind layer head layer2 head2"]
    baseline: float
    distance: Distance
    draws: int

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per kind and pair: kind, early, late (heads), score, null_mean, baseline, effect (score −
        null_mean), above_baseline (score − baseline), z, p_value, q_value, n (draws of the null)."""
        import pandas as pd

        places = np.argwhere(~np.isnan(self.scores))
        at = tuple(places.T)
        columns: dict[str, Any] = {
            "kind": [KINDS[place[0]] for place in places],
            "early": [str(Head(int(place[1]), int(place[2]))) for place in places],
            "late": [str(Head(int(place[3]), int(place[4]))) for place in places],
            "score": self.scores[at],
            "null_mean": self.null_mean[at],
            "baseline": self.baseline,
            "effect": self.scores[at] - self.null_mean[at],
            "above_baseline": self.scores[at] - self.baseline,
            "z": self.z[at],
            "p_value": self.p_value[at],
            "q_value": self.q_value[at],
            "n": self.draws,
        }
        return pd.DataFrame(columns)

    def strongest(self, kind: str | None = None, n: int = 10) -> pd.DataFrame:
        """The n pairs with the largest effect, of one kind or of all.

        Raises:
            PlanError: There is no such kind.
        """
        if kind not in (None, *KINDS):
            raise PlanError(f"kind={kind!r} must be 'Q', 'K' or 'V'")
        frame = self.frame if kind is None else self.frame[self.frame["kind"] == kind]
        return frame.nlargest(n, "effect").reset_index(drop=True)

    def __repr__(self) -> str:
        lines = [
            f"Composition of {self.model}: {int((~np.isnan(self.scores[0])).sum())} pairs of heads, baseline "
            f"{self.baseline:.3g}, distance {self.distance}, {self.draws} rotations"
        ]
        for kind in KINDS:
            top = self.strongest(kind, 3).itertuples()
            lines.append(
                f"  {kind}: "
                + ", ".join(f"{row.early} → {row.late} {row.score:.3f}" for row in top)
            )
        return "\n".join(lines)


@torch.no_grad()
def composition(
    model: Model | Circuits,
    *,
    distance: Distance = 0,
    draws: int = 1000,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Composition:
    """Q-, K- and V-composition between all pairs of heads of different layers.

    Args:
        model: The model, or its circuits.
        distance: Distance between query and key that W_QK is taken at, several, or ``"mean"``; only layers that rotate
            depend on it.
        draws: Random rotations for the null.
        seed: Seed of the rotations.
        tell: Told how far it is.

    Raises:
        PlanError: There are fewer than two layers, or draws is no whole number of at least 1.
        UnsupportedError: Layers read different streams (encoder-decoder models), or weights cannot be read.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise PlanError(f"draws={draws!r} must be a whole number of at least 1")
    made = model if isinstance(model, Circuits) else circuits(model)
    spec = made.model.spec
    if len({facts.stack for facts in spec.layers}) > 1:
        raise UnsupportedError(
            f"{spec.name} ({spec.family}) has two stacks with a stream each, so its heads compose through more than "
            "one matrix; composition needs one stack of layers"
        )
    if spec.n_layers < 2:
        raise PlanError(f"{spec.name} has one layer, so no head comes after another")
    sides = [_sides(made, layer, distance) for layer in range(spec.n_layers)]
    counts = [facts.n_heads for facts in spec.layers]
    n = sum(counts)
    starts = np.cumsum([0, *counts])
    square = torch.full((3, n, n), torch.nan, dtype=torch.float64)
    for early in range(spec.n_layers - 1):
        tell(f"composition from layer {early} of {spec.n_layers}")
        for late in range(early + 1, spec.n_layers):
            block = _squares(sides[early].writes, sides[late].reads)
            rows, columns = slice(*starts[early : early + 2]), slice(*starts[late : late + 2])
            square[:, rows, columns] = block.double().cpu()
    writes = _padded([side.write_shares for side in sides])
    reads = torch.stack([_padded([side.read_shares[kind] for side in sides]) for kind in range(3)])
    mean, hits = _rotations(writes, reads, square, spec.d_model, draws, seed, tell)
    z = (square - 1 / spec.d_model) / _deviation(writes, reads, spec.d_model)
    p = (1 + hits) / (1 + draws)
    bound = _tail_bound(writes, reads, square, spec.d_model, seed)
    p = torch.where(hits == 0, torch.minimum(p, bound), p)
    p[square.isnan()] = mean[square.isnan()] = torch.nan
    q = corrected(p.numpy())

    def shaped(flat: Any) -> np.ndarray:
        return _by_layer(np.asarray(flat), counts)

    return Composition(
        made.model.name,
        shaped(square.sqrt()),
        shaped(mean),
        shaped(z),
        shaped(p),
        shaped(q),
        spec.d_model**-0.5,
        distance,
        draws,
    )


@dataclass(frozen=True)
class _Sides:
    """A layer's heads, reduced to what their composition depends on; every matrix has Frobenius norm 1 per head.

    Attributes:
        writes: S Vᵀ of W_OV, [head, rank, d_model].
        reads: U S of W_QK, of its transpose and of W_OV, each [head, d_model, rank].
        write_shares, read_shares: Their squared singular values, which sum to 1, [head, rank].
    """

    writes: Tensor
    reads: tuple[Tensor, ...]
    write_shares: Tensor
    read_shares: tuple[Tensor, ...]


def _sides(made: Circuits, layer: int, distance: Distance) -> _Sides:
    ov_read, ov_share, ov_write = _unit_svd(made.ov(layer))
    query, qk_share, key = _unit_svd(made.qk(layer, distance))
    writes = ov_share.sqrt()[..., None] * ov_write.mT
    pairs = ((query, qk_share), (key, qk_share), (ov_read, ov_share))
    reads = tuple(side * share.sqrt()[:, None] for side, share in pairs)
    return _Sides(writes, reads, ov_share, (qk_share, qk_share, ov_share))


def _unit_svd(matrix: FactoredMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """U, the shares s² / Σ s², and V; a matrix of zeros has shares of zero."""
    u, s, vh = matrix.svd()
    square = s.double() ** 2
    share = square / square.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return u, share.to(u), vh.mT


def _squares(
    writes: Float[Tensor, "early rank d_model"],
    reads: tuple[Float[Tensor, "late d_model rank"], ...],
) -> Float[Tensor, "kind early late"]:
    """‖writes · reads‖² of every pair of two layers' heads, a few early heads at a time."""
    found = []
    for side in reads:
        late, d, width = side.shape
        flat = side.transpose(0, 1).reshape(d, late * width)
        at_once = max(1, _BUDGET // (writes.shape[1] * late * width))
        parts = [
            (some.flatten(0, 1) @ flat)
            .square_()
            .view(len(some), writes.shape[1], late, width)
            .sum((1, 3))
            for some in writes.split(at_once)
        ]
        found.append(torch.cat(parts))
    return torch.stack(found)


def _deviation(
    writes: Float[Tensor, "head rank"], reads: Float[Tensor, "kind head rank"], d: int
) -> Float[Tensor, "kind head head2"]:
    """Standard deviation of the squared score under rotations."""
    early = writes.double().square().sum(-1) - 1 / d
    late = reads.double().square().sum(-1) - 1 / d
    variance = 2 * early[:, None] * late[:, None] / ((d - 1) * (d + 2))
    return variance.clamp(min=1e-300).sqrt()


def _rotations(
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


def _tail_bound(
    writes: Float[Tensor, "head rank"],
    reads: Float[Tensor, "kind head rank2"],
    square: Float[Tensor, "kind head head2"],
    d: int,
    seed: int,
) -> Float[Tensor, "kind head head2"]:
    """Chernoff's bound of the module's docstring, at the best of a few λ.

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


def _padded(shares: list[Tensor]) -> Float[Tensor, "head rank"]:
    """Heads of all layers, singular values filled up with zeros."""
    width = max(share.shape[1] for share in shares)
    return torch.cat(
        [torch.nn.functional.pad(share, (0, width - share.shape[1])) for share in shares]
    )


def _by_layer(
    flat: Float[np.ndarray, "kind head head2"], counts: list[int]
) -> Float[np.ndarray, "kind layer head layer2 head2"]:
    """Heads counted through as [layer, head], NaN where a layer has fewer heads."""
    layers, heads = len(counts), max(counts)
    place = np.concatenate([at * heads + np.arange(n) for at, n in enumerate(counts)])
    full = np.full((len(flat), layers * heads, layers * heads), np.nan)
    full[:, place[:, None], place] = flat
    return full.reshape(len(flat), layers, heads, layers, heads)


__all__ = ["KINDS", "Composition", "composition"]
