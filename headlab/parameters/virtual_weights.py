"""Virtual weights: what a head's circuit becomes when its stream is what earlier heads wrote (Elhage et al. 2021).

    virtual_ov:  W_OV(early) · W_OV(late)               a virtual attention head, moving what two heads move in turn
    virtual_qk:  W_OV(a) · W_QK(late) · W_OV(b)ᵀ        scores between what head a brought to the query and what head b
                                                        brought to the key; either may be left out, the stream itself

An induction head is a virtual_qk whose key side passes a previous-token head. Products stay factored; norms between the
heads are folded but for their scale, so sizes are right up to a positive number per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.arguments import count, finite_number
from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.parameters.circuits import Circuits, Distance, circuits
from headlab.parameters.factored import FactoredMatrix
from headlab.parameters.rotation import check_distance
from headlab.parameters.vocabulary import Space, check_values, n_tokens, vocabulary_table

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Entries of the token × token matrix that are held at once.
_BUDGET = 1 << 24


def virtual_ov(model: Model | Circuits, early: HeadsLike, late: HeadsLike) -> FactoredMatrix:
    """The virtual head of two heads, [d_model, d_model], acting from the right on the stream the early head reads.

    Raises:
        HeadError: A head does not exist, or *late* lies in no later layer than *early*.
        UnsupportedError: The weights cannot be read.
    """
    made = _circuits(model)
    first, second = _one(made, early), _one(made, late)
    _check_order(first, second)
    return _product(made.ov(first.layer)[first.head], made.ov(second.layer)[second.head])


def virtual_qk(
    model: Model | Circuits,
    late: HeadsLike,
    q_from: HeadsLike | None = None,
    k_from: HeadsLike | None = None,
    *,
    distance: Distance = 0,
) -> FactoredMatrix:
    """A head's W_QK with earlier heads in front of its query side, its key side or both, [d_model, d_model].

    Args:
        model: The model, or its circuits.
        late: The head that scores.
        q_from: The head whose output its queries read; None for the stream itself.
        k_from: The head whose output its keys read; None for the stream itself.
        distance: Distance between query and key, where the layer rotates.

    Raises:
        HeadError: A head does not exist, or does not come before *late*.
        PlanError: The distance is none.
        UnsupportedError: The weights cannot be read.
    """
    made = _circuits(model)
    scorer = _one(made, late)
    check_distance(distance, made.model.spec.layers[scorer.layer].causal)
    matrix = made.qk(scorer.layer, distance)[scorer.head]
    for side, given in enumerate((q_from, k_from)):
        if given is None:
            continue
        writer = _one(made, given)
        _check_order(writer, scorer)
        written = made.ov(writer.layer)[writer.head]
        matrix = _product(written, matrix) if side == 0 else _product(matrix, written.T)
    return matrix


@dataclass(frozen=True, eq=False)
class Channel:
    """The subspace through which a later head can read an earlier one.

    Attributes:
        early, late: The heads.
        kind: ``"Q"``, ``"K"`` or ``"V"``: the side that reads.
        cosines: Of the principal angles between what the one writes and the other reads, largest first, [rank].
        overlap: Mean squared cosine: 1 where one subspace holds the other.
        chance: What :attr:`overlap` is for random subspaces: the larger rank over d_model.
        shares: Of the composed matrix's squared norm, per singular direction, largest first, [rank].
        effective: How many directions carry the channel: 1 / Σ shares².
    """

    early: Head
    late: Head
    kind: str
    cosines: Float[np.ndarray, " rank"]
    overlap: float
    chance: float
    shares: Float[np.ndarray, " rank"]
    effective: float

    def __repr__(self) -> str:
        return (
            f"Channel {self.early} → {self.late} ({self.kind}): overlap {self.overlap:.3f} (chance {self.chance:.3f}), "
            f"largest cosine {self.cosines[0]:.3f}, {self.effective:.1f} effective directions"
        )


@torch.no_grad()
def channel(
    model: Model | Circuits,
    early: HeadsLike,
    late: HeadsLike,
    kind: str,
    *,
    distance: Distance = 0,
    tolerance: float = 1e-5,
) -> Channel:
    """The communication subspace of a pair of heads: principal angles, and the directions that carry the composition.

    Args:
        model: The model, or its circuits.
        early: The head that writes.
        late: The head that reads.
        kind: The side that reads: ``"Q"``, ``"K"`` or ``"V"``.
        distance: Distance between query and key, where the layer rotates.
        tolerance: Singular values below this share of the largest count as zero.

    Raises:
        PlanError: There is no such kind, distance or tolerance.
        HeadError: A head does not exist, *late* lies in no later layer, or a circuit is zero.
        UnsupportedError: The weights cannot be read, or hold NaN or infinity.
    """
    if not 0 <= finite_number(tolerance, "tolerance") < 1:
        raise PlanError(f"tolerance={tolerance!r:.60} must be at least 0 and below 1")
    made = _circuits(model)
    first, second = _one(made, early), _one(made, late)
    _check_order(first, second)
    check_distance(distance, made.model.spec.layers[second.layer].causal)
    written = made.ov(first.layer)[first.head]
    if kind == "V":
        reading = made.ov(second.layer)[second.head]
    elif kind in ("Q", "K"):
        reading = made.qk(second.layer, distance)[second.head]
        reading = reading.T if kind == "K" else reading
    else:
        raise PlanError(f"kind={kind!r:.60} must be 'Q', 'K' or 'V'")
    u, s, _ = reading.svd()
    _, s_early, vh = written.svd()
    for head, values in ((first, s_early), (second, s)):
        if not bool(values.isfinite().all()):
            raise UnsupportedError(f"the weights of {head} hold NaN or infinity")
    writes, reads = vh[s_early > tolerance * s_early[0]], u[:, s > tolerance * s[0]]
    if not writes.numel() or not reads.numel():
        raise HeadError(f"{first if not writes.numel() else second} has a circuit of zeros")
    cosines = torch.linalg.svdvals(writes @ reads).clamp(max=1).double()
    strength = _product(written, reading).svd()[1].double().square()
    shares = strength / strength.sum().clamp(min=1e-300)
    return Channel(
        first,
        second,
        kind,
        cosines.cpu().numpy(),
        float(cosines.square().mean()),
        max(len(writes), reads.shape[1]) / made.model.spec.d_model,
        shares.cpu().numpy(),
        float(1 / shares.square().sum().clamp(min=1e-300)),
    )


@torch.no_grad()
def top_token_pairs(
    model: Model,
    matrix: FactoredMatrix,
    k: int = 20,
    *,
    target: Space = "embedding",
    sources: Int[Tensor, " source"] | None = None,
    fold_norm: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """The pairs of tokens with the largest entries of W_E · matrix · W_Eᵀ, or of W_E · matrix · W_U.

    Rows of W_E are taken as they are: the first norm and the first MLP are left out. Some sources at a time are
    multiplied out; the whole vocabulary takes n_vocab² · rank operations.

    Args:
        model: The model.
        matrix: One circuit, [d_model, d_model], of finite numbers.
        k: How many pairs.
        target: ``"embedding"`` for QK circuits (keys), ``"unembedding"`` for OV circuits (logits).
        sources: Token ids of the rows; all by default, padding rows aside.
        fold_norm: Whether the final norm, but for its scale, stands in front of W_U.
        tell: Told how far it is.

    Returns:
        Columns source, target (token ids), source_text, target_text, value; largest first.

    Raises:
        PlanError: The matrix does not fit the model, or an argument is out of range.
        UnsupportedError: W_E or W_U cannot be read, or holds NaN or infinity.
    """
    import pandas as pd

    spec, W_E = model.spec, model.weights.W_E
    if not isinstance(matrix, FactoredMatrix):
        raise PlanError(f"matrix={matrix!r:.60} must be a FactoredMatrix, as virtual_ov gives")
    if matrix.shape != (spec.d_model, spec.d_model):
        raise PlanError(f"a circuit of shape {matrix.shape} must be {(spec.d_model, spec.d_model)}")
    if not bool(matrix.left.isfinite().all() and matrix.right.isfinite().all()):
        raise PlanError("the matrix holds NaN or infinity")
    k = count(k, "k")
    ids = _token_ids(sources, n_tokens(model, len(W_E)))
    table, towards = vocabulary_table(model, matrix.right, target, fold_norm=fold_norm)
    columns = towards @ table.to(towards)  # [rank, n_vocab]
    check_values(model, columns, target)
    best: dict[str, Tensor] = {}
    at_once = max(1, _BUDGET // columns.shape[1])
    for start in range(0, len(ids), at_once):
        rows = ids[start : start + at_once].to(W_E.device)
        read = W_E[rows].to(matrix.left) @ matrix.left
        check_values(model, read, "embedding")
        values = (read @ columns).flatten()
        top, at = values.topk(min(k, len(values)))
        pairs = torch.stack([rows[at // columns.shape[1]], at % columns.shape[1]])
        if best:
            top, pairs = torch.cat([best["value"], top]), torch.cat([best["pairs"], pairs], 1)
            top, order = top.topk(min(k, len(top)))
            pairs = pairs[:, order]
        best = {"value": top, "pairs": pairs}
        tell(f"token pairs: {start + len(rows)} of {len(ids)} sources")
    found: dict[str, Any] = {}
    for name, row in zip(("source", "target"), best["pairs"].cpu(), strict=True):
        found[name] = row.numpy()
    for name in ("source", "target"):
        found[f"{name}_text"] = list(model.token_texts(torch.as_tensor(found[name])[None])[0])
    return pd.DataFrame(found | {"value": best["value"].double().cpu().numpy()})


def _token_ids(given: Any, n: int) -> Int[Tensor, " source"]:
    if given is None:
        return torch.arange(n)
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not whole or ids.dim() != 1 or not len(ids) or bool(((ids < 0) | (ids >= n)).any()):
        raise PlanError(
            f"sources={given!r:.60} must be token ids from 0 to {n - 1}, and at least one"
        )
    return ids.long()


def _circuits(model: Model | Circuits) -> Circuits:
    return model if isinstance(model, Circuits) else circuits(model)


def _one(made: Circuits, given: HeadsLike) -> Head:
    heads = parse_heads(given, made.model.spec)
    if len(heads) != 1:
        raise HeadError(f"{given!r} names {len(heads)} heads where one is wanted")
    return heads[0]


def _check_order(early: Head, late: Head) -> None:
    if early.layer >= late.layer:
        raise HeadError(f"{late} does not come after {early}, so it reads nothing of it")


def _product(first: FactoredMatrix, second: FactoredMatrix) -> FactoredMatrix:
    made = first @ second
    assert isinstance(made, FactoredMatrix)
    return made


__all__ = ["Channel", "channel", "top_token_pairs", "virtual_ov", "virtual_qk"]
