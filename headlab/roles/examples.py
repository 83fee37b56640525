"""Attention rows to look at: for the best heads of each role, a high one, a median one and one at random.

Showing only the highest rows would flatter every head, so the three are always shown together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from headlab.attention import keep
from headlab.attention.heads import Head
from headlab.roles.base import Look, Measurement
from headlab.roles.scores import Example, Scores

if TYPE_CHECKING:
    from headlab.model import Model

#: Heads per role that get examples.
HEADS = 6
#: Rows beyond this position make poor reading; they are shown only where a role has no earlier ones.
_READABLE = 192
_KINDS: tuple[Literal["high", "median", "random"], ...] = ("high", "median", "random")


def examples(
    model: Model, scores: Scores, found: Mapping[str, Measurement], seed: int, heads: int = HEADS
) -> tuple[Example, ...]:
    """Examples for the best measured heads of every role."""
    shown: list[Example] = []
    rng = np.random.default_rng(seed)
    for name in scores.names:
        ranked = scores.ranked(name).dropna(subset=["score"]).head(heads)
        best = [
            Head(int(layer), int(head))
            for layer, head in zip(ranked["layer"], ranked["head"], strict=True)
        ]
        shown += _of_role(model, name, best, found[name].looks, rng)
    return tuple(shown)


def _of_role(
    model: Model, role: str, heads: list[Head], looks: tuple[Look, ...], rng: np.random.Generator
) -> list[Example]:
    picks: dict[int, list[tuple[Head, Literal["high", "median", "random"], int, float]]] = {}
    for head in heads:
        for kind, (look, query, value) in zip(_KINDS, _pick(looks, head, rng), strict=False):
            picks.setdefault(look, []).append((head, kind, query, value))
    made = []
    for at, chosen in picks.items():
        ids = torch.from_numpy(np.asarray(looks[at].ids))
        queries = sorted({query for _, _, query, _ in chosen})
        if all(layer.causal for layer in model.spec.layers):
            ids = ids[: queries[-1] + 1]  # what comes later changes nothing
        kept = keep.rows(queries=queries, heads=[head for head, *_ in chosen])
        trace = model.trace(ids, keep=kept, logits="none")
        rows, layers, columns = trace.rows[0], trace.layers("rows"), trace.head_axis("rows")
        for head, kind, query, value in chosen:
            row = rows[layers.index(head.layer), columns.index(head.head), queries.index(query)]
            causal = model.spec.layers[head.layer].causal
            weights = row[: query + 1] if causal else row
            made.append(
                Example(
                    role=role,
                    layer=head.layer,
                    head=head.head,
                    kind=kind,
                    tokens=trace.tokens[0][: query + 1] if causal else trace.tokens[0],
                    query=query,
                    weights=tuple(round(float(weight), 4) for weight in weights),
                    value=value,
                )
            )
    return sorted(
        made, key=lambda example: (heads.index(Head(example.layer, example.head)), example.kind)
    )


def _pick(
    looks: tuple[Look, ...], head: Head, rng: np.random.Generator
) -> list[tuple[int, int, float]]:
    """(look, query, value) of the highest, the median and a random row of one head."""
    rows = [
        (at, int(query), float(value))
        for at, look in enumerate(looks)
        for query, value in zip(look.queries, look.values[head.layer, head.head], strict=True)
        if np.isfinite(value)
    ]
    readable = [row for row in rows if row[1] < _READABLE]
    rows = sorted(readable or rows, key=lambda row: row[2])
    if not rows:
        return []
    return [rows[-1], rows[len(rows) // 2], rows[int(rng.integers(len(rows)))]]
