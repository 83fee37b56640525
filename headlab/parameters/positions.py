"""Where a head looks whatever the tokens are: the positional part of W_QK.

A score is bilinear in the two streams, so its mean over independent tokens at query position i and key position j is
the product of two means,

    s̄_ij = scaling · mean(q_i turned by i − j) · mean(k_j),

with q and k as the layer makes them of what stands for a token there (:func:`headlab.parameters.embed`), plus the
learned position where the model has those. The softmax of s̄ over the keys a row sees is the head's positional pattern,
and ``previous_token`` is its mean weight on the key just before the query. Means of scores are exact in layer 0; above
it the stream holds more than token and position, so this says what the weights would do with tokens alone. Definition
of our own, in the spirit of Elhage et al. 2021.

The null rotates mean queries at random among the head's dimensions: as long as they were, but pointing nowhere. Each
layer has its own, since windows and lengths of queries differ. Where a layer has learned sinks, weights are of what the
sink leaves to keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.arguments import count, rate, seed_number, whole_number
from headlab.attention import attention_chunks, keep, plain_token
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.embeddings import EmbeddingKind, doubt, embed, is_raw
from headlab.parameters.relation_inputs import vocabulary_size
from headlab.statistics import corrected, p_among, random_rotations

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

_LENGTH = 64
_BLOCKS = 16  # of tokens, for the interval
_RESAMPLES = 200
_AT_ONCE = 4096


@torch.no_grad()
def positional_patterns(
    model: Model,
    *,
    length: int | None = None,
    embedding: EmbeddingKind = "auto",
    n_tokens: int = 1024,
    seed: int = 0,
) -> Float[np.ndarray, "layer head query key"]:
    """Softmax of each head's mean score by position, over the keys each row sees; NaN where weights cannot be read.

    Args:
        model: A decoder-only model.
        length: Positions; by default 64, or all that a shorter context has.
        embedding: What stands for a token: ``"raw"``, rows of W_E; ``"mlp"``, the first MLP's output; ``"auto"``, raw
            in layer 0 and the first MLP's output above.
        n_tokens: Tokens to average over, drawn from the vocabulary.
        seed: Seed of the draw.

    Raises:
        PlanError: An argument is out of range.
        UnsupportedError: The model is not decoder-only.
    """
    means = _Means(model, length, embedding, n_tokens, seed)
    spec = model.spec
    shape = spec.n_layers, spec.n_heads, means.length, means.length
    found = np.full(shape, np.nan, np.float32)
    for layer, (query, key) in means.layers.items():
        pattern = means.pattern(layer, query.mean(0), key.mean(0))
        found[layer, : len(pattern)] = pattern.cpu().numpy()
    return found


@torch.no_grad()
def previous_token(
    model: Model,
    *,
    length: int | None = None,
    embedding: EmbeddingKind = "auto",
    n_tokens: int = 1024,
    n_null: int = 10_000,
    alpha: float = 0.05,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean weight of each head's positional pattern on the key just before the query, with its evidence.

    Args:
        model: A decoder-only model.
        length: Positions; by default 64, or all that a shorter context has.
        embedding: What stands for a token: ``"raw"``, rows of W_E; ``"mlp"``, the first MLP's output; ``"auto"``, raw
            in layer 0 and the first MLP's output above.
        n_tokens: Tokens to average over, drawn from the vocabulary.
        n_null: Rotations to draw in each layer, each of a head drawn at random; no p-value is below 1 / (n_null + 1).
        alpha: False-discovery rate at which heads are claimed.
        seed: Seed of all draws.

    Returns:
        Columns ``layer, head, score, ci_low, ci_high`` (bootstrap over tokens), ``n`` (tokens), ``null_mean, effect,
        p_value`` (one-sided), ``q_value, claimed, note``.

    Raises:
        PlanError: An argument is out of range.
        UnsupportedError: The model is not decoder-only, or no head's weights can be read.
    """
    import pandas as pd

    n_null, alpha = count(n_null, "n_null"), rate(alpha)
    spec = model.spec
    means = _Means(model, length, embedding, n_tokens, seed)
    if not means.layers:
        raise UnsupportedError(means.why[0])
    rng = np.random.default_rng(seed)
    shape = spec.n_layers, spec.n_heads
    score, low, high, null_mean, p = (np.full(shape, np.nan) for _ in range(5))
    draws = rng.integers(_BLOCKS, size=(_RESAMPLES, _BLOCKS))
    for layer, (query, key) in means.layers.items():
        heads = slice(0, query.shape[2])
        score[layer, heads] = means.previous(layer, query.mean(0), key.mean(0))
        # Every resample of every head is a pair of its own.
        many = [part[draws].mean(1).permute(1, 0, 2, 3).flatten(1, 2) for part in (query, key)]
        drawn = means.previous(layer, *many).reshape(_RESAMPLES, -1)
        low[layer, heads], high[layer, heads] = np.percentile(drawn, [2.5, 97.5], axis=0)
        known = np.flatnonzero(~np.isnan(score[layer]))
        if len(known):
            null = means.rotated(layer, known, n_null, rng)
            null_mean[layer, known], p[layer, known] = (
                null.mean(),
                p_among(score[layer, known], null),
            )
    q = corrected(p)
    notes = means.notes(score)
    rows = [
        (layer, head) for layer, facts in enumerate(spec.layers) for head in range(facts.n_heads)
    ]
    at = tuple(np.array(rows).T)
    return pd.DataFrame(
        {
            "layer": at[0],
            "head": at[1],
            "score": score[at],
            "ci_low": low[at],
            "ci_high": high[at],
            "n": means.n_tokens,
            "null_mean": null_mean[at],
            "effect": (score - null_mean)[at],
            "p_value": p[at],
            "q_value": q[at],
            "claimed": (q <= alpha)[at],
            "note": [notes[place] for place in rows],
        }
    )


class _Means:
    """Mean queries and keys of every head before rotation, per block of tokens.

    ``layers[layer]`` is the pair, each [block, position, head, d_head]; without learned positions, there is one
    position that stands for all.
    """

    def __init__(
        self, model: Model, length: int | None, embedding: EmbeddingKind, n_tokens: int, seed: int
    ) -> None:
        spec = model.spec
        if any(facts.stack != "decoder" for facts in spec.layers):
            raise UnsupportedError(
                f"positional patterns are of decoder-only models, and {model.name} has other attention"
            )
        longest = spec.max_context or _LENGTH
        length = min(_LENGTH, longest) if length is None else whole_number(length, "length", 2)
        if spec.max_context is not None and not 2 <= length <= longest:
            raise PlanError(f"length={length!r} must be 2 to {longest} positions")
        seed, known = seed_number(seed), vocabulary_size(model)
        self.n_tokens = min(whole_number(n_tokens, "n_tokens"), known) // _BLOCKS * _BLOCKS
        if not self.n_tokens:
            raise PlanError(
                f"{min(n_tokens, known)} tokens are too few to average over; it takes {_BLOCKS} at least"
            )
        self.model, self.length = model, length
        drawn = np.random.default_rng(seed).choice(known, self.n_tokens, replace=False)
        ids = torch.from_numpy(drawn).to(model.device)
        self.circuits = circuits(model)
        places = learned_positions(model, length) if spec.positions == "learned" else None
        rows: dict[bool, Tensor] = {}
        self.doubt = doubt(model, embedding) if spec.n_layers > 1 else ""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.why: dict[int, str] = {}
        chunks = attention_chunks(model)
        for layer in range(spec.n_layers):
            raw = is_raw(embedding, layer)
            if raw not in rows:
                rows[raw] = embed(model, layer, ids, embedding)
                rows[raw] = rows[raw] * model.weights.embed_scale if raw else rows[raw]
            try:
                if (chunk := chunks[layer]) is not None and chunk < length:
                    raise UnsupportedError(
                        f"layer {layer} of {model.name} attends within chunks of {chunk} tokens, so it has no pattern "
                        f"over {length} positions; give length={chunk} or less"
                    )
                self.layers[layer] = self._mean(layer, rows[raw], places)
            except UnsupportedError as error:
                self.why[layer] = str(error)

    def _mean(
        self, layer: int, x: Float[Tensor, "token d_model"], places: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.circuits.turned(
            layer, x.new_zeros(0, self.model.spec.layers[layer].d_head), 0
        )  # can it?
        made = []
        for place in [0.0] if places is None else places:
            pair = self.circuits.queries_and_keys(layer, x + place)
            made.append([part.unflatten(0, (_BLOCKS, -1)).mean(1) for part in pair])
        query, key = (torch.stack(parts, 1) for parts in zip(*made, strict=True))
        return query, key

    def pattern(
        self,
        layer: int,
        query: Float[Tensor, "position_or_1 pair d_head"],
        key: Float[Tensor, "position_or_1 pair d_head"],
    ) -> Float[Tensor, "pair query key"]:
        """Softmax of mean scores over the keys each row sees."""
        facts, n = self.model.spec.layers[layer], self.length
        at = torch.arange(n, device=query.device)
        lag = at[:, None] - at
        if len(query) == 1:
            scores = self._by_lag(layer, query[0], key[0])[:, lag.clamp(min=0)]
        else:
            scores = self._capped(layer, torch.einsum("ipe,jpe->pij", query, key))
        seen = (lag >= 0) & (lag < (facts.window or n))
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    def previous(self, layer: int, query: Tensor, key: Tensor) -> Float[np.ndarray, " pair"]:
        """Mean weight on the key just before the query; the first row has none."""
        found: list[Tensor] = []
        for q, k in zip(query.split(_AT_ONCE, 1), key.split(_AT_ONCE, 1), strict=True):
            if len(q) > 1:
                found.append(self.pattern(layer, q, k).diagonal(-1, 1, 2).mean(-1))
                continue
            # Row i sees distances 0 … i, or those of its window, so all rows share the terms of one sum.
            scores = self._by_lag(layer, q[0], k[0]).double()
            window = self.model.spec.layers[layer].window or self.length
            last = torch.arange(1, self.length, device=q.device).clamp(max=window - 1)
            weight = (scores[:, 1:2] - scores.logcumsumexp(-1)[:, last]).exp()
            found.append(weight.mean(-1) if window > 1 else torch.zeros_like(weight[:, 0]))
        joined: np.ndarray = torch.cat(found).double().cpu().numpy()
        return joined

    def _by_lag(
        self, layer: int, q: Float[Tensor, "pair d_head"], k: Float[Tensor, "pair d_head"]
    ) -> Float[Tensor, "pair lag"]:
        return self._capped(layer, self.circuits.products(layer, q, k, self.length))

    def _capped(self, layer: int, products: Tensor) -> Tensor:
        facts = self.model.spec.layers[layer]
        scores = products * facts.scaling
        return (
            scores if facts.softcap is None else facts.softcap * torch.tanh(scores / facts.softcap)
        )

    def rotated(
        self, layer: int, heads: Int[np.ndarray, " head"], n: int, rng: np.random.Generator
    ) -> Float[np.ndarray, " draw"]:
        """:meth:`previous` of n heads of a layer drawn at random, their queries rotated among the head's dimensions."""
        chosen = rng.choice(heads, n)
        query, key = (part.mean(0)[:, chosen] for part in self.layers[layer])
        width = query.shape[-1]
        if len(query) == 1:  # a rotated vector is any other of its length
            drawn = torch.from_numpy(rng.standard_normal((1, n, width))).to(query)
            size = query.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
            return self.previous(layer, drawn * size, key)
        found = []
        for start in range(0, n, _AT_ONCE):
            some = query[:, start : start + _AT_ONCE]
            turns = torch.from_numpy(random_rotations(some.shape[1], width, rng)).to(query)
            turned = torch.einsum("ipd,pde->ipe", some, turns)
            found.append(self.previous(layer, turned, key[:, start : start + _AT_ONCE]))
        return np.concatenate(found)

    def notes(self, score: Float[np.ndarray, "layer head"]) -> dict[tuple[int, int], str]:
        """What is to be said of each head."""
        said = {}
        for layer, facts in enumerate(self.model.spec.layers):
            for head in range(facts.n_heads):
                parts = [self.why.get(layer, self.doubt if layer else "")]
                if layer in self.layers and np.isnan(score[layer, head]):
                    parts.append("its weights, or the embeddings, hold NaN or infinity")
                if facts.sinks:
                    parts.append("of what the layer's learned sink leaves to keys")
                said[layer, head] = "; ".join(filter(None, parts))
        return said


def learned_positions(model: Model, length: int) -> Float[Tensor, "position d_model"]:
    """What a model with learned positions adds to each position's token, measured in a run of one token repeated.

    Raises:
        UnsupportedError: The model is not decoder-only.
    """
    token = plain_token(model)
    ids = torch.full((1, length), token)
    with model.plain():
        stream = model.trace(ids, keep=keep.tensors("resid_pre", layers=[0]), logits="none")
    bare = model.weights.W_E[token] * model.weights.embed_scale
    return stream.tensor("resid_pre", 0)[0] - bare


__all__ = ["learned_positions", "positional_patterns", "previous_token"]
