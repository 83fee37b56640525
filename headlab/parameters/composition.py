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
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import count, seed_number
from headlab.attention import Head
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.circuits import Circuits, Distance, circuits
from headlab.parameters.composition_null import deviation, rotations, tail_bound
from headlab.parameters.rotation import check_distance
from headlab.statistics import corrected

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

KINDS = ("Q", "K", "V")
#: Entries of a block of the product of all heads of two layers, at most.
_BUDGET = 1 << 25


@dataclass(frozen=True, eq=False, repr=False)
class Composition:
    """Composition scores of all pairs of heads; NaN where the second head lies in no later layer, or where
    :attr:`notes` say why a head has none.

    Every array is [kind, layer, head, later layer, later head], kinds in the order Q, K, V.

    Attributes:
        model: Name of the model.
        scores: Elhage et al.'s scores, 0 … 1.
        null_mean: Mean score of the pair under random rotations of what the earlier head writes.
        z: How many standard deviations of the null the squared score lies above its mean, in closed form; NaN
            where all singular values of a head are alike, d_model of them, and rotations change nothing.
        p_value: How often random rotations reach this score: (1 + hits) / (1 + draws), or below that the bound.
        q_value: p corrected for all pairs and kinds.
        baseline: Root mean square score of random matrices, 1 / √d_model.
        distance: Distance between query and key that W_QK was taken at.
        draws: Random rotations.
        notes: Heads without scores on some side, or on all, and why: ``{"L0H3": "W_OV is zero"}``.
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
    notes: dict[str, str] = field(default_factory=dict)

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
            f"Composition of {self.model}: {int((~np.isnan(self.scores)).any(0).sum())} pairs of heads, baseline "
            f"{self.baseline:.3g}, distance {self.distance}, {self.draws} rotations"
        ]
        for kind in KINDS:
            top = self.strongest(kind, 3).itertuples()
            lines.append(
                f"  {kind}: "
                + ", ".join(f"{row.early} → {row.late} {row.score:.3f}" for row in top)
            )
        if self.notes:
            head, why = next(iter(self.notes.items()))
            more = " …" if len(self.notes) > 1 else ""
            lines.append(
                f"  heads that lack scores, {len(self.notes)} in notes: {head} ({why}){more}"
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
        PlanError: There are fewer than two layers, or an argument is out of range.
        UnsupportedError: Layers read different streams (encoder-decoder models), or no pair of heads has weights that
            can be read and are numbers other than zero.
    """
    draws, seed = count(draws, "draws"), seed_number(seed)
    made = model if isinstance(model, Circuits) else circuits(model)
    spec = made.model.spec
    if len({facts.stack for facts in spec.layers}) > 1:
        raise UnsupportedError(
            f"{spec.name} ({spec.family}) has two stacks with a stream each, so its heads compose through more than "
            "one matrix; composition needs one stack of layers"
        )
    check_distance(distance, all(facts.causal for facts in spec.layers))
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
    sound = torch.cat([side.sound for side in sides], 1)
    square[~(sound[:1, :, None] & sound[1:, None])] = torch.nan
    notes = _notes(sides)
    if bool(square.isnan().all()):
        why = "; ".join(list(dict.fromkeys(notes.values()))[:3])
        raise UnsupportedError(f"no two heads of {spec.name} have a composition: {why}")
    writes = _padded([side.write_shares for side in sides])
    reads = torch.stack([_padded([side.read_shares[kind] for side in sides]) for kind in range(3)])
    mean, hits = rotations(writes, reads, square, spec.d_model, draws, seed, tell)
    z = (square - 1 / spec.d_model) / deviation(writes, reads, spec.d_model)
    p = (1 + hits) / (1 + draws)
    bound = tail_bound(writes, reads, square, spec.d_model, seed)
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
        notes,
    )


@dataclass(frozen=True)
class _Sides:
    """A layer's heads, reduced to what their composition depends on; every matrix has Frobenius norm 1 per head.

    Attributes:
        writes: S Vᵀ of W_OV, [head, rank, d_model].
        reads: U S of W_QK, of its transpose and of W_OV, each [head, d_model, rank].
        write_shares, read_shares: Their squared singular values, which sum to 1, [head, rank].
        sound: Which heads have them, [4, head]: what writes, and what reads as Q, K and V. All is zero for the others.
        why: Why a head lacks some, empty where it does not.
    """

    writes: Tensor
    reads: tuple[Tensor, ...]
    write_shares: Tensor
    read_shares: tuple[Tensor, ...]
    sound: Tensor
    why: list[str]


def _sides(made: Circuits, layer: int, distance: Distance) -> _Sides:
    ov_read, ov_share, ov_write, ov_why = _unit_svd(made, layer, "W_OV", distance)
    query, qk_share, key, qk_why = _unit_svd(made, layer, "W_QK", distance)
    writes = ov_share.sqrt()[..., None] * ov_write.mT
    pairs = ((query, qk_share), (key, qk_share), (ov_read, ov_share))
    reads = tuple(side * share.sqrt()[:, None] for side, share in pairs)
    ov, qk = ([not text for text in why] for why in (ov_why, qk_why))
    why = [
        "; ".join(dict.fromkeys(text for text in both if text))
        for both in zip(ov_why, qk_why, strict=True)
    ]
    sound = torch.tensor([ov, qk, qk, ov])
    return _Sides(writes, reads, ov_share, (qk_share, qk_share, ov_share), sound, why)


def _unit_svd(
    made: Circuits, layer: int, name: str, distance: Distance
) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """U, the shares s² / Σ s², V, and why heads have none, which have zeros then."""
    heads, d = made.model.spec.layers[layer].n_heads, made.model.spec.d_model
    try:
        matrix = made.ov(layer) if name == "W_OV" else made.qk(layer, distance)
    except UnsupportedError as error:
        nothing = torch.zeros(heads, d, 1, dtype=made.dtype, device=made.model.device)
        return nothing, nothing[:, 0], nothing, [str(error)] * heads
    u, s, vh = matrix.svd()
    square = s.double() ** 2
    why = ["" if 0 < size < np.inf else _fault(name, size) for size in square.sum(-1).tolist()]
    sound = torch.tensor([not text for text in why], device=u.device)
    share = torch.where(sound[:, None], square / square.sum(-1, keepdim=True), 0)
    each = sound[:, None, None]
    return torch.where(each, u, 0), share.to(u), torch.where(each, vh.mT, 0), why


def _fault(name: str, size: float) -> str:
    return f"{name} is zero" if size == 0 else f"{name} holds NaN or infinity"


def _notes(sides: list[_Sides]) -> dict[str, str]:
    """What is wrong with which head."""
    return {
        str(Head(layer, head)): why
        for layer, side in enumerate(sides)
        for head, why in enumerate(side.why)
        if why
    }


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
