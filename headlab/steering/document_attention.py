"""How much the last token of a prompt attends to each of its documents, and what of that is the document's place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.attention import HeadsLike, keep
from headlab.errors import PlanError, PromptError
from headlab.steering.marks import SpansLike, find_spans, read_spans
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: Stands where a document was, to see what attention its place gets by itself; its tokens are repeated to the length.
DUMMY = "This page was left blank on purpose, and nothing on it bears on any question. "
#: Prompts run side by side.
_BATCH = 8

#: Positions [start, stop) of each document of a prompt.
Places = list[tuple[int, int]]


def document_places(
    model: Model, ids: Int[Tensor, "batch position"], spans: SpansLike
) -> list[Places]:
    """Where the documents of each prompt are, one span each, in the order of the prompt.

    Raises:
        PlanError: Spans are neither text nor positions, or are of another number of prompts.
        PromptError: A document is not in its prompt, is there more than once, or overlaps another.
    """
    per_prompt, given = read_spans(spans)
    if per_prompt and len(given) != len(ids):
        raise PlanError(
            f"documents= marks {len(given)} prompts, but {len(ids)} are run; give one list of documents for each"
        )
    found: list[Places] = []
    for row, tokens in enumerate(ids.cpu()):
        places: Places = []
        for span in given[row if per_prompt else 0]:
            at = find_spans(model, tokens[tokens >= 0].tolist(), [span])
            if len(at) > 1:
                raise PromptError(
                    f"the document {shown(span)} stands {len(at)} times in the prompt; mark it by positions"
                )
            places += at
        places.sort()
        for (_, stop), (start, _) in pairwise(places):
            if start < stop:
                raise PromptError(
                    f"two documents share the token at position {start}; mark them apart"
                )
        found.append(places)
    return found


def document_masks(places: Sequence[Places], n: int) -> Bool[Tensor, "batch document position"]:
    """Which positions belong to which document; documents that a prompt lacks have none."""
    masks = torch.zeros(len(places), max(map(len, places)), n, dtype=torch.bool)
    for row, spans in enumerate(places):
        for at, (start, stop) in enumerate(spans):
            masks[row, at, start:stop] = True
    return masks


def document_attention(
    model: Model,
    ids: Int[Tensor, "batch position"],
    places: Sequence[Places],
    heads: HeadsLike | None = None,
) -> Float[np.ndarray, "batch document"]:
    """Attention of each prompt's last token to each document: mean over its tokens, layers and heads.

    NaN where a prompt has no such document.

    Args:
        model: The model.
        ids: The prompts, −1 beyond their ends.
        places: Where their documents are.
        heads: Heads to average over; all by default.
    """
    masks = document_masks(places, ids.shape[1]).to(ids.device)
    sizes = masks.sum(-1).cpu().numpy()
    found = np.full(sizes.shape, np.nan)
    names = [str(at) for at in range(masks.shape[1])]
    for start in range(0, len(ids), _BATCH):
        rows = slice(start, start + _BATCH)
        segments = {name: masks[rows, at] for at, name in enumerate(names)}
        plan = keep.statistics("segment_mass", segments=segments, queries=[-1], heads=heads)
        trace = model.trace(ids[rows], plan, logits="none")
        mass = trace.statistic("segment_mass")[
            :, :, :, 0
        ].double()  # [batch, layer, head, document]
        found[rows] = mass.flatten(1, 2).nanmean(1).cpu().numpy()
    with np.errstate(invalid="ignore"):
        return np.where(sizes > 0, found / np.maximum(sizes, 1), np.nan)


def relevance(
    model: Model,
    ids: Int[Tensor, "batch position"],
    places: Sequence[Places],
    dummy: str | Sequence[int] = DUMMY,
    heads: HeadsLike | None = None,
) -> Float[np.ndarray, "batch document"]:
    """Attention to each document less that to a dummy of as many tokens in its place; NaN where there is none.

    It takes a pass for the prompt and one for each of its documents.

    Raises:
        PromptError: The dummy has no tokens, or is text and the model has no tokenizer.
    """
    filler = torch.tensor(_dummy_ids(model, dummy), device=ids.device)
    found = np.full((len(ids), max(map(len, places))), np.nan)
    for row, spans in enumerate(places):
        n = int((ids[row] >= 0).sum())
        runs = ids[row, :n].repeat(len(spans) + 1, 1)
        for at, (start, stop) in enumerate(spans):
            repeated = filler.repeat(-(-(stop - start) // len(filler)))
            runs[at + 1, start:stop] = repeated[: stop - start]
        mean = document_attention(model, runs, [spans] * len(runs), heads)
        every = np.arange(len(spans))
        found[row, : len(spans)] = mean[0] - mean[every + 1, every]
    return found


def _dummy_ids(model: Model, dummy: str | Sequence[int]) -> list[int]:
    if not isinstance(dummy, str):
        found = [int(token) for token in dummy]
    elif model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer, so dummy= must be token ids")
    else:
        found = list(model.tokenizer(dummy, add_special_tokens=False)["input_ids"])
    if not found:
        raise PromptError("dummy= has no tokens; give a sentence")
    return found
