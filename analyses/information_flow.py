"""Information flow routes (Ferrando and Voita 2024): which heads bring what tokens are made of.

Importances of heads over windows of headlab's prose, without alternatives or templates. The paper's claims about heads
could be checked in its abstract alone. How well the importances find circuits is MIB's figure (CMD, the smaller the
better), which needs its graph and task and is not measured here.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.attention import Head
from headlab.causal.attribution.flow import information_flow
from headlab.errors import UnsupportedError
from headlab.roles.base import Probing
from headlab.tasks import prose, prose_windows

LLAMA = "Llama 2 (abstract)"
LENGTH, TOP, THRESHOLD = 32, 10, 0.04
SOURCES = ("itself", "previous token", "first token", "others")
CMD = {"GPT-2 small": (0.42, 0.75), "Qwen-2.5 0.5B": (0.69, 0.72)}


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    if model.tokenizer is None:
        return [Figure("windows", 0, note="not measurable: the model has no tokenizer")]
    probing = Probing(model, seed)
    length = probing.length(LENGTH)
    windows = prose_windows(model.tokenizer, prose(), n_prompts, length, seed, probing.bos)
    found = []
    try:
        found = [information_flow(model, window[None]) for window in windows]
    except UnsupportedError as error:
        return [Figure("windows", 0, note=f"not measurable: {error}")]
    heads = np.mean([flow.heads[..., 1:].mean(-1) for flow in found], 0)  # without the first token
    sources = np.mean([_sources(flow.attention) for flow in found], 0)
    order = np.argsort(-heads, axis=None)
    top = [Head(*(int(at) for at in np.unravel_index(place, heads.shape))) for place in order[:TOP]]
    main_source = {head: int(sources[:, head.layer, head.head].argmax()) for head in top}
    shown = [f"{head} {heads[head]:.2g} ({SOURCES[main_source[head]]})" for head in top]
    share = np.sort(heads, axis=None)[::-1]
    largest = max(1, round(heads.size / 20))
    previous = sum(SOURCES[source] == "previous token" for source in main_source.values())
    kinds = "among attention, MLP and stream" if found[0].parallel else "in the attention block"
    figures = [
        Figure("windows", len(found), note=f"prose, {length} tokens"),
        Figure(f"heads, share of importance {kinds}", float(heads.sum(1).mean())),
        Figure(
            "MLP, share of importance in its block",
            float(np.mean([flow.mlp[:, 1:].mean() for flow in found])),
        ),
        Figure(
            "share of all heads' importance carried by the largest 5 %",
            float(share[:largest].sum() / share.sum()),
        ),
        Figure(
            f"of the {len(top)} most important heads, those that bring most from the previous token",
            previous,
            "previous-token and subword-merging heads are important overall",
            LLAMA,
            note=", ".join(shown),
        ),
        Figure(
            f"edges in the routes of a last token, of importance above {THRESHOLD}",
            float(np.mean([len(flow.routes(-1, THRESHOLD).links) for flow in found])),
        ),
    ]
    for name, (published, chance) in CMD.items():
        note = f"random {chance}; not measured here"
        figures.append(
            Figure("CMD on IOI, edges ranked by importance (MIB)", None, published, name, note=note)
        )
    return figures


def _sources(attention: np.ndarray) -> np.ndarray:
    """Shares of each head's importance by where it comes from, [source, layer, head] in the order of SOURCES."""
    total = attention.sum((2, 3)).clip(1e-30)
    own, before = (np.trace(attention, -lag, 2, 3) for lag in (0, 1))
    first = attention[:, :, 2:, 0].sum(-1)
    return np.stack([own, before, first, total - own - before - first]) / total


if __name__ == "__main__":
    main(run, __doc__)
