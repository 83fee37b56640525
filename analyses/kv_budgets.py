"""KV budgets by head role: is needle recall kept where only retrieval heads keep whole caches?

Key/value heads of retrieval heads (Wu et al. 2024, as headlab finds them on other needles) keep every key; the others
the first four and the most recent, as in StreamingLLM (Xiao et al. 2023), from the prompt on. Against that stand
budgets of the same size with whole caches elsewhere, drawn at random, and none at all. Dropping is simulated: keys keep
their positions and are hidden. Nothing published fits: StreamingLLM measures perplexity, on larger models.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.attention.heads import Head
from headlab.errors import PromptError
from headlab.statistics import bootstrap_interval, sign_flip_p
from headlab.steering import KVBudget
from headlab.steering.behaviours.needles import needles

#: Whole caches for the key/value heads of so many of the best retrieval heads.
TOP = (10, 20)
LENGTH, SINK, RECENT, DRAWS = 512, 4, 64, 2
#: StreamingLLM's perplexity of Llama-2-7B with a cache of 4096 without and with four sink tokens.
PERPLEXITY = "3360 and 9.59"


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Score the heads on some needles, and measure recall on others under each budget."""
    room = model.spec.max_context
    length = LENGTH if room is None else min(LENGTH, room - 40)
    try:
        behaviour = needles(model, max(2, n_prompts), length=length, seed=seed + 101)
    except PromptError as error:
        return [Figure("KV budgets", None, note=f"not measurable: {error}")]
    scores = hl.score(model, "retrieval", seed=seed, n_prompts=n_prompts).frame
    figures = [
        Figure(
            "perplexity without and with sink tokens in the cache",
            None,
            PERPLEXITY,
            "Llama-2-7B, PG19 (StreamingLLM)",
            note="for scale: no figure of ours stands beside it",
        )
    ]
    known = scores.dropna(subset=["score"]).query("score > 0")
    if known.empty:
        return [*figures, Figure("KV budgets by role", None, note=str(scores["note"].iloc[0]))]
    ranked = known.sort_values(["score", "layer", "head"], ascending=[False, True, True])
    heads = [Head(int(row.layer), int(row.head)) for row in ranked.itertuples()]
    full = KVBudget("*.*").cache_bytes(model, length)
    whole = behaviour.values(model, None)
    none = KVBudget(None, SINK, RECENT)
    figures += [
        _figure("full cache", whole, whole, full, full, seed),
        _figure(
            "no whole caches",
            behaviour.values(model, none),
            whole,
            none.cache_bytes(model, length),
            full,
            seed,
        ),
    ]
    for k in dict.fromkeys(min(k, len(heads)) for k in TOP):
        budget = KVBudget(heads[:k], SINK, RECENT)
        held, others = (
            len(budget.whole_groups(model)),
            sum(layer.n_kv_heads for layer in model.spec.layers),
        )
        if 2 * held > others:
            continue
        kept = behaviour.values(model, budget)
        random = np.mean(
            [behaviour.values(model, budget.redrawn(model, seed + draw)) for draw in range(DRAWS)],
            0,
        )
        size = budget.cache_bytes(model, length)
        figures += [
            _figure(
                f"whole caches for the {k} best retrieval heads ({held} groups)",
                kept,
                whole,
                size,
                full,
                seed,
            ),
            _figure(
                f"whole caches for {held} groups at random, mean of {DRAWS} draws",
                random,
                whole,
                size,
                full,
                seed,
            ),
            _difference(f"the {k} best retrieval heads less random groups", kept - random, seed),
        ]
    return figures


def _figure(
    what: str, recall: np.ndarray, whole: np.ndarray, size: int, full: int, seed: int
) -> Figure:
    low, high = bootstrap_interval(recall[:, None], seed)
    return Figure(
        f"needle recall, {what} (%)",
        float(recall.mean()),
        note=f"[{low[0]:.0f}, {high[0]:.0f}], {len(recall)} needles; {(recall - whole).mean():+.0f} points; cache "
        f"{size / 2**20:.1f} of {full / 2**20:.1f} MiB ({size / full:.0%})",
    )


def _difference(what: str, change: np.ndarray, seed: int) -> Figure:
    low, high = bootstrap_interval(change[:, None], seed)
    p = float(sign_flip_p(change[:, None], seed)[0])
    return Figure(
        f"needle recall, {what} (points)",
        float(change.mean()),
        note=f"[{low[0]:.0f}, {high[0]:.0f}], p {p:.2g} (one-sided, signs flipped)",
    )


if __name__ == "__main__":
    main(run, __doc__)
