"""Singular vectors of W_OV and W_QK as tokens (Millidge & Black 2022, The singular value decompositions of transformer
weight matrices are highly interpretable).

W = Σ_k s_k u_k v_kᵀ: a direction reads the stream along u_k and writes s_k v_k (OV), or scores queries along u_k
against keys along v_k (QK). Reading sides (OV's u, QK's u and v) are shown by the embeddings that lie along them, OV's
written side by the logits it raises (:mod:`headlab.parameters.vocabulary`). The paper projects every side with one
matrix, W_E or W_U, the same in its tied models.

**Sign.** u_k and v_k may both be turned round. Here the second side's value of largest distance from the mean over the
vocabulary is positive; ``bottom`` gives the tokens at the other end, which mean as much.

**Null.** The paper judges by eye. Here a direction is as coherent as its top tokens' rows of the projecting matrix,
centred over the vocabulary, are alike: their mean pairwise cosine. Top tokens of any direction are somewhat alike,
since they share it; so the null is random directions of the stream, projected the same way, and p the share of them at
least as coherent. q-values are Benjamini and Hochberg's over all directions and sides shown. Weights are no sample, so
there is no interval.

Heads whose weights are zero, hold NaN or infinity or cannot be read have no directions; notes say which and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.arguments import count, seed_number
from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.circuits import Circuits, Distance, circuits
from headlab.parameters.rotation import check_distance
from headlab.parameters.vocabulary import (
    Space,
    n_tokens,
    token_names,
    top_tokens,
    vocabulary_table,
)
from headlab.statistics import corrected

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

_SIDES: dict[str, tuple[tuple[str, Space], tuple[str, Space]]] = {
    "OV": (("reads", "embedding"), ("writes", "unembedding")),
    "QK": (("query", "embedding"), ("key", "embedding")),
}


@dataclass(frozen=True, eq=False, repr=False)
class SingularVectors:
    """Leading singular directions of some heads.

    Attributes:
        model: Name of the model.
        circuit: ``"OV"`` or ``"QK"``.
        heads: The heads.
        values: All singular values, largest first; NaN beyond a head's rank, and for heads with a note.
        left: u of the leading directions; zeros beyond a head's rank, NaN for heads with a note.
        right: v of the leading directions, in the same way.
        frame: One line per head, direction and side: layer, head, direction, side, value (singular), share (of Σ s²),
            top, bottom (lists of token texts), top_ids, bottom_ids, coherence (mean pairwise cosine of the top tokens),
            null_mean, effect, p_value, q_value, n (random directions). Heads with a note have none.
        notes: Heads without directions, and why: ``{"L0H3": "W_OV is zero"}``.
    """

    model: str
    circuit: str
    heads: tuple[Head, ...]
    values: Float[np.ndarray, "head rank"]
    left: Float[Tensor, "head direction d_model"]
    right: Float[Tensor, "head direction d_model"]
    frame: pd.DataFrame
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def effective_rank(self) -> Float[np.ndarray, " head"]:
        """Participation ratio (Σ s²)² / Σ s⁴: how many directions carry the head; NaN for heads with a
        note."""
        square = np.nan_to_num(self.values) ** 2
        total = (square**2).sum(1)
        return np.divide(
            square.sum(1) ** 2, total, out=np.full_like(total, np.nan), where=total > 0
        )

    def __repr__(self) -> str:
        lines = [
            f"SingularVectors of {self.circuit} of {len(self.heads)} head(s) of {self.model}, "
            f"{self.left.shape[1]} directions each"
        ]
        for row in self.frame.nsmallest(3, "p_value").to_dict("records"):
            lines.append(
                f"  {Head(row['layer'], row['head'])} direction {row['direction']} {row['side']}: "
                f"{', '.join(map(repr, row['top'][:5]))} (share {row['share']:.2f}, "
                f"coherence {row['coherence']:.2f}, q {row['q_value']:.2g})"
            )
        if self.notes:
            head, why = next(iter(self.notes.items()))
            more = " …" if len(self.notes) > 1 else ""
            lines.append(
                f"  heads without directions, {len(self.notes)} in notes: {head} ({why}){more}"
            )
        return "\n".join(lines)


@torch.no_grad()
def singular_vectors(
    model: Model | Circuits,
    heads: HeadsLike = "*.*",
    circuit: Literal["OV", "QK"] = "OV",
    *,
    n: int = 5,
    k: int = 10,
    distance: Distance = 0,
    fold_norm: bool = True,
    draws: int = 2000,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> SingularVectors:
    """Singular directions of heads' circuits, as tokens.

    Args:
        model: The model, or its circuits.
        heads: The heads.
        circuit: ``"OV"`` or ``"QK"``.
        n: Directions of each head, largest singular value first.
        k: Tokens at each end of a direction, at least 2.
        distance: Distance between query and key that W_QK is taken at, where the layer rotates.
        fold_norm: Whether the final norm, but for its scale, stands in front of W_U.
        draws: Random directions of the null.
        seed: Their seed.
        tell: Told how far it is.

    Raises:
        HeadError: A head does not exist.
        PlanError: An argument is out of range.
        UnsupportedError: No head has weights that can be read and are numbers other than zero, or W_E or W_U has not.
    """
    import pandas as pd

    if not isinstance(circuit, str) or circuit not in _SIDES:
        raise PlanError(f"circuit={circuit!r:.60} must be 'OV' or 'QK'")
    n, k, draws, seed = count(n, "n"), count(k, "k", 2), count(draws, "draws"), seed_number(seed)
    made = model if isinstance(model, Circuits) else circuits(model)
    named = parse_heads(heads, made.model.spec)
    check_distance(distance, all(made.model.spec.layers[head.layer].causal for head in named))
    values, left, right, notes = _leading(made, named, circuit, distance, n, tell)
    whole, named = named, tuple(head for head in named if str(head) not in notes)
    if not named:
        why = "; ".join(f"{head}: {text}" for head, text in list(notes.items())[:3])
        raise UnsupportedError(f"no head of {made.model.name} that was named has directions: {why}")
    kept = torch.tensor([str(head) not in notes for head in whole])
    all_values, values = values, values[kept.numpy()]
    left, right = left[kept], right[kept]
    n = left.shape[1]
    sides = _SIDES[circuit]
    last_space = sides[1][1]
    signs = _signs(made.model, right.flatten(0, 1), last_space, fold_norm).view(len(named), n, 1)
    left, right = left * signs, right * signs
    found, null = [], {}
    for at, (_, space) in enumerate(sides):
        if space not in null:
            tell(f"{draws} random directions in the {space}")
            drawn = _random_directions(draws, made.model, seed).to(left)
            ids = top_tokens(made.model, drawn, k, space, fold_norm=fold_norm).ids
            null[space] = _coherence(made.model, ids, space)
        flat = (left, right)[at].flatten(0, 1)
        tell(f"tokens of {len(flat)} directions in the {space}")
        top = top_tokens(made.model, flat, k, space, fold_norm=fold_norm)
        bottom = top_tokens(made.model, flat, k, space, fold_norm=fold_norm, least=True)
        found.append((top.ids, bottom.ids, _coherence(made.model, top.ids, space)))
    power = np.nan_to_num(values) ** 2
    share = power / np.maximum(power.sum(1, keepdims=True), np.finfo(float).tiny)
    lines: list[dict[str, Any]] = []
    for (side, space), (top_ids, bottom_ids, coherence) in zip(sides, found, strict=True):
        tops, bottoms = token_names(made.model, top_ids), token_names(made.model, bottom_ids)
        for row in range(len(tops)):
            head, direction = divmod(row, n)
            if np.isnan(values[head, direction]):
                continue
            lines.append(
                {
                    "layer": named[head].layer,
                    "head": named[head].head,
                    "direction": direction,
                    "side": side,
                    "value": values[head, direction],
                    "share": share[head, direction],
                    "top": tops[row],
                    "bottom": bottoms[row],
                    "top_ids": top_ids[row].tolist(),
                    "bottom_ids": bottom_ids[row].tolist(),
                    "coherence": coherence[row],
                    "null_mean": null[space].mean(),
                    "effect": coherence[row] - null[space].mean(),
                    "p_value": (1 + (null[space] >= coherence[row]).sum()) / (1 + draws),
                }
            )
    frame = pd.DataFrame(lines)
    frame["q_value"] = corrected(frame["p_value"].to_numpy(float))
    frame["n"] = draws
    frame = frame.sort_values(["layer", "head", "direction"], kind="stable", ignore_index=True)
    left, right = (_placed(side, kept) for side in (left, right))
    return SingularVectors(made.model.name, circuit, whole, all_values, left, right, frame, notes)


def _leading(
    made: Circuits,
    heads: tuple[Head, ...],
    circuit: str,
    distance: Distance,
    n: int,
    tell: Callable[[str], None],
) -> tuple[np.ndarray, Tensor, Tensor, dict[str, str]]:
    """All singular values, and the first n vectors, of each head; and why a head has none."""
    values, left, right = [], [], []
    notes: dict[str, str] = {}
    d = made.model.spec.d_model
    n = min(n, d)
    for layer in sorted({head.layer for head in heads}):
        tell(f"singular vectors of layer {layer}")
        members = [head.head for head in heads if head.layer == layer]
        try:
            matrix = made.ov(layer) if circuit == "OV" else made.qk(layer, distance)
            u, s, vh = matrix[members].svd()
        except UnsupportedError as error:
            notes |= {str(Head(layer, head)): str(error) for head in members}
            s = torch.full((len(members), 1), torch.nan)
            u = torch.zeros(len(members), d, 1, dtype=made.dtype, device=made.model.device)
            vh = u.mT
        for head, size in zip(members, s.double().square().sum(1).tolist(), strict=True):
            if not 0 < size < np.inf:
                fault = "is zero" if size == 0 else "holds NaN or infinity"
                notes.setdefault(str(Head(layer, head)), f"W_{circuit} {fault}")
        values += list(s.double().cpu().numpy())
        left += list(_filled(u.mT, n))
        right += list(_filled(vh, n))
    width = max(map(len, values))
    table = np.full((len(values), width), np.nan)
    for row, s in zip(table, values, strict=True):
        row[: len(s)] = s
    for row, name in zip(table, map(str, heads), strict=True):
        if name in notes:
            row[:] = np.nan
    n = min(n, width)
    return table, torch.stack(left)[:, :n], torch.stack(right)[:, :n], notes


def _placed(
    vectors: Float[Tensor, "some n d_model"], kept: Bool[Tensor, " head"]
) -> Float[Tensor, "head n d_model"]:
    """Vectors of the heads that have any, NaN for the others."""
    full = vectors.new_full((len(kept), *vectors.shape[1:]), torch.nan)
    full[kept.to(full.device)] = vectors
    return full


def _filled(vectors: Float[Tensor, "head rank d_model"], n: int) -> Float[Tensor, "head n d_model"]:
    """The first n vectors, zeros where there are fewer."""
    kept = vectors[:, :n]
    return torch.nn.functional.pad(kept, (0, 0, 0, n - kept.shape[1]))


def _signs(
    model: Model, directions: Float[Tensor, "direction d_model"], space: Space, fold_norm: bool
) -> Float[Tensor, " direction"]:
    """The factor, 1 or −1, that makes the value farthest from the vocabulary's mean a positive one."""
    table, towards = vocabulary_table(model, directions, space, fold_norm=fold_norm)
    mean = towards @ table.mean(1, dtype=towards.dtype)
    ends = [
        (
            top_tokens(model, directions, 1, space, fold_norm=fold_norm, least=least).values[:, 0]
            - mean
        ).abs()
        for least in (False, True)
    ]
    return torch.where(ends[0] >= ends[1], 1.0, -1.0).to(directions)


def _random_directions(n: int, model: Model, seed: int) -> Float[Tensor, "n d_model"]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, model.spec.d_model, generator=generator)
    return drawn / drawn.norm(dim=1, keepdim=True)


def _coherence(
    model: Model, ids: Int[Tensor, "direction k"], space: Space
) -> Float[np.ndarray, " direction"]:
    """Mean pairwise cosine of tokens' rows of W_E, or columns of W_U, less their mean over the vocabulary."""
    table = model.weights.W_E if space == "embedding" else model.weights.W_U.T
    table = table[: n_tokens(model, len(table))]
    mean = table.mean(0, dtype=torch.float32)
    found = []
    for some in ids.split(64):
        rows = table[some.to(table.device)].float() - mean  # [direction, k, d_model]
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        k = rows.shape[1]
        found.append((rows.sum(1).square().sum(-1) - k) / (k * (k - 1)))
    return torch.cat(found).double().cpu().numpy()


__all__ = ["SingularVectors", "singular_vectors"]
