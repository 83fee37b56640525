"""Span features: ratios averaged over spans of a response, each with one label and the document it belongs to.

``window``: every full window of some tokens (8 in the paper), labelled 1 only if all its tokens are; a shorter response
is one window. ``given``: the response's own spans, as in the paper's predefined spans: the bad ones of a response
together are one span of label 0, what comes before the first and after the last are spans of label 1, what lies between
them is left out, and a response without bad tokens is one span of label 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from headlab.lookback.examples import Tokens

WINDOW = 8
Kind: TypeAlias = Literal["window", "given"]


@dataclass(frozen=True)
class Spans:
    """Spans of several responses.

    Attributes:
        features: Mean ratios, [span, layer · head].
        labels: 1 or 0, [span].
        documents: Number of the document of each span, [span].
        examples: Number of the example of each span, [span].
    """

    features: Float[np.ndarray, "span feature"]
    labels: Int[np.ndarray, " span"]
    documents: Int[np.ndarray, " span"]
    examples: Int[np.ndarray, " span"]


def spans_of(
    ratios: Sequence[Float[np.ndarray, "token layer head"]],
    examples: Sequence[Tokens],
    kind: Kind = "window",
    window: int = WINDOW,
) -> Spans:
    """Spans of labelled examples.

    Args:
        ratios: Ratios of each example.
        examples: The examples, with labels.
        kind: ``"window"`` or ``"given"``.
        window: Tokens of a window.
    """
    names = {name: at for at, name in enumerate(dict.fromkeys(x.document for x in examples))}
    features, labels, documents, numbers = [], [], [], []
    for at, (found, example) in enumerate(zip(ratios, examples, strict=True)):
        assert example.labels is not None
        flat = found.reshape(len(found), -1).astype(np.float64)
        own = example.labels.numpy()
        parts = _given(own) if kind == "given" else windows(len(flat), window)
        for part in parts:
            features.append(flat[part].mean(0))
            labels.append(int(own[part].min()))
            documents.append(names[example.document])
            numbers.append(at)
    return Spans(np.stack(features), np.array(labels), np.array(documents), np.array(numbers))


def windows(n: int, window: int) -> list[slice]:
    """Every full window of ``n`` tokens, or all of them where they are fewer."""
    if n <= window:
        return [slice(0, n)]
    return [slice(start, start + window) for start in range(n - window + 1)]


def _given(labels: Int[np.ndarray, " token"]) -> list[np.ndarray]:
    bad = np.flatnonzero(labels == 0)
    if not len(bad):
        return [np.arange(len(labels))]
    parts = [np.arange(bad[0]), bad, np.arange(bad[-1] + 1, len(labels))]
    return [part for part in parts if len(part)]
