"""Where a head looks whatever the tokens are: the positional part of W_QK.

A score is bilinear in the two streams, so its mean over independent tokens at query position i and key position j is
the product of two means,

    s̄_ij = scaling · mean(q_i turned by i − j) · mean(k_j),

with q and k as the layer makes them of what stands for a token there (:func:`headlab.parameters.embed`), plus the
learned position where the model has those. The softmax of s̄ over the keys a row sees is the head's positional pattern,
and ``previous_token`` is its mean weight on the key just before the query. Means of scores are exact in layer 0; above
it the stream holds more than token and position, so this says what the weights would do with tokens alone. Definition
of our own, in the spirit of Elhage et al. 2021.

The null rotates a head's mean queries at random among its dimensions: as long as they were, but pointing nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import keep
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.embeddings import EmbeddingKind, embed, is_raw
from headlab.statistics import corrected, p_among

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

_BLOCKS = 16  # of tokens, for the interval
_RESAMPLES = 200


@torch.no_grad()
def positional_patterns(
    model: Model,
    *,
    length: int = 64,
    embedding: EmbeddingKind = "auto",
    n_tokens: int = 1024,
    seed: int = 0,
) -> Float[np.ndarray, "layer head query key"]:
    """Softmax of each head's mean score by position, over the keys each row sees; NaN where weights cannot be read.

    Args:
        model: A decoder-only model.
        length: Positions.
        embedding: What stands for a token; see :func:`headlab.parameters.embed`.
        n_tokens: Tokens to average over, drawn from the vocabulary.
        seed: Seed of the draw.

    Raises:
        PlanError: An argument is out of range.
        UnsupportedError: The model is not decoder-only.
    """
    means = _Means(model, length, embedding, n_tokens, seed)
    spec = model.spec
    found = np.full((spec.n_layers, spec.n_heads, length, length), np.nan, np.float32)
    for layer, (query, key) in means.layers.items():
        pattern = means.pattern(layer, query.mean(0), key.mean(0))
        found[layer, : len(pattern)] = pattern.cpu().numpy()
    return found


@torch.no_grad()
def previous_token(
    model: Model,
    *,
    length: int = 64,
    embedding: EmbeddingKind = "auto",
    n_tokens: int = 1024,
    n_null: int = 2000,
    alpha: float = 0.05,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean weight of each head's positional pattern on the key just before the query, with its evidence.

    Args:
        model: A decoder-only model.
        length: Positions.
        embedding: What stands for a token; see :func:`headlab.parameters.embed`.
        n_tokens: Tokens to average over, drawn from the vocabulary.
        n_null: Heads to draw, with replacement, and rotate; all heads are held to all draws.
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

    if n_null < 1:
        raise PlanError(f"n_null={n_null!r} must be at least 1")
    spec = model.spec
    means = _Means(model, length, embedding, n_tokens, seed)
    if not means.layers:
        raise UnsupportedError(means.why[0])
    rng = np.random.default_rng(seed)
    shape = spec.n_layers, spec.n_heads
    score, low, high = (np.full(shape, np.nan) for _ in range(3))
    draws = rng.integers(_BLOCKS, size=(_RESAMPLES, _BLOCKS))
    for layer, (query, key) in means.layers.items():
        heads = slice(0, query.shape[2])
        score[layer, heads] = means.previous(layer, query.mean(0), key.mean(0))
        # Every resample of every head is a pair of its own.
        many = [part[draws].mean(1).permute(1, 0, 2, 3).flatten(1, 2) for part in (query, key)]
        drawn = means.previous(layer, *many).reshape(_RESAMPLES, -1)
        low[layer, heads], high[layer, heads] = np.percentile(drawn, [2.5, 97.5], axis=0)
    null = means.rotated(n_null, rng)
    p = p_among(score, null)
    q = corrected(p)
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
            "null_mean": null.mean(),
            "effect": score[at] - null.mean(),
            "p_value": p[at],
            "q_value": q[at],
            "claimed": (q <= alpha)[at],
            "note": [means.why.get(layer, "") for layer in at[0]],
        }
    )


class _Means:
    """Mean queries and keys of every head before rotation, per block of tokens.

    ``layers[layer]`` is the pair, each [block, position, head, d_head]; without learned positions, there is one
    position that stands for all.
    """

    def __init__(
        self, model: Model, length: int, embedding: EmbeddingKind, n_tokens: int, seed: int
    ) -> None:
        spec = model.spec
        if any(facts.stack != "decoder" for facts in spec.layers):
            raise UnsupportedError(
                f"positional patterns are of decoder-only models, and {model.name} has other attention"
            )
        longest = spec.max_context or length
        if not 2 <= length <= longest:
            raise PlanError(f"length={length!r} must be 2 to {longest} positions")
        self.n_tokens = min(n_tokens, spec.n_vocab) // _BLOCKS * _BLOCKS
        if not self.n_tokens:
            raise PlanError(
                f"{min(n_tokens, spec.n_vocab)} tokens are too few to average over; it takes {_BLOCKS} at least"
            )
        self.model, self.length = model, length
        drawn = np.random.default_rng(seed).choice(spec.n_vocab, self.n_tokens, replace=False)
        ids = torch.from_numpy(drawn).to(model.device)
        self.circuits = circuits(model)
        places = learned_positions(model, length) if spec.positions == "learned" else None
        rows: dict[bool, Tensor] = {}
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.why: dict[int, str] = {}
        for layer in range(spec.n_layers):
            raw = is_raw(embedding, layer)
            if raw not in rows:
                rows[raw] = embed(model, layer, ids, embedding)
                rows[raw] = rows[raw] * model.weights.embed_scale if raw else rows[raw]
            try:
                self.layers[layer] = self._mean(layer, rows[raw], places)
            except UnsupportedError as error:
                self.why[layer] = str(error)

    def _mean(
        self, layer: int, x: Float[Tensor, "token d_model"], places: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.circuits.turned(layer, x[:0, : self.model.spec.layers[layer].d_head], 0)  # can it be?
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
        if self.circuits.rotates(layer):
            turned = torch.stack([self.circuits.turned(layer, query, d) for d in range(n)], 1)
            by_lag = torch.einsum("idpe,jpe->ijpd", turned, key)  # [query, key, pair, distance]
            by_lag = by_lag.expand(n, n, -1, -1)
            scores = by_lag.gather(
                3, lag.clamp(min=0)[:, :, None, None].expand(n, n, by_lag.shape[2], 1)
            )
            scores = scores[..., 0].permute(2, 0, 1)
        else:
            scores = torch.einsum("ipe,jpe->pij", query, key).expand(-1, n, n)
        scores = scores * facts.scaling
        if facts.softcap is not None:
            scores = facts.softcap * torch.tanh(scores / facts.softcap)
        seen = (lag >= 0) & (lag < (facts.window or n))
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    def previous(self, layer: int, query: Tensor, key: Tensor) -> Float[np.ndarray, " pair"]:
        """Mean weight on the key just before the query; the first row has none."""
        pattern = self.pattern(layer, query, key)
        found: np.ndarray = pattern.diagonal(-1, 1, 2).mean(-1).double().cpu().numpy()
        return found

    def rotated(self, n: int, rng: np.random.Generator) -> Float[np.ndarray, " draw"]:
        """:meth:`previous` of n heads drawn at random, their queries rotated among the head's dimensions."""
        heads = [
            (layer, head) for layer, (q, _) in self.layers.items() for head in range(q.shape[2])
        ]
        drawn: dict[int, list[int]] = {}
        for at in rng.integers(len(heads), size=n):
            layer, head = heads[at]
            drawn.setdefault(layer, []).append(head)
        found = []
        for layer, chosen in drawn.items():
            query, key = (part.mean(0)[:, chosen] for part in self.layers[layer])
            width = query.shape[-1]
            turns = np.linalg.qr(rng.standard_normal((len(chosen), width, width)))[0]
            turned = torch.einsum("ipd,pde->ipe", query, torch.from_numpy(turns).to(query))
            found.append(self.previous(layer, turned, key))
        return np.concatenate(found)


def learned_positions(model: Model, length: int) -> Float[Tensor, "position d_model"]:
    """What a model with learned positions adds to each position's token, measured in a run of one token repeated.

    Raises:
        UnsupportedError: The model is not decoder-only.
    """
    token = model.spec.n_vocab // 2
    ids = torch.full((1, length), token)
    stream = model.trace(ids, keep=keep.tensors("resid_pre", layers=[0]), logits="none")
    bare = model.weights.W_E[token] * model.weights.embed_scale
    return stream.tensor("resid_pre", 0)[0] - bare


__all__ = ["learned_positions", "positional_patterns", "previous_token"]
