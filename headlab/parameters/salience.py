"""Which tokens a head turns most: ‖Ẽ[s] · W_V · W_O‖ / ‖Ẽ[s]‖ over the vocabulary (Elhelo & Geva 2025, MAPS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import Head
from headlab.errors import UnsupportedError
from headlab.parameters.embeddings import EmbeddingKind, embed, is_raw
from headlab.parameters.maps import values_of_tokens

if TYPE_CHECKING:
    from headlab.model import Model

#: Tokens of the vocabulary at a time.
_CHUNK = 8192


def norm_gain(
    x: Float[Tensor, "token d_model"],
    z: Float[Tensor, "head token d_value"],
    W_O: Float[Tensor, "head d_value d_model"],
) -> Float[Tensor, "head token"]:
    """‖z · W_O‖ / ‖x‖ for what heads read of tokens, z = x · W_V; 0 for a token that nothing stands for.

    W_Oᵀ = Q R, so ‖z W_O‖ = ‖z Rᵀ‖: as wide as a head and no wider.
    """
    r = torch.linalg.qr(W_O.mT.to(z), mode="r").R
    kept = (z @ r.mT).norm(dim=-1)
    size = x.norm(dim=-1)
    return torch.where(size == 0, 0, kept / size.clamp(min=torch.finfo(size.dtype).tiny))


def salient_sources(
    model: Model,
    heads: Sequence[Head],
    n: int,
    n_vocab: int,
    kind: EmbeddingKind,
    tell: Callable[[str], None],
) -> tuple[Float[Tensor, "head n"], Int[Tensor, "head n"]]:
    """The n largest gains of each head and their tokens; the vocabulary is read once, some tokens at a time.

    Equal gains go in order of token ids.

    Raises:
        UnsupportedError: Weights cannot be read, or they or what stands for tokens hold NaN or infinity.
    """
    device = model.weights.W_E.device
    best: list[Tensor] = [torch.empty(0, device=device)] * len(heads)
    tokens = [torch.empty(0, dtype=torch.long, device=device)] * len(heads)
    layers = sorted({head.layer for head in heads})
    for start in range(0, n_vocab, _CHUNK):
        ids = torch.arange(start, min(start + _CHUNK, n_vocab), device=device)
        tell(f"salient operations: token {start} of {n_vocab}")
        stand_ins: dict[bool, Tensor] = {}
        for layer in layers:
            raw = is_raw(kind, layer)
            if raw not in stand_ins:
                stand_ins[raw] = embed(model, layer, ids, kind)
            x = stand_ins[raw]
            here = [at for at, head in enumerate(heads) if head.layer == layer]
            z = values_of_tokens(model, layer, [heads[at] for at in here], x)
            W_O = model.weights.W_O(layer)[[heads[at].head for at in here]]
            for at, gain in zip(here, norm_gain(x, z, W_O), strict=True):
                _check(model, heads[at], gain, ids)
                both = torch.cat([best[at].to(gain), gain]), torch.cat([tokens[at], ids])
                order = both[0].sort(descending=True, stable=True).indices[:n]
                best[at], tokens[at] = both[0][order], both[1][order]
    return torch.stack(best), torch.stack(tokens)


def random_sources(
    model: Model, heads: Sequence[Head], n: int, n_vocab: int, kind: EmbeddingKind, seed: int
) -> tuple[Float[Tensor, "head n"], Int[Tensor, "head n"]]:
    """Gains of n random tokens of each head, and these tokens, the largest gain first: a null of salient ones.

    Raises:
        UnsupportedError: As for :func:`salient_sources`.
    """
    generator = torch.Generator().manual_seed(seed)
    gains, tokens = [], []
    for head in heads:
        ids = torch.randperm(n_vocab, generator=generator)[:n].to(model.weights.W_E.device)
        x = embed(model, head.layer, ids, kind)
        z = values_of_tokens(model, head.layer, [head], x)
        gain = norm_gain(x, z, model.weights.W_O(head.layer)[[head.head]])[0]
        _check(model, head, gain, ids)
        order = gain.sort(descending=True, stable=True).indices
        gains.append(gain[order])
        tokens.append(ids[order])
    return torch.stack(gains), torch.stack(tokens)


def _check(
    model: Model, head: Head, gain: Float[Tensor, " token"], ids: Int[Tensor, " token"]
) -> None:
    wrong = ids[~gain.isfinite()].tolist()
    if wrong:
        some = f" such as {wrong[0]}" if len(wrong) < len(ids) else ""
        raise UnsupportedError(
            f"{head} of {model.name} has no salient operations: its weights, or what stands for tokens{some}, hold "
            "NaN or infinity"
        )


__all__ = ["norm_gain", "random_sources", "salient_sources"]
