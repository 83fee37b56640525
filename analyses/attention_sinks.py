"""Attention sinks: Gu et al. 2024 (When attention sink emerges) and Xiao et al. 2023 (StreamingLLM).

Gu et al.: Sink_k^ε, the share over texts, layers and heads of keys k with α > ε = 0.3, texts of 64 tokens. Their
figures per model stand here from memory and are unverified.

Xiao et al.: perplexity when a window of recent tokens slides over the text and the first n tokens are kept or
evicted. Theirs: a cache of 4096 tokens on PG-19, keys rotated to their place in the cache. Ours: a window of 64 on 512
tokens of prose, keys at their own positions, so that only the direction compares. Perplexity is over the tokens
after the window is full.
"""

from __future__ import annotations

from math import exp

import torch
from common import Figure, is_model, main

import headlab as hl
from headlab.roles import Probing
from headlab.roles.blocking import block_first, hide
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.prose_rows import text_ids
from headlab.roles.sink import Sink

#: Sink_1^ε in % on natural text, from memory.
GU = {"gpt2-xl": 77.0, "Llama-2-7b-hf": 92.5, "Mistral-7B-v0.1": 97.5, "Meta-Llama-3-8B": 99.0}
#: Perplexity of Llama-2-7B by sinks kept beside the window (Xiao et al., Table 2, as quoted elsewhere).
XIAO = {0: 3359.95, 1: 11.88, 2: 10.51, 4: 9.59, 8: 9.54}
LLAMA_2 = "Llama-2-7b-hf"
TEXTS, LENGTH, WINDOW = 3, 512, 64


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Everything, on one model."""
    figures = gu(model, seed, n_prompts)
    if all(layer.causal for layer in model.spec.layers):
        figures += xiao(model, seed)
    return figures


def gu(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Sink rates by the paper's convention."""
    scores = hl.score(model, [Sink("gu")], seed=seed, n_prompts=n_prompts)
    ours = 100 * float(scores.frame["score"].mean())
    figures = [
        Figure(
            "Sink_1^0.3 on natural text (%)", ours, value, name, is_model(model, name), "unverified"
        )
        for name, value in GU.items()
    ]
    rates = scores.detail("sink", "sink_rate").groupby("at")["value"].mean()
    later = rates[rates.index > 0]
    note = f"at position {int(later.idxmax())}; prompts begin with BOS where the model has one"
    figures.append(Figure("largest Sink_k^0.3 at k > 1 (%)", 100 * float(later.max()), note=note))
    if "first_token_removed" in set(scores.details["detail"]):
        for name, what in (
            ("first_token_removed", "mean mass on the first token of a text without BOS"),
            ("bos_moved", "mean mass on BOS in the middle of a text"),
        ):
            figures.append(Figure(what, float(scores.detail("sink", name)["value"].mean())))
    return figures


def xiao(model: hl.Model, seed: int) -> list[Figure]:
    """Perplexity with and without the first tokens."""
    probing = Probing(model, seed=seed, n_prompts=TEXTS)
    with_bos = probing.bos is not None
    length = probing.length(LENGTH)
    ids = text_ids(probing, length)
    figures = [Figure("perplexity of prose, whole context", perplexity(model, ids))]
    if with_bos:
        bare = perplexity(model, ids[:, 1:])
        figures.append(Figure("the same without BOS", bare, note="another token is first then"))
    with model.edit(block_first("*.*")):
        note = "the second token is the first then"
        hidden = perplexity(model, ids)
        figures.append(Figure("the first token hidden from every head", hidden, note=note))
    if length <= 2 * WINDOW:
        return figures
    for kept, published in XIAO.items():
        rule = hide("*.*", lambda query, key, kept=kept: (query - key >= WINDOW) & (key >= kept))
        with model.edit(rule):
            ours = perplexity(model, ids)
        figures.append(
            Figure(
                f"window of recent tokens, {kept} first tokens kept",
                ours,
                published,
                LLAMA_2,
                note="4096-token cache on PG-19 there, 64 tokens of prose here",
            )
        )
    return figures


def perplexity(model: hl.Model, ids: torch.Tensor) -> float:
    """Of the tokens beyond the window, one text at a time."""
    losses = [-next_token_log_probability(model, text[None])[:, WINDOW:].mean() for text in ids]
    return exp(float(torch.stack(losses).mean()))


if __name__ == "__main__":
    main(run, __doc__)
