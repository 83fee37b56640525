"""What RoPE pairs of a head do on natural text; see :mod:`headlab.attention.rope` for what a pair is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.stats import rankdata
from torch import Tensor

from headlab.attention import RopePairs, attention_chunks, contributions, keep, rope_pairs
from headlab.roles.base import Arrays, Detail, Probing
from headlab.roles.prose_rows import FAR, ProseRows, visible

_PROMPTS, _LENGTH, _FIRST_ROW, _STRIDE = 3, 256, 64, 8


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


def _run(probing: Probing, ids: Tensor, pairs: Mapping[int, RopePairs]) -> Arrays:
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
    chunks = attention_chunks(probing.model)
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
