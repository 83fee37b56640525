"""Massive values in queries and keys (Jin et al. 2025, arXiv 2502.01563), by RoPE frequency.

For a head h and a dimension d of its queries at the seam, that is after RoPE and before the scaling,

    M[h, d] = ‖Q[:, h, d]‖₂    over positions,

likewise for K and V, and d is massive where M[h, d] > 5 · mean over d of M[h, d]. The factor 5 is unverified. The paper
finds massive dimensions in Q and K, at the same places in both, in low-frequency RoPE pairs, and neither in V nor in
models without RoPE. Which dimensions form a pair is read off the model (:func:`headlab.attention.rope_pairs`), so a
layout of half-split pairs (i, i + d_head / 2), where low frequency means high i within each half, and one of
neighbours are both placed by frequency. With grouped heads K and V have a row per key/value head.

The first positions are left out by default (``skip=1``): heads rest there, and its keys are unlike all others. The
paper counts them: ``skip=0``. :mod:`headlab.parameters.on_prompts.disruption` takes massive values away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.arguments import finite_number, seed_number, whole_number
from headlab.attention import RopePairs, keep, rope_pairs
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.prompts import Prompt, lengths_of
from headlab.statistics import RESAMPLES

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

Site: TypeAlias = Literal["q", "k", "v"]
SITES: tuple[Site, ...] = ("q", "k", "v")
#: Columns of :attr:`MassiveValues.frame`.
MASSIVE_COLUMNS = (
    "site",
    "layer",
    "head",
    "dimension",
    "pair",
    "depth",
    "wavelength",
    "norm",
    "ratio",
    "ci_low",
    "ci_high",
    "n",
    "matched",
)
#: Bytes that the captured tensors of one pass may take.
_BUDGET = 1 << 28
_DRAWS = 2000


@dataclass(frozen=True)
class MassiveValues:
    """M of every head and dimension, and which are massive.

    Attributes:
        frame: One row per massive dimension: ``site`` (q, k or v), ``layer``, ``head`` (of k and v, the key/value
            head), ``dimension``; its RoPE ``pair``, 0 the fastest (−1: none), ``depth`` = pair / (pairs − 1), 0 for the
            highest frequency and 1 for the lowest, ``wavelength`` in tokens (both NaN outside RoPE); ``norm``: M over
            all positions of all prompts; ``ratio``: M over its mean over dimensions, with its 95 % bootstrap interval
            over ``n`` prompts (NaN for one): prompts are drawn anew, and M and ratio taken over all that were drawn;
            ``matched``: for q, whether its key/value head has the same dimension massive in k; for k, whether any of
            its query heads has; False for v.
        norms: M per site, layer and head, over all prompts, [head, d]; d_head wide for q and k, d_value for v.
        prompt_norms: The same prompt by prompt, [prompt, head, d].
        factor: How many times the mean is massive.
        pairs: RoPE pairs of each layer that rotates.
        about: Model, prompts, positions left out.
    """

    frame: pd.DataFrame
    norms: dict[tuple[Site, int], Float[np.ndarray, "head d"]]
    prompt_norms: dict[tuple[Site, int], Float[np.ndarray, "prompt head d"]]
    factor: float
    pairs: dict[int, RopePairs]
    about: dict[str, Any]

    def massive(self, site: Site, layer: int) -> Bool[np.ndarray, "head d"]:
        """Which dimensions are massive.

        Raises:
            PlanError: The site or the layer was not measured.
        """
        if (site, layer) not in self.norms:
            raise PlanError(f"{site!r} of layer {layer} was not measured")
        return massive_dimensions(self.norms[site, layer], self.factor)

    def summary(self, seed: int = 0) -> pd.DataFrame:
        """What the paper claims, each share beside what chance would give.

        Returns:
            One row per claim and site, with columns ``what``, ``site``, ``value``, ``n``, ``null`` and ``p_value``.
            ``massive``: the share of all dimensions that are, of ``n``, without a null. ``low frequency``: the share of
            RoPE pairs with a massive dimension that lie in the slower half of the pairs. ``matched``: the share of q's
            massive dimensions that are massive in the head's k too; ``matched pair``: the same of RoPE pairs, since a
            slow pair can be long in one of its dimensions in q and in the other in k, and yet add much to every score.
            ``n`` is what the share is of, ``null`` the mean over 2000 draws in which each head's hits fall anywhere in
            the head, ``p_value`` how often they give as much; NaN where there are no hits. Heads count as independent,
            so p is a lower bound.

        Raises:
            PlanError: The seed is none.
        """
        import pandas as pd

        rng = np.random.default_rng(seed_number(seed))
        rows: list[tuple[str, str, float, int, float, float]] = []
        sites = tuple(dict.fromkeys(site for site, _ in self.norms))
        masks = {key: self.massive(*key) for key in self.norms}
        for site in sites:
            found = [mask for (at, _), mask in masks.items() if at == site]
            hits, cells = (sum(int(count) for count in counts) for counts in
                           ([mask.sum() for mask in found], [mask.size for mask in found]))  # fmt: skip
            rows.append(("massive", site, hits / cells, cells, np.nan, np.nan))
        for site in sites:
            if site != "v" and self.pairs:
                hit = {at: self._by_pair(masks[site, at], at) for at in self.pairs}
                slow = [np.broadcast_to(self._slow(at), mask.shape) for at, mask in hit.items()]
                rows.append(("low frequency", site, *_beyond_chance(list(hit.values()), slow, rng)))
        if {"q", "k"} <= set(sites):
            layers = [layer for site, layer in masks if site == "q"]
            queries = [masks["q", layer] for layer in layers]
            keys = [_for_queries(masks["k", at], len(masks["q", at])) for at in layers]
            rows.append(("matched", "q", *_beyond_chance(queries, keys, rng)))
            paired = [
                (self._by_pair(ours, at), self._by_pair(theirs, at))
                for at, ours, theirs in zip(layers, queries, keys, strict=True)
                if at in self.pairs
            ]
            if paired:
                ours, theirs = (list(masks) for masks in zip(*paired, strict=True))
                rows.append(("matched pair", "q", *_beyond_chance(ours, theirs, rng)))
        return pd.DataFrame(rows, columns=["what", "site", "value", "n", "null", "p_value"])

    def _by_pair(
        self, mask: Bool[np.ndarray, "head d"], layer: int
    ) -> Bool[np.ndarray, "head pair"]:
        pairs = self.pairs[layer]
        either: np.ndarray = mask[:, pairs.first] | mask[:, pairs.second]
        return either

    def _slow(self, layer: int) -> Bool[np.ndarray, " pair"]:
        rank = np.argsort(np.argsort(-self.pairs[layer].frequency, kind="stable"))
        slow: np.ndarray = rank >= len(rank) / 2
        return slow

    def to_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        plain = self.frame.astype(object).where(self.frame.notna(), None)
        return {"about": self.about, "factor": self.factor, "massive": plain.to_dict("records")}

    def to_json(self) -> str:
        """:meth:`to_dict` as one JSON document."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{int((self.frame['site'] == site).sum())} in {site}"
            for site in dict.fromkeys(site for site, _ in self.norms)
        )
        return (
            f"MassiveValues on {self.about['prompts']} prompt(s): dimensions above {self.factor:g} times their head's "
            f"mean: {counts}"
        )


def massive_values(
    model: Model,
    prompts: Prompt,
    *,
    factor: float = 5.0,
    skip: int = 1,
    sites: tuple[Site, ...] = SITES,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> MassiveValues:
    """Measure M at q, k and v of every head.

    Args:
        model: A model of one stack.
        prompts: The prompts; padding does not count.
        factor: How many times the mean over dimensions is massive.
        skip: Positions left out at the start of each prompt.
        sites: Which of q, k and v.
        seed: Seed of the bootstrap.
        tell: Told how far it is.

    Raises:
        PlanError: An argument does not fit.
        PromptError: A prompt has no position beyond those left out.
        UnsupportedError: The model has an encoder and a decoder.
    """
    factor, skip, seed = (
        finite_number(factor, "factor"),
        whole_number(skip, "skip"),
        seed_number(seed),
    )
    if factor <= 0:
        raise PlanError(f"factor={factor} must be above 0")
    if not sites or not set(sites) <= set(SITES):
        raise PlanError(f"sites={sites!r} must be some of {', '.join(SITES)}")
    if model.module.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{model.name} has an encoder and a decoder; massive values are of models of one stack"
        )
    ids = model.tokens(prompts)
    short = (lengths_of(ids) <= skip).nonzero()
    if len(short):
        raise PromptError(
            f"prompt {int(short[0, 0])} has no token after the first {skip} that skip= leaves out; give a longer one"
        )
    prompt_norms: dict[tuple[Site, int], np.ndarray] = {}
    done = 0
    for part in _batches(model, ids):
        trace = model.trace(part, keep=keep.tensors(*sites), logits="none")
        for layer in range(model.spec.n_layers):
            for site in sites:
                found = position_norms(trace.tensor(site, layer), trace.lengths, skip).cpu().numpy()
                held = prompt_norms.get((site, layer))
                prompt_norms[site, layer] = found if held is None else np.concatenate([held, found])
        done += len(part)
        tell(f"massive values: {done} of {len(ids)} prompts")
    norms = {key: np.sqrt((each**2).sum(0)) for key, each in prompt_norms.items()}
    pairs = {at: found for at, found in rope_pairs(model).items() if {"q", "k"} & set(sites)}
    frame = _frame(norms, prompt_norms, factor, pairs, seed)
    about = {"model": model.name, "prompts": len(ids), "skip": skip}
    return MassiveValues(frame, norms, prompt_norms, factor, pairs, about)


def position_norms(
    x: Float[Tensor, "prompt position head d"], lengths: Int[Tensor, " prompt"], skip: int
) -> Float[Tensor, "prompt head d"]:
    """M of each prompt: the norm over its positions from ``skip`` on, in float64."""
    at = torch.arange(x.shape[1], device=x.device)
    inside = (at >= skip) & (at < lengths.to(x.device)[:, None])
    squares = x.double().masked_fill(~inside[..., None, None], 0) ** 2
    return squares.sum(1).sqrt()


def massive_dimensions(
    norms: Float[np.ndarray, "*head d"], factor: float
) -> Bool[np.ndarray, "*head d"]:
    """Where M exceeds ``factor`` times its mean over dimensions."""
    mask: np.ndarray = norms > factor * norms.mean(-1, keepdims=True)
    return mask


# -- parts -------------------------------------------------------------------------------------------------------------


def _batches(model: Model, ids: Tensor) -> Iterator[Tensor]:
    numbers = sum(
        facts.d_head * (facts.n_heads + facts.n_kv_heads) + facts.d_value * facts.n_kv_heads
        for facts in model.spec.layers
    )
    at_once = max(1, _BUDGET // (8 * numbers * ids.shape[1]))
    yield from ids.split(at_once)


def _frame(
    norms: dict[tuple[Site, int], np.ndarray],
    prompt_norms: dict[tuple[Site, int], np.ndarray],
    factor: float,
    pairs: dict[int, RopePairs],
    seed: int,
) -> pd.DataFrame:
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    for (site, layer), table in norms.items():
        mask = massive_dimensions(table, factor)
        each = prompt_norms[site, layer]
        low = high = np.full(mask.shape, np.nan)
        if len(each) > 1:
            low, high = _ratio_intervals(each, np.flatnonzero(mask.sum(-1)), seed)
        for head, dimension in np.argwhere(mask).tolist():
            norm = table[head, dimension]
            place = _place(pairs.get(layer) if site != "v" else None, dimension)
            ends = (low[head, dimension], high[head, dimension])
            interval = (norm / table[head].mean(), *ends, len(each))
            matched = _matched(norms, site, layer, head, dimension, factor)
            rows.append((site, layer, head, dimension, *place, norm, *interval, matched))
    return pd.DataFrame(rows, columns=list(MASSIVE_COLUMNS))


def _ratio_intervals(
    prompt_norms: Float[np.ndarray, "prompt head d"], heads: Int[np.ndarray, " chosen"], seed: int
) -> tuple[Float[np.ndarray, "head d"], Float[np.ndarray, "head d"]]:
    """Percentile bootstrap over prompts of M over its mean over dimensions, M taken over all prompts of a draw.

    A mean of prompts' own ratios is another figure, and its interval need not hold this one.
    """
    n = len(prompt_norms)
    draws = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    counts = np.stack([(draws == prompt).sum(1) for prompt in range(n)], 1)
    low, high = (np.full(prompt_norms.shape[1:], np.nan) for _ in range(2))
    for head in heads:
        norms = np.sqrt(counts @ prompt_norms[:, head] ** 2)
        ratios = norms / np.maximum(norms.mean(-1, keepdims=True), np.finfo(float).tiny)
        low[head], high[head] = np.percentile(ratios, [2.5, 97.5], axis=0)
    return low, high


def _place(pairs: RopePairs | None, dimension: int) -> tuple[int, float, float]:
    """Pair, depth and wavelength of a dimension."""
    if pairs is not None:
        found = np.flatnonzero((pairs.first == dimension) | (pairs.second == dimension))
        if len(found):
            pair = int(found[0])
            depth = pair / max(1, len(pairs.first) - 1)
            return pair, depth, float(2 * np.pi / pairs.frequency[pair])
    return -1, np.nan, np.nan


def _matched(
    norms: dict[tuple[Site, int], np.ndarray],
    site: Site,
    layer: int,
    head: int,
    at: int,
    factor: float,
) -> bool:
    q, k = norms.get(("q", layer)), norms.get(("k", layer))
    if q is None or k is None or site == "v":
        return False
    group = len(q) // len(k)
    if site == "q":
        return bool(massive_dimensions(k, factor)[head // group, at])
    return bool(massive_dimensions(q, factor)[head * group : (head + 1) * group, at].any())


def _for_queries(mask: np.ndarray, n_heads: int) -> Bool[np.ndarray, "head d"]:
    return np.repeat(mask, n_heads // len(mask), 0)


def _beyond_chance(
    hits: list[np.ndarray], wanted: list[np.ndarray], rng: np.random.Generator
) -> tuple[float, int, float, float]:
    """Share of hits at wanted places, how many hits there are, and the same with each head's hits dealt at random."""
    total = sum(int(mask.sum()) for mask in hits)
    if not total:
        return np.nan, 0, np.nan, np.nan
    observed, drawn = 0, np.zeros(_DRAWS, int)
    for mask, places in zip(hits, wanted, strict=True):
        observed += int((mask & places).sum())
        for count, good in zip(mask.sum(-1), places.sum(-1), strict=True):
            if count:
                drawn += rng.hypergeometric(good, mask.shape[-1] - good, count, _DRAWS)
    p = (1 + int((drawn >= observed).sum())) / (1 + _DRAWS)
    return observed / total, total, float(drawn.mean() / total), p


__all__ = ["MassiveValues", "massive_values"]
