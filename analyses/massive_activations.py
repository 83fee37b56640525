"""Massive activations: Sun et al. 2024 (Massive activations in large language models).

At each block's output the largest |x| of a text beside the median of |x|; massive where |x| > 100 and at least 1000
times the median. The paper's figures are of 10 sequences of its own, ours of 64-token texts of prose behind BOS. Its
intervention sets the massive activations, where they first appear, to zero or to their mean over texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import exp
from typing import Any

import numpy as np
import torch
from common import Figure, is_model, main
from torch import Tensor

import headlab as hl
from headlab.roles import Probing, sink_details
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.prose_rows import text_ids

LLAMA_2 = "Llama-2-7b-hf"
LENGTH, TOP = 64, 3
SECOND_HAND = "quoted from a secondary source"


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure and, in decoders, intervene."""
    probing = Probing(model, seed=seed, n_prompts=n_prompts)
    ids = text_ids(probing, probing.length(LENGTH))
    found = sink_details.short_texts(probing, ids)
    same = is_model(model, LLAMA_2)
    ratio = found.peak / found.median
    rate = sink_details.massive_details(found)["massive_rate"].values[:, 0]
    layers = np.flatnonzero(rate >= 0.5).tolist()
    span = f"{layers[0]}–{layers[-1]}" if layers else "none"

    def beside(what: str, ours: float | str, published: float | str, note: str = "") -> Figure:
        return Figure(what, ours, published, LLAMA_2, same, note)

    figures = [
        beside("blocks with them in most texts, from 0", span, "2–30", "roughly"),
        Figure("largest |x| over the median, mean over texts", float(np.nanmax(ratio.mean(0)))),
        Figure("largest |x|, mean over texts", float(np.nanmax(found.peak.mean(0)))),
    ]
    if not layers:
        return figures
    dimensions, positions = massive_places(model, ids, first := layers[0])
    start = f"{positions.count(0) / len(positions):.0%} at the first token"
    figures += [
        beside("their dimensions there", ", ".join(map(str, dimensions)), "1415, 2533"),
        beside("where they sit there", start, "the first token, and the first “.” or line break"),
    ]
    if all(layer.causal for layer in model.spec.layers):
        figures.append(beside("perplexity as it is", perplexity(model, ids), 5.47, SECOND_HAND))
        for kind, published in (("zero", "∞"), ("mean", 5.47)):
            with massive_set_to(model, ids, first, dimensions, kind):
                ours = perplexity(model, ids)
            what = f"perplexity with them set to {kind} at block {first}"
            figures.append(beside(what, ours, published, f"on WikiText, {SECOND_HAND}"))
    return figures


def massive_places(model: hl.Model, ids: Tensor, layer: int) -> tuple[list[int], list[int]]:
    """Dimensions that hold massive activations at a block's output, and the positions of all of them."""
    at = massive(residual(model, ids, layer)).nonzero()
    commonest = torch.bincount(at[:, 2]).sort(descending=True, stable=True)
    dimensions = commonest.indices[commonest.values > 0][:TOP].tolist()
    return sorted(dimensions), at[:, 1].tolist()


def massive(x: Tensor) -> Tensor:
    """Which entries are massive, text by text."""
    size = x.float().abs()
    median = size.flatten(1).median(1).values[:, None, None]
    return (size > sink_details.MASSIVE) & (size >= sink_details.MASSIVE_RATIO * median)


def residual(model: hl.Model, ids: Tensor, layer: int) -> Tensor:
    """The residual stream after a block."""
    with sink_details.block_outputs(model) as outputs:
        model.trace(ids, logits="none")
        return outputs[layer]


@contextmanager
def massive_set_to(
    model: hl.Model, ids: Tensor, layer: int, dimensions: list[int], kind: str
) -> Iterator[None]:
    """Massive activations of some dimensions set to zero, or to their mean over texts, at a block's output."""
    x = residual(model, ids, layer)
    means = {d: x[..., d][massive(x)[..., d]].mean() for d in dimensions}

    def change(block: Any, args: Any, output: Any) -> Any:
        whole = output[0] if isinstance(output, tuple) else output
        there, new = massive(whole), whole.clone()
        for dimension in dimensions:
            value = 0.0 if kind == "zero" else means[dimension]
            new[..., dimension][there[..., dimension]] = value
        return (new, *output[1:]) if isinstance(output, tuple) else new

    block = sink_details.block_of(model.module, model.spec.layers[layer].name)
    hook = block.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def perplexity(model: hl.Model, ids: Tensor) -> float:
    """Of the texts' tokens."""
    return exp(-float(next_token_log_probability(model, ids).mean()))


if __name__ == "__main__":
    main(run, __doc__)
