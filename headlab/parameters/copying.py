"""Copying and anti-copying by eigenvalues of the OV circuit (Elhage et al. 2021, "Detecting copying behaviour").

A head copies when its OV circuit from tokens to logits, W_E · W_V · W_O · W_U, tends to raise the token it reads. The
score is Σ Re λ / Σ |λ| over the eigenvalues λ of that matrix: 1 where every direction of tokens raises itself, −1 where
it lowers itself. The norm before the layer, biases and the MLPs between are left out, so that it is a statement about
weights; copying by output is the role ``copying``.

The null puts a random rotation of the head's own dimensions between values and output: both read and write the
directions they did, but no longer the one from the other.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import count, finite_number, rate, seed_number
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.factored import FactoredMatrix
from headlab.parameters.relation_inputs import vocabulary_size
from headlab.statistics import corrected, p_among, random_rotations

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

Embedding: TypeAlias = Literal["raw", "unit"]

#: Distance from the null at which a head is said to copy, or to do the opposite.
MIN_EFFECT = 0.5

_TOKENS = 8192


@torch.no_grad()
def eigenvalue_copying(
    model: Model, embedding: Embedding = "raw", fold_norm: bool = True, centre: bool = False
) -> Float[np.ndarray, "layer head"]:
    """Σ Re λ / Σ |λ| of each head, in float64; NaN where weights cannot be read.

    The matrix is n_vocab × n_vocab, but its eigenvalues other than 0 are those of W_O·(W_U·W_E)·W_V, which is
    d_value × d_value.

    Args:
        model: The model.
        embedding: How rows of W_E enter: as they are, or scaled to one length, as a norm before the first layer does.
        fold_norm: Whether the final norm's weight, and a LayerNorm's centring, are folded into W_U.
        centre: Whether each direction's mean logit over the vocabulary is taken off, as softmax does.
    """
    spec = model.spec
    found = np.full((spec.n_layers, spec.n_heads), np.nan)
    circuit = _token_circuit(model, embedding, fold_norm, centre)
    if circuit is None:
        return found
    for layer in range(spec.n_layers):
        with suppress(UnsupportedError):
            values, outputs = _parts(model, layer, circuit)
            found[layer, : len(values)] = _ratio(values, outputs)
    return found


@torch.no_grad()
def copying(
    model: Model,
    *,
    embedding: Embedding = "raw",
    fold_norm: bool = True,
    centre: bool = False,
    n_null: int = 5000,
    alpha: float = 0.05,
    min_effect: float = MIN_EFFECT,
    seed: int = 0,
) -> pd.DataFrame:
    """:func:`eigenvalue_copying` of each head against heads whose values are rotated at random before their output.

    Args:
        model: The model.
        embedding, fold_norm, centre: As in :func:`eigenvalue_copying`.
        n_null: Heads to draw, with replacement, and rotate; all heads are held to all draws. No p-value is below
            twice 1 / (n_null + 1).
        alpha: False-discovery rate at which heads are claimed.
        min_effect: How far from the mean of the null a claimed head is at least: rotated heads lie so close to 0 that
            a weak leaning is as significant as a strong one.
        seed: Seed of the draws.

    Returns:
        Columns ``layer, head, score, n`` (eigenvalues), ``null_mean, effect, p_value`` (two-sided), ``q_value``,
        ``claimed``, ``kind`` (of claimed heads: ``"copies"`` or ``"anti-copies"``) and ``note``. Weights are no
        sample, so there is no interval.

    Raises:
        UnsupportedError: The model has no embedding or unembedding that can be read, or no head's values can.
        PlanError: n_null is below 1, or there is no such embedding.
    """
    import pandas as pd

    n_null, alpha, seed = count(n_null, "n_null"), rate(alpha), seed_number(seed)
    min_effect = finite_number(min_effect, "min_effect")
    spec = model.spec
    circuit = _token_circuit(model, embedding, fold_norm, centre)
    if circuit is None:
        raise UnsupportedError(
            f"{model.name} has no embedding and unembedding of one width, so no circuit leads from token to token"
        )
    scores = np.full((spec.n_layers, spec.n_heads), np.nan)
    widths = np.zeros((spec.n_layers, spec.n_heads), int)
    parts: list[tuple[Tensor, Tensor]] = []
    why = np.full((spec.n_layers, spec.n_heads), "", dtype=object)
    for layer, facts in enumerate(spec.layers):
        try:
            values, outputs = _parts(model, layer, circuit)
        except UnsupportedError as error:
            why[layer] = str(error)
            continue
        scores[layer, : facts.n_heads] = _ratio(values, outputs)
        widths[layer, : facts.n_heads] = facts.d_value
        for head, pair in enumerate(zip(values, outputs, strict=True)):
            if not np.isnan(scores[layer, head]):
                parts.append(pair)
            elif all(bool(part.isfinite().all()) for part in pair):
                why[layer, head] = "its OV circuit is 0"
            else:
                why[layer, head] = "its weights, or the embeddings, hold NaN or infinity"
    if not parts:
        raise UnsupportedError(f"no head of {model.name} can be scored: {why[0, 0]}")
    null = _rotated(parts, n_null, seed)
    mean = null.mean()
    p = np.minimum(1, 2 * np.minimum(p_among(scores, null), p_among(-scores, -null)))
    q = corrected(p)
    rows = [
        (layer, head) for layer, facts in enumerate(spec.layers) for head in range(facts.n_heads)
    ]
    at = tuple(np.array(rows).T)
    kind = np.where(scores > mean, "copies", "anti-copies")
    claimed = (q <= alpha) & (np.abs(scores - mean) >= min_effect)
    return pd.DataFrame(
        {
            "layer": at[0],
            "head": at[1],
            "score": scores[at],
            "n": widths[at],
            "null_mean": mean,
            "effect": (scores - mean)[at],
            "p_value": p[at],
            "q_value": q[at],
            "claimed": claimed[at],
            "kind": np.where(claimed, kind, "")[at],
            "note": why[at],
        }
    )


def _token_circuit(
    model: Model, embedding: Embedding, fold_norm: bool, centre: bool
) -> Float[Tensor, "d_model d_model"] | None:
    """W_U·W_E in float64, some tokens at a time: large vocabularies would not fit in it whole."""
    if embedding not in ("raw", "unit"):
        raise PlanError(f"embedding={embedding!r} must be 'raw' or 'unit'")
    weights = model.weights
    try:
        w_e, w_u = weights.W_E, weights.W_U
    except UnsupportedError:
        return None
    n = vocabulary_size(model)  # rows beyond the tokenizer's are padding
    mean = w_u[:, :n].double().mean(1, keepdim=True) if centre else 0.0
    circuit = torch.zeros(len(w_u), len(w_u), dtype=torch.float64, device=w_e.device)
    for at in range(0, n, _TOKENS):
        rows = w_e[at : min(at + _TOKENS, n)].double()
        if embedding == "unit":
            rows = rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        circuit += (w_u[:, at : at + len(rows)].to(rows) - mean) @ rows
    if fold_norm and weights.final_norm is not None:
        # Unit vectors come out as rows of the norm's linear part, weight and centring, up to one factor.
        norm = deepcopy(weights.final_norm).double()
        units = torch.eye(model.spec.d_model).to(circuit)
        circuit = (norm(units * 1e3) - norm(torch.zeros_like(units[:1]))) @ circuit
    return circuit


def _parts(
    model: Model, layer: int, circuit: Float[Tensor, "d_model d_model"]
) -> tuple[Float[Tensor, "head d_model d_value"], Float[Tensor, "head d_value d_model"]]:
    """Values of a layer's heads behind the token circuit, and their outputs."""
    facts = model.spec.layers[layer]
    values = circuit @ model.weights.W_V(layer).to(circuit)
    values = values.repeat_interleave(facts.n_heads // facts.n_kv_heads, 0)
    return values, model.weights.W_O(layer).to(circuit)


def _ratio(
    values: Float[Tensor, "pair d_model d_value"], outputs: Float[Tensor, "pair d_value d_model"]
) -> Float[np.ndarray, " pair"]:
    eigenvalues = FactoredMatrix(values, outputs).eigenvalues()
    total = eigenvalues.abs().sum(-1)
    share = eigenvalues.real.sum(-1) / total.clamp(min=1e-300)
    found: np.ndarray = torch.where(total > 0, share, torch.nan).cpu().numpy()
    return found


def _rotated(heads: list[tuple[Tensor, Tensor]], n: int, seed: int) -> Float[np.ndarray, " draw"]:
    """The ratio of n heads drawn at random, with a random rotation between values and output."""
    rng = np.random.default_rng(seed)
    found = []
    for head, times in zip(
        *np.unique(rng.integers(len(heads), size=n), return_counts=True), strict=True
    ):
        values, outputs = heads[head]
        turns = torch.from_numpy(random_rotations(times, len(outputs), rng)).to(values)
        found.append(_ratio(values @ turns, outputs.expand(times, -1, -1)))
    null = np.concatenate(found)
    return null[~np.isnan(null)]


__all__ = ["copying", "eigenvalue_copying"]
