"""Expectations that owe nothing to headlab: float64 formulas, and a plain attention function.

The first half turns one attention call into its whole pattern with numpy and reads every statistic
off it, term by term. The second half registers an attention function of its own with transformers,
written out in the obvious way, whose intermediate values a test may rewrite: a hand-edited forward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

# -- one attention call ----------------------------------------------------------------------------


def array(x: Any) -> np.ndarray:
    """A float64 (or bool, or int64) numpy copy."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return x.double().numpy().copy() if x.is_floating_point() else x.numpy().copy()
    return np.asarray(x)


def visible(inputs: Any) -> np.ndarray:
    """Which keys each query sees, [batch, head, query, key]."""
    batch, heads, n_queries, _ = inputs.q.shape
    n_keys = inputs.k.shape[2]
    lag = lags(n_queries, n_keys, inputs.query_start - inputs.key_start)
    seen = np.ones((batch, heads, n_queries, n_keys), dtype=bool)
    if inputs.causal:
        seen &= lag >= 0
    if inputs.window is not None:
        seen &= np.abs(lag) < inputs.window
    if inputs.mask is not None:
        mask = array(inputs.mask)
        if mask.dtype == bool:
            seen &= mask
        else:
            seen &= mask > torch.finfo(inputs.mask.dtype).min / 2
    return seen


def scores(inputs: Any) -> np.ndarray:
    """Scores before the softmax, −inf where a key is hidden."""
    q, k = array(inputs.q), array(inputs.k)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * inputs.scaling
    if inputs.softcap is not None:
        s = inputs.softcap * np.tanh(s / inputs.softcap)
    if inputs.position_bias is not None:
        s = s + array(inputs.position_bias)
    if inputs.mask is not None and inputs.mask.dtype != torch.bool:
        mask = array(inputs.mask)
        s = s + np.where(np.isfinite(mask), mask, 0.0)
    return np.where(visible(inputs), s, -np.inf)


def softmax(s: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Softmax over the last axis; a row without keys is all 0."""
    with np.errstate(invalid="ignore"):
        top = s.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return e / np.where(total == 0, 1.0, total)


def pattern(inputs: Any) -> np.ndarray:
    """The whole pattern, [batch, head, query, key]."""
    return softmax(scores(inputs), None if inputs.sinks is None else array(inputs.sinks))


def z(inputs: Any, p: np.ndarray | None = None) -> np.ndarray:
    """Mixed values, [batch, head, query, d_value]."""
    p = pattern(inputs) if p is None else p
    v = array(inputs.v)
    return p @ np.repeat(v, p.shape[1] // v.shape[1], axis=1)


def lse(s: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Log-sum-exp of scores, [batch, head, query]."""
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
        s = np.concatenate([s, column], -1)
    top = s.max(-1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(s - safe).sum(-1)) + safe[..., 0]


def lags(n_queries: int, n_keys: int, start: int = 0) -> np.ndarray:
    """Query position minus key position; *start* is the column at the first query's position."""
    return (start + np.arange(n_queries))[:, None] - np.arange(n_keys)[None]


# Statistics of complete rows p [batch, head, query, key].


def entropy(p: np.ndarray) -> np.ndarray:
    """−Σ p ln p with 0·ln 0 = 0."""
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def argmax(p: np.ndarray) -> np.ndarray:
    """First key of the largest weight, −1 in a row of zeros."""
    return np.where(p.max(-1) > 0, p.argmax(-1), -1)


def topk(p: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest weights and their keys, padded with 0 and −1."""
    order = np.argsort(-p, axis=-1, kind="stable")[..., :k]
    weights = np.take_along_axis(p, order, -1)
    short = max(0, k - p.shape[-1])
    pad = [(0, 0)] * (p.ndim - 1) + [(0, short)]
    weights, order = np.pad(weights, pad), np.pad(order, pad)
    return weights, np.where(weights > 0, order, -1)


def mean_distance(p: np.ndarray, lag: np.ndarray) -> np.ndarray:
    """Σ p |lag| / Σ p, NaN in a row of zeros."""
    with np.errstate(invalid="ignore"):
        return (p * np.abs(lag)).sum(-1) / p.sum(-1)


def local_mass(p: np.ndarray, lag: np.ndarray, window: int) -> np.ndarray:
    """Mass on keys fewer than *window* tokens away."""
    return (p * (np.abs(lag) < window)).sum(-1)


def lag_mass(p: np.ndarray, lag: np.ndarray, edges: Any) -> np.ndarray:
    """Mass per lag bin."""
    bins = [(p * ((lag >= a) & (lag < b))).sum(-1) for a, b in pairwise(edges)]
    return np.stack(bins, -1)


def target_mass(p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Weight on one key per query; 0 where the target is −1."""
    out = np.zeros(p.shape[:3])
    targets = np.broadcast_to(targets, (p.shape[0], p.shape[2]))
    for b in range(p.shape[0]):
        for q in range(p.shape[2]):
            if targets[b, q] >= 0:
                out[b, :, q] = p[b, :, q, targets[b, q]]
    return out


def feature(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Σ p x, [batch, head, query, feature]."""
    return np.einsum("bhqk,bkf->bhqf", p, np.broadcast_to(x, (p.shape[0], *x.shape[1:])))


def segment_z(p: np.ndarray, v: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """z from one segment's keys only, [batch, head, query, segment, d_value]."""
    v = np.repeat(v, p.shape[1] // v.shape[1], axis=1)
    member = np.broadcast_to(segments, (p.shape[0], *segments.shape[1:])).astype(float)
    return np.einsum("bhqk,bks,bhkd->bhqsd", p, member, v)


def received(p: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Σ over the counted queries, [batch, head, key]."""
    if counted is None:
        return p.sum(2)
    return (p * np.broadcast_to(counted, (p.shape[0], p.shape[2]))[:, None, :, None]).sum(2)


def block_map(p: np.ndarray, side: int, counted: np.ndarray | None = None) -> np.ndarray:
    """Sums over squares, [batch, head, query_block, key_block]."""
    if counted is not None:
        p = p * np.broadcast_to(counted, (p.shape[0], p.shape[2]))[:, None, :, None]
    down, across = -(-p.shape[2] // side), -(-p.shape[3] // side)
    out = np.zeros((*p.shape[:2], down, across))
    for i in range(down):
        for j in range(across):
            square = p[:, :, i * side : (i + 1) * side, j * side : (j + 1) * side]
            out[:, :, i, j] = square.sum((2, 3))
    return out


def statistics(
    inputs: Any, request: Any, s: np.ndarray | None = None, p: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Every statistic of the request by its plain formula; *s* and *p* stand in after an edit."""
    sinks = None if inputs.sinks is None else array(inputs.sinks)
    s = scores(inputs) if s is None else s
    p = softmax(s, sinks) if p is None else p
    if request.z_gradient is not None:  # weights times their gradients
        every = np.repeat(array(inputs.v), p.shape[1] // inputs.v.shape[1], axis=1)
        p = p * (array(request.z_gradient) @ every.swapaxes(-1, -2))
    heads = list(range(p.shape[1])) if request.heads is None else list(request.heads)
    v = np.repeat(array(inputs.v), p.shape[1] // inputs.v.shape[1], axis=1)[:, heads]
    s, p = s[:, heads], p[:, heads]
    sinks = None if sinks is None else sinks[heads]
    lag = lags(p.shape[2], p.shape[3], inputs.query_start - inputs.key_start)
    counted = None if request.counted is None else array(request.counted)
    formulas: dict[str, Callable[[], np.ndarray]] = {
        "lse": lambda: lse(s, sinks),
        "entropy": lambda: entropy(p),
        "max": lambda: p.max(-1),
        "argmax": lambda: argmax(p),
        "topk": lambda: topk(p, request.k)[0],
        "topk_index": lambda: topk(p, request.k)[1],
        "feature": lambda: feature(p, array(request.features)),
        "local_mass": lambda: local_mass(p, lag, request.local_window),
        "lag_mass": lambda: lag_mass(p, lag, request.lag_edges),
        "mean_distance": lambda: mean_distance(p, lag),
        "target_mass": lambda: target_mass(p, array(request.targets)),
        "segment_z": lambda: segment_z(p, v, array(request.segments)),
        "received": lambda: received(p, counted),
        "block_map": lambda: block_map(p, request.block, counted),
    }
    return {name: formulas[name]() for name in request.statistics}


def assert_close(
    got: Any, expected: Any, atol: float = 1e-5, rtol: float = 0.0, what: str = ""
) -> None:
    """Equal within a tolerance; NaN and infinities must sit in the same places."""
    got, expected = array(got), array(expected)
    assert got.shape == expected.shape, f"{what}: shape {got.shape} is not {expected.shape}"
    np.testing.assert_allclose(got, expected, atol=atol, rtol=rtol, equal_nan=True, err_msg=what)


# -- a hand-edited forward pass --------------------------------------------------------------------

#: Rewrites one intermediate value: ``rewrite(values, layer) -> values``. Vectors come as
#: [batch, position, query head, width], scores and pattern as [batch, head, query, key].
Rewrite = Callable[[Tensor, int], Tensor]

_REWRITES: dict[str, Rewrite] = {}
_LAYER_OF: dict[int, int] = {}


def _rewritten(site: str, x: Tensor, layer: int) -> Tensor:
    return _REWRITES[site](x, layer) if site in _REWRITES else x


def _plain(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention written out, one key/value head per query head."""
    layer = _LAYER_OF[id(module)]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (
        _rewritten(site, x.transpose(1, 2), layer).transpose(1, 2)
        for site, x in (("q", q), ("k", k), ("v", v))
    )
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    if position_bias is not None:
        s = s + position_bias
    if mask is None:
        if getattr(module, "is_causal", True) and q.shape[2] > 1:
            hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            s = s.masked_fill(hidden, -torch.inf)
    elif mask.dtype == torch.bool:
        s = s.masked_fill(~mask, -torch.inf)
    else:
        s = (s + mask).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    s = _rewritten("scores", s, layer)
    if s_aux is not None:
        sink = s_aux[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
        p = torch.cat([s, sink.to(s)], -1).softmax(-1)[..., :-1]
    else:
        p = s.softmax(-1).nan_to_num(0.0)
    p = _rewritten("pattern", p, layer)
    return _rewritten("z", (p @ v).transpose(1, 2), layer).contiguous(), None


AttentionInterface.register("oracle", _plain)
AttentionMaskInterface.register("oracle", sdpa_mask)


@contextmanager
def by_hand(
    module: Any,
    layers: list[nn.Module],
    projections: list[nn.Module] | None = None,
    **rewrites: Any,
) -> Iterator[None]:
    """Run a model through the plain formula with values rewritten on the way.

    Args:
        module: A model that is the test's own, since its configuration is changed meanwhile.
        layers: Its attention modules.
        projections: Their output projections; only a rewrite of ``result`` needs them.
        rewrites: Rewrites by site: q, k, v, scores, pattern, z or result.
    """
    before = module.config._attn_implementation
    handles = []
    _LAYER_OF.update({id(layer): at for at, layer in enumerate(layers)})
    _REWRITES.update(rewrites)
    if "result" in rewrites:
        assert projections is not None
        handles = [
            projection.register_forward_hook(_result_hook(at, layers[at], rewrites["result"]))
            for at, projection in enumerate(projections)
        ]
    module.set_attn_implementation("oracle")
    try:
        yield
    finally:
        module.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
        _REWRITES.clear()
        _LAYER_OF.clear()


def _result_hook(layer: int, attention: nn.Module, rewrite: Rewrite) -> Callable[..., Tensor]:
    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        matrix = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        n_heads = _n_heads(attention)
        z = args[0].unflatten(-1, (n_heads, -1))
        results = torch.stack(
            [z[..., h, :] @ matrix.unflatten(0, (n_heads, -1))[h] for h in range(n_heads)], 2
        )
        total = rewrite(results, layer).sum(2)
        return total if module.bias is None else total + module.bias

    return hook


def _n_heads(attention: nn.Module) -> int:
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if hasattr(attention, name):
            return int(getattr(attention, name))
    return int(attention.config.num_attention_heads)
