"""Attention as sparse distributed memory (Bricken and Pehlevan 2021, arXiv 2111.05498).

Kanerva's memory in n bits writes a pattern to every neuron within Hamming distance d of its address, and reads a query
from every neuron within d of the query. So a pattern weighs in the reading by the number of neurons near both,

    I_d(δ) = #{x ∈ {0, 1}ⁿ : |x ⊕ a| ≤ d, |x ⊕ b| ≤ d},    δ = |a ⊕ b|,

and log I_d is nearly linear in the cosine 1 − 2δ/n: the weight is softmax(β · cosine) with β set by the radius. The
paper's attention has q and k of length 1 and a learned β. An ordinary head has an effective one: the slope, within a
row of its pattern, of log attention on the cosine of q and k. R² says how far the head is that memory, which it would
be exactly if keys were of one length; the mean of scaling · ‖q‖ · ‖k‖ is what β would then be. How β follows from keys
of many lengths is our reading; the paper speaks of heads trained with query-key norm.

β of a radius is fitted as the authors' code does: unweighted least squares of log I_d on the cosine over distances
0 … d − 1. Their formula of the radius of the highest signal-to-noise ratio (:func:`best_radius`) is from there too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.arguments import seed_number, whole_number
from headlab.attention import keep
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.prompts import Prompt, lengths_of
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Columns of :attr:`DistributedMemory.frame`.
MEMORY_COLUMNS = (
    "layer",
    "head",
    "beta",
    "ci_low",
    "ci_high",
    "n",
    "r2",
    "null_r2",
    "p_value",
    "q_value",
    "product",
    "radius",
    "radius_beta",
)
#: Keys a row needs for a slope that says anything.
_LEAST_KEYS = 8
#: Bytes that the rows and keys of one pass may take.
_BUDGET = 1 << 28
#: Exact counting takes about n³ steps per table.
_MOST_BITS = 512


@dataclass(frozen=True)
class DistributedMemory:
    """Each head's effective β, and the sparse distributed memory nearest to it.

    Attributes:
        frame: One row per head. ``beta``: slope of log attention on the cosine of q and k, mean over rows and then over
            ``n`` prompts, with its 95 % bootstrap interval over prompts (NaN for one prompt); ``r2``: share of the
            variance of log attention over a row's keys that the line explains; ``null_r2``: the same for cosines dealt
            to keys at random, 1 / (keys − 1) on average; ``p_value``: sign-flip test over prompts that r2 exceeds it,
            ``q_value`` corrected over heads (Benjamini and Hochberg); ``product``: mean of scaling · ‖q‖ · ‖k‖;
            ``radius``: Hamming radius whose fitted β is nearest in n = d_head bits (−1 where β ≤ 0, which no radius
            gives), ``radius_beta``: that β. Heads without a usable row are NaN with n = 0.
        betas: β per prompt, NaN where a prompt has no usable row.
        about: Model, rows, keys left out.
    """

    frame: pd.DataFrame
    betas: Float[np.ndarray, "prompt layer head"]
    about: dict[str, Any]

    def top(self, n: int = 10) -> pd.DataFrame:
        """The heads that are most like such a memory, by R².

        Raises:
            PlanError: n is not a whole number of at least 0.
        """
        order = self.frame.sort_values("r2", ascending=False, kind="stable", na_position="last")
        return order.head(whole_number(n, "n")).reset_index(drop=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        plain = self.frame.astype(object).where(self.frame.notna(), None)
        return {"about": self.about, "heads": plain.to_dict("records")}

    def to_json(self) -> str:
        """:meth:`to_dict` as one JSON document."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        beta = self.frame["beta"].dropna()
        if not len(beta):
            return f"DistributedMemory of {len(self.frame)} heads, none with a usable row"
        return (
            f"DistributedMemory of {len(self.frame)} heads on {len(self.betas)} prompt(s): β from {beta.min():.3g} to "
            f"{beta.max():.3g}, median {beta.median():.3g}; median R² {self.frame['r2'].median():.2f}"
        )


def distributed_memory(
    model: Model,
    prompts: Prompt,
    *,
    rows: int = 16,
    skip: int = 1,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> DistributedMemory:
    """Fit β of every head.

    Keys a row does not see, and those whose attention underflows to 0, take no part in its regression; a learned sink
    logit shifts a row's log attention by a constant and so no slope. Soft caps and position biases are in the attention
    and lower R² where they matter.

    Args:
        model: A model of one stack.
        prompts: Texts of some dozen tokens or more.
        rows: Rows of each prompt, spread evenly over its second half; all there are if fewer.
        skip: Keys left out at the start: the first is where heads rest, and would set the slope by itself.
        seed: Seed of the bootstrap and the sign flips.
        tell: Told how far it is.

    Raises:
        PlanError: rows or skip is no fitting whole number.
        PromptError: Every prompt is too short for a regression.
        UnsupportedError: The model has an encoder and a decoder.
    """
    import pandas as pd

    rows, skip, seed = whole_number(rows, "rows", 1), whole_number(skip, "skip"), seed_number(seed)
    if model.module.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{model.name} has an encoder and a decoder; the fit of β is for models of one stack"
        )
    ids = model.tokens(prompts)
    lengths = lengths_of(ids).tolist()
    if max(lengths) < skip + _LEAST_KEYS:
        raise PromptError(
            f"the longest prompt has {max(lengths)} tokens, but a row needs {_LEAST_KEYS} keys after the first {skip}; "
            "give longer ones"
        )
    spec = model.spec
    shape = (len(ids), spec.n_layers, spec.n_heads)
    beta, r2, null, product = (np.full(shape, np.nan) for _ in range(4))
    for at, length in enumerate(lengths):
        queries = np.unique(np.linspace(length // 2, length - 1, rows).round().astype(int)).tolist()
        for layers in _layers_at_once(model, length, len(queries)):
            found = _of_layers(model, ids[at, :length], layers, queries, skip)
            for layer, parts in found.items():
                for values, mean in zip((beta, r2, null, product), parts, strict=True):
                    values[at, layer, : len(mean)] = mean
        tell(f"β of heads: {at + 1} of {len(ids)} prompts")
    places = [
        (layer, head) for layer, facts in enumerate(spec.layers) for head in range(facts.n_heads)
    ]
    index = tuple(np.array(places).T)
    table: dict[str, Any] = {"layer": index[0], "head": index[1]}
    columns = {name: values[:, *index] for name, values in
               (("beta", beta), ("r2", r2), ("null_r2", null), ("product", product))}  # fmt: skip
    n = (~np.isnan(columns["beta"])).sum(0)
    means = {name: _mean(values) for name, values in columns.items()}
    low = high = np.full(len(places), np.nan)
    if len(ids) > 1 and n.any():
        low, high = bootstrap_interval(np.where(n > 0, columns["beta"], 0), seed)
        low, high = (np.where(n > 1, end, np.nan) for end in (low, high))
    p = sign_flip_p(columns["r2"] - columns["null_r2"], seed)
    q = corrected(p)
    nearest = [
        nearest_radius(spec.layers[layer].d_head, value)
        for (layer, _), value in zip(places, means["beta"], strict=True)
    ]
    frame = pd.DataFrame(
        table | means | {"ci_low": low, "ci_high": high, "n": n, "p_value": p, "q_value": q}
        | {"radius": [radius for radius, _ in nearest], "radius_beta": [b for _, b in nearest]}
    )  # fmt: skip
    about = {"model": model.name, "prompts": len(ids), "rows": rows, "skip": skip, "seed": seed}
    return DistributedMemory(frame[list(MEMORY_COLUMNS)], beta, about)


def _layers_at_once(model: Model, length: int, rows: int) -> list[list[int]]:
    """Layers in parts whose kept rows and keys fit the memory budget."""
    facts = max(model.spec.layers, key=lambda layer: layer.n_heads)
    numbers = length * (facts.n_heads * rows + facts.n_kv_heads * facts.d_head)
    at_once = max(1, _BUDGET // (8 * numbers))
    every = list(range(model.spec.n_layers))
    return [every[start : start + at_once] for start in range(0, len(every), at_once)]


def _of_layers(
    model: Model, ids: Tensor, layers: Sequence[int], queries: Sequence[int], skip: int
) -> dict[int, tuple[Float[np.ndarray, " head"], ...]]:
    """β, R², its null and scaling · ‖q‖ · ‖k‖ of one prompt, means over rows, by layer."""
    plan: list[keep.Keep] = [
        keep.rows(queries=queries, layers=layers),
        keep.tensors("q", layers=layers, positions=queries),
        keep.tensors("k", layers=layers),
    ]
    trace = model.trace(ids, keep=plan, logits="none")
    rows, found = trace.rows, {}
    kind = torch.promote_types(model.dtype, torch.float32)
    for at, layer in enumerate(layers):
        facts = model.spec.layers[layer]
        q = trace.tensor("q", layer)[0].to(kind).transpose(0, 1)  # [head, query, d_head]
        k = trace.tensor("k", layer)[0, skip:].to(kind).transpose(0, 1)
        k = k.repeat_interleave(facts.n_heads // k.shape[0], 0)
        pattern = rows[0, at, : facts.n_heads, :, skip:].to(kind)
        lengths = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, None]
        cosine = (q @ k.mT) / lengths.clamp(min=torch.finfo(kind).tiny)
        seen = pattern > 0
        slope, explained, keys = row_regression(cosine, pattern.log(), seen)
        usable = keys >= _LEAST_KEYS
        chance = 1 / (keys - 1).clamp(min=1)
        product = (lengths * seen).sum(-1) / keys.clamp(min=1) * facts.scaling
        found[layer] = tuple(
            torch.where(usable, values, torch.nan).double().nanmean(-1).cpu().numpy()
            for values in (slope, explained, chance, product)
        )
    return found


def row_regression(
    x: Float[Tensor, "*row key"], y: Float[Tensor, "*row key"], seen: Bool[Tensor, "*row key"]
) -> tuple[Float[Tensor, "*row"], Float[Tensor, "*row"], Float[Tensor, "*row"]]:
    """Least squares of y on x over the keys a row sees: slope, R² and number of keys; NaN where x or y is constant."""
    weight = seen.to(x)
    keys = weight.sum(-1)
    count = keys.clamp(min=1)[..., None]
    x, y = x.masked_fill(~seen, 0), y.masked_fill(~seen, 0)
    x = (x - x.sum(-1, keepdim=True) / count) * weight
    y = (y - y.sum(-1, keepdim=True) / count) * weight
    xx, xy, yy = (x * x).sum(-1), (x * y).sum(-1), (y * y).sum(-1)
    fine = (xx > 0) & (yy > 0)
    slope = torch.where(fine, xy / xx, torch.nan)
    return slope, torch.where(fine, slope * xy / yy, torch.nan), keys


# -- the memory's side -------------------------------------------------------------------------------------------------


def circle_intersection(bits: int, radius: int) -> Float[np.ndarray, " distance"]:
    """log I_d(δ) for δ = 0 … n: how many of the 2ⁿ addresses are within d of both of two that differ in δ bits.

    Counted exactly: an address within both differs from the first in i of the n − δ bits they share and in c of the
    others, with i + c ≤ d and i + δ − c ≤ d. −inf where there is none, that is beyond δ = 2d.

    Args:
        bits: n.
        radius: d, at most n.

    Raises:
        PlanError: A number does not fit.
    """
    bits = whole_number(bits, "bits", 1)
    radius = whole_number(radius, "radius")
    if radius > bits or bits > _MOST_BITS:
        raise PlanError(
            f"radius={radius} of bits={bits} cannot be counted; use at most {_MOST_BITS} bits and a radius of at most "
            "as many"
        )
    return np.array([_log(_intersection(bits, radius, delta)) for delta in range(bits + 1)])


def radius_beta(bits: int, radius: int) -> float:
    """β of a radius: slope of log I_d on the cosine over distances 0 … d − 1, as the authors' code fits it.

    Raises:
        PlanError: The radius is not between 2 and ``bits``.
    """
    bits, radius = whole_number(bits, "bits", 2), whole_number(radius, "radius", 2)
    if radius > bits:
        raise PlanError(f"radius={radius} is more than bits={bits}; use one of 2 to {bits}")
    distance = np.arange(radius)
    cosine = 1 - 2 * distance / bits
    log_size = np.array([_log(_intersection(bits, radius, int(delta))) for delta in distance])
    centred = cosine - cosine.mean()
    return float(centred @ log_size / (centred @ centred))


def nearest_radius(bits: int, beta: float) -> tuple[int, float]:
    """The radius (2 … n/2) whose β is nearest, and that β; (−1, NaN) for a β of 0 or less, and for widths beyond
    512 bits or below 4."""
    if not beta > 0 or not 4 <= bits <= _MOST_BITS:
        return -1, math.nan
    known = _radius_betas(bits)
    at = int(np.abs(known - beta).argmin())
    return at + 2, float(known[at])


def best_radius(bits: int, patterns: float, neurons: float) -> int:
    """Radius of the highest signal-to-noise ratio for random patterns, by the formula in the authors' code: the least
    within which a share (2 · patterns · neurons)^(−1/3) of all addresses lies.

    Raises:
        PlanError: A number does not fit.
    """
    bits = whole_number(bits, "bits", 1)
    if not (patterns > 0 and neurons > 0 and bits <= _MOST_BITS):
        raise PlanError(
            f"patterns={patterns} and neurons={neurons} must be above 0, bits={bits} at most {_MOST_BITS}"
        )
    share = (2 * patterns * neurons) ** (-1 / 3)
    within = accumulate(math.comb(bits, at) for at in range(bits + 1))
    return next(at for at, total in enumerate(within) if total / 2**bits >= min(share, 1.0))


@cache
def _radius_betas(bits: int) -> Float[np.ndarray, " radius"]:
    return np.array([radius_beta(bits, radius) for radius in range(2, bits // 2 + 1)])


@cache
def _binomials(n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """C(n, ·), and sums of the first of them, beginning with the sum of none."""
    row = tuple(math.comb(n, at) for at in range(n + 1))
    return row, (0, *accumulate(row))


def _intersection(bits: int, radius: int, delta: int) -> int:
    shared, _ = _binomials(bits - delta)
    _, sums = _binomials(delta)
    total = 0
    for i in range(min(bits - delta, radius) + 1):
        low, high = max(0, i + delta - radius), min(delta, radius - i)
        if low <= high:
            total += shared[i] * (sums[high + 1] - sums[low])
    return total


def _log(count: int) -> float:
    return math.log(count) if count else -math.inf


def _mean(values: Float[np.ndarray, "prompt head"]) -> Float[np.ndarray, " head"]:
    known = ~np.isnan(values)
    total = np.where(known, values, 0).sum(0)
    return np.divide(total, known.sum(0), out=np.full(len(total), np.nan), where=known.any(0))


__all__ = [
    "DistributedMemory",
    "best_radius",
    "circle_intersection",
    "distributed_memory",
    "nearest_radius",
    "radius_beta",
]
