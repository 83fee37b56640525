"""What each RoPE pair of dimensions contributes to a head's scores.

RoPE turns pairs of dimensions of q and k, pair i by an angle that grows with position as p·ω_i, and leaves the other
dimensions alone. So a score is a sum over pairs, s = scaling · (Σ_i (q_a k_a + q_b k_b) + Σ_rest q k), with q and k as
they arrive at the seam, after the rotation. Pair 0 has the highest frequency: it tells near positions apart and is
blind to far ones; the last pairs are the other way round.

Which dimensions form pair i differs between architectures: dimension i and i + n (half-split: Llama, NeoX), or 2i and
2i + 1 (interleaved: GPT-J, Cohere, GLM), among the first 2n dimensions (partial rotary) or the last (multi-head latent
attention). No table is kept. A text of one token repeated has the same key at every position before the rotation, so
the layout is the one under which turning the keys back by the model's own frequencies makes them equal again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata
from torch import Tensor

from headlab.attention import keep
from headlab.model import Model
from headlab.roles.base import Arrays, Detail, Probing
from headlab.roles.prose_rows import FAR, ProseRows, attention_chunks, visible

_PROMPTS, _LENGTH, _FIRST_ROW, _STRIDE = 3, 256, 64, 8
_REPEATS = 16
#: Keys turned back may differ by this share of their norm: half-precision models round.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Pairs:
    """Dimensions of a head that RoPE turns together, pair 0 first.

    Attributes:
        first: First dimension of each pair.
        second: Second dimension of each pair.
        frequency: Angle per token of each pair, in radians.
    """

    first: Int[np.ndarray, " pair"]
    second: Int[np.ndarray, " pair"]
    frequency: Float[np.ndarray, " pair"]


def frequencies(model: Model) -> tuple[Float[np.ndarray, " pair"], ...]:
    """The model's RoPE frequencies, in radians per token, scaling included: one array per kind of layer."""
    found = {}
    for name, buffer in model.module.named_buffers():
        last = name.rsplit(".", 1)[-1]
        if last.endswith("inv_freq") and "original" not in last and buffer.dim() == 1:
            values = buffer.detach().double().cpu().numpy()
            found[values.tobytes()] = values
    width = getattr(model.module.config, "rotary_dim", None)
    if not found and width:  # GPT-J and CodeGen keep a table of sines instead, of base 10000
        return (10000.0 ** (-np.arange(0, width, 2) / width),)
    return tuple(found.values())


def rope_pairs(model: Model) -> dict[int, Pairs]:
    """The pairs of every layer that rotates its keys; layers whose layout cannot be made out are left out."""
    known = frequencies(model)
    if model.spec.positions != "rope" or not known:
        return {}
    length = min(_REPEATS, model.spec.max_context or _REPEATS)
    ids = torch.full((1, length), model.spec.n_vocab // 2)
    trace = model.trace(ids, keep=keep.tensors("k"), logits="none")
    found: dict[int, Pairs] = {}
    for layer, about in enumerate(model.spec.layers):
        k = trace.tensor("k", layer)[0].double().cpu().numpy()
        if _spread(k) < _TOLERANCE:
            continue  # a layer without positions
        fits = [(_spread(_unturned(k, pairs)), pairs) for pairs in _layouts(about.d_head, known)]
        best = min(fits, key=lambda fit: fit[0], default=None)
        if best is not None and best[0] < _TOLERANCE:
            found[layer] = best[1]
        elif (near := _alike(model, found, about.d_head)) is not None:
            # Under a sink logit later layers see more of the token as it is repeated more often.
            found[layer] = near
    return found


def contributions(
    q: Float[Tensor, "*heads query d_head"],
    k: Float[Tensor, "*heads key d_head"],
    pairs: Pairs,
    scaling: float = 1.0,
) -> Float[Tensor, "*heads query key pair_and_rest"]:
    """What each pair adds to scaling·q·k, and last what the dimensions outside all pairs add."""
    a, b = (torch.from_numpy(index).to(q.device) for index in (pairs.first, pairs.second))
    rest = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
    rest[a] = rest[b] = False
    turned = q[..., None, a] * k[..., None, :, a] + q[..., None, b] * k[..., None, :, b]
    others = q[..., rest] @ k[..., rest].transpose(-1, -2)
    return torch.cat([turned, others[..., None]], -1) * scaling


def rope_details(probing: Probing, rows: ProseRows) -> Mapping[str, Detail]:
    """Details about RoPE pairs for heads that read natural text; none for models without RoPE."""
    model = probing.model
    if model.spec.positions != "rope":
        return {}
    probing.tell("reading RoPE pairs")
    pairs = rope_pairs(model)
    if not pairs:
        return {}
    parts = [
        probing.part(f"rope-{at:03d}", ids, partial(_run, probing, torch.from_numpy(ids), pairs))
        for at, ids in enumerate(rows.ids[:_PROMPTS, : min(_LENGTH, rows.ids.shape[1])])
    ]
    share = np.mean([part["share"] for part in parts], 0)
    far = np.mean([part["far"] for part in parts], 0)
    at = np.arange(far.shape[-1], dtype=float)
    details = {
        "rope_contribution": Detail(
            share[..., :-1],
            "share of the score's variance over keys that a RoPE pair accounts for, Cov(pair, score) / Var(score); "
            "at = pair, 0 = highest frequency",
            at,
        ),
        "rope_long_range": Detail(
            rank_correlation(far),
            f"Spearman correlation over RoPE pairs of pair number with mean |contribution| at {FAR} tokens and more; "
            "headlab's own approximation of Hong et al. 2024, whose metric is unverified",
        ),
    }
    if np.nanmax(np.abs(share[..., -1]), initial=0) > 0:
        meaning = "share of the score's variance over keys that dimensions outside RoPE account for"
        details["unrotated_contribution"] = Detail(share[..., -1], meaning)
    return details


def rank_correlation(
    values: Float[np.ndarray, "layer head pair"],
) -> Float[np.ndarray, "layer head"]:
    """Spearman correlation of the entries with their number; NaN where any entry is."""
    known = ~np.isnan(values).any(-1) & (values.shape[-1] > 2)
    ranks = rankdata(values, axis=-1)
    order = np.arange(values.shape[-1]) - (values.shape[-1] - 1) / 2
    centred = ranks - ranks.mean(-1, keepdims=True)
    size = np.sqrt((centred**2).sum(-1) * (order**2).sum())
    known &= size > 0
    return np.divide(centred @ order, size, out=np.full(size.shape, np.nan), where=known)


def variance_shares(
    parts: Float[Tensor, "head query key part"], seen: Bool[Tensor, "query key"]
) -> Float[Tensor, "head query part"]:
    """Cov(part, Σ parts) / Var(Σ parts) over the keys a row sees: sums to 1 over parts, NaN in a constant row.

    What is the same for every key changes no softmax, so levels are left out.
    """
    weight = seen.to(parts) / seen.sum(-1, keepdim=True).clamp(min=1)
    centred = parts - torch.einsum("hqkp,qk->hqp", parts, weight)[:, :, None]
    total = centred.sum(-1)
    shared = torch.einsum("hqkp,hqk,qk->hqp", centred, total, weight)
    spread = torch.einsum("hqk,qk->hq", total**2, weight)
    return torch.where(spread[..., None] > 0, shared / spread[..., None], torch.nan)


def _run(probing: Probing, ids: Tensor, pairs: Mapping[int, Pairs]) -> Arrays:
    model, spec, length = probing.model, probing.model.spec, len(ids)
    queries = np.arange(min(_FIRST_ROW, length // 4), length, _STRIDE)
    n_pairs = max(len(layer.first) for layer in pairs.values())
    share = np.full((spec.n_layers, spec.n_heads, n_pairs + 1), np.nan, np.float32)
    far = np.full((spec.n_layers, spec.n_heads, n_pairs), np.nan, np.float32)
    plan = [
        keep.tensors("q", layers=list(pairs), positions=queries.tolist()),
        keep.tensors("k", layers=list(pairs)),
    ]
    trace = model.trace(ids[None], keep=plan, logits="none")
    chunks = attention_chunks(probing)
    for at, layout in pairs.items():
        layer, n = spec.layers[at], len(layout.first)
        q = trace.tensor("q", at)[0].float().transpose(0, 1)  # [head, query, d_head]
        k = (
            trace.tensor("k", at)[0, 1:].float().transpose(0, 1)
        )  # the first token, a sink, left out
        seen = visible(layer.causal, layer.window, chunks[at], length)[queries, 1:]
        distant = seen & (queries[:, None] - np.arange(1, length) >= FAR)
        group = q.shape[0] // k.shape[0]
        for kv in range(k.shape[0]):
            heads = slice(kv * group, (kv + 1) * group)
            parts = contributions(q[heads], k[kv], layout, layer.scaling)
            shares = variance_shares(parts, torch.from_numpy(seen).to(parts.device))
            mean = shares.nanmean(1).cpu().numpy()
            share[at, heads, :n], share[at, heads, -1] = mean[:, :-1], mean[:, -1]
            if distant.any():
                away = parts[:, torch.from_numpy(distant).to(parts.device), :-1]
                far[at, heads, :n] = away.abs().mean(1).cpu().numpy()
    return {"share": share, "far": far}


def _layouts(d_head: int, known: tuple[np.ndarray, ...]) -> list[Pairs]:
    """Every layout that a head of this width could have."""
    made = []
    for frequency in known:
        n = len(frequency)
        at = np.arange(n)
        for start in sorted({0, d_head - 2 * n}) if 2 * n <= d_head else ():
            made.append(Pairs(start + at, start + at + n, frequency))
            made.append(Pairs(start + 2 * at, start + 2 * at + 1, frequency))
    return made


def _unturned(k: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Keys [position, head, d_head] with the rotation of their positions taken back."""
    angle = np.arange(len(k))[:, None, None] * pairs.frequency
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = k[..., pairs.first], k[..., pairs.second]
    out = k.copy()
    out[..., pairs.first], out[..., pairs.second] = a * cos + b * sin, b * cos - a * sin
    return out


def _spread(k: np.ndarray) -> float:
    """Root-mean-square distance of keys [position, ...] from their mean, as a share of their size."""
    return float(np.sqrt(((k - k.mean(0)) ** 2).mean() / (k**2).mean()))


def _alike(model: Model, found: Mapping[int, Pairs], d_head: int) -> Pairs | None:
    same = [pairs for at, pairs in found.items() if model.spec.layers[at].d_head == d_head]
    return same[-1] if same else None
