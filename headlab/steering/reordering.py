"""Putting documents where a model looks: attention sorting and attention-driven reranking.

**Attention sorting** (Peysakhovich and Lerer 2023): read the attention of the prompt's last token to each document (one
decoding step), sort the documents so that the most attended stands last, repeat, then answer. From memory: whether the
authors sum or average over a document's tokens, and over which heads, is not known to us; here the mean over its
tokens, over all layers and heads by default.

**AttnRank** ("attention-driven reranking", arXiv 2508.05128): the model's preference for a place is the mean attention
that documents get there, on a few questions whose documents are shuffled; the i-th most relevant document then goes
to the place of i-th highest preference. From the abstract alone: the paper chooses layers in a way that we do not
know. Relevance comes from a retriever: :func:`word_overlap` is a plain one.

Neither edits the model: both give the question with its documents in another order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from headlab.arguments import count, seed_number
from headlab.attention import HeadsLike
from headlab.errors import PlanError
from headlab.steering.document_attention import document_attention
from headlab.tasks import DocumentPrompt, DocumentQuestion, document_prompt
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

_BATCH = 8


@dataclass(frozen=True)
class Reordered:
    """A question with its documents in another order.

    Attributes:
        asked: The question in the new order, its gold document's number with it.
        order: For each place, the number that its document had before.
        attention: Mean attention of the last token to a token of each document, by its old number, when last read;
            empty where it was not.
    """

    asked: DocumentQuestion
    order: tuple[int, ...]
    attention: tuple[float, ...] = ()

    def prompt(self, model: Model) -> DocumentPrompt:
        """The question as the model reads it.

        Raises:
            PromptError: The tokenizer gives no character offsets.
        """
        return document_prompt(model.tokenizer, self.asked)


def reorder(asked: DocumentQuestion, order: Sequence[int]) -> Reordered:
    """Put documents in an order: for each place, the document's number.

    Raises:
        PlanError: The order does not name each document once.
    """
    numbers = [int(number) for number in order]
    if sorted(numbers) != list(range(len(asked.documents))):
        raise PlanError(
            f"order={shown(list(order))} must name each of the {len(asked.documents)} documents once, counted from 0"
        )
    texts = tuple(asked.documents[number] for number in numbers)
    moved = replace(asked, documents=texts, gold=numbers.index(asked.gold))
    return Reordered(moved, tuple(numbers))


def attention_to_documents(
    model: Model, asked: Sequence[DocumentQuestion], heads: HeadsLike | None = None
) -> Float[np.ndarray, "question document"]:
    """Attention of each prompt's last token to each document: mean over its tokens, layers and heads, in the order of
    the prompt; NaN where a question has fewer documents.

    Raises:
        PromptError: The tokenizer gives no character offsets, or a prompt is too long.
    """
    prompts = [document_prompt(model.tokenizer, each) for each in asked]
    found = np.full((len(prompts), max(len(each.documents) for each in prompts)), np.nan)
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        ids = torch.full((len(batch), max(len(each.ids) for each in batch)), -1)
        for row, each in enumerate(batch):
            ids[row, : len(each.ids)] = torch.tensor(each.ids)
        mean = document_attention(model, ids, [list(each.documents) for each in batch], heads)
        found[start : start + len(batch), : mean.shape[1]] = mean
    return found


def attention_sorted(
    model: Model,
    asked: Sequence[DocumentQuestion],
    *,
    repeats: int = 1,
    heads: HeadsLike | None = None,
) -> tuple[Reordered, ...]:
    """Sort each question's documents by the attention they get, the most attended last.

    Args:
        model: The model.
        asked: The questions.
        repeats: How many times attention is read and documents are sorted.
        heads: Heads to average over; all by default.

    Raises:
        PlanError: There are no questions.
        PromptError: A prompt cannot be made or is too long.
    """
    if not asked:
        raise PlanError("there are no questions to sort the documents of")
    repeats = count(repeats, "repeats")
    orders = [list(range(len(each.documents))) for each in asked]
    now: Sequence[DocumentQuestion] = list(asked)
    before: list[tuple[float, ...]] = []
    for _ in range(repeats):
        attention = attention_to_documents(model, now, heads)
        before = []
        for at, each in enumerate(asked):
            own = attention[at, : len(each.documents)]
            by_number = dict(zip(orders[at], own.tolist(), strict=True))
            before.append(tuple(by_number[number] for number in range(len(own))))
            orders[at] = [orders[at][place] for place in np.argsort(own, kind="stable")]
        now = [reorder(each, order).asked for each, order in zip(asked, orders, strict=True)]
    return tuple(
        replace(reorder(each, order), attention=seen)
        for each, order, seen in zip(asked, orders, before, strict=True)
    )


def place_preference(
    model: Model,
    asked: Sequence[DocumentQuestion],
    *,
    shuffles: int = 2,
    heads: HeadsLike | None = None,
    seed: int = 0,
) -> Float[np.ndarray, " place"]:
    """Mean attention that documents get at each place, over questions whose documents are shuffled.

    Args:
        model: The model.
        asked: A small set of questions, all of as many documents.
        shuffles: Orders drawn for each question.
        heads: Heads to average over; all by default.
        seed: Seed of the orders.

    Raises:
        PlanError: There are no questions, or they have different numbers of documents.
        PromptError: A prompt cannot be made or is too long.
    """
    numbers = {len(each.documents) for each in asked}
    if len(numbers) != 1:
        raise PlanError(
            f"the questions have {sorted(numbers) or 'no'} documents; they must have equally many"
        )
    rng = np.random.default_rng(seed_number(seed))
    shuffled = [
        reorder(each, rng.permutation(len(each.documents)).tolist()).asked
        for each in asked
        for _ in range(count(shuffles, "shuffles"))
    ]
    mean: np.ndarray = attention_to_documents(model, shuffled, heads).mean(0)
    return mean


def ranked_into_places(
    asked: DocumentQuestion,
    relevance: Float[np.ndarray, " document"],
    preference: Float[np.ndarray, " place"],
) -> Reordered:
    """Put the i-th most relevant document at the place of i-th highest preference; of equal ones the first.

    Raises:
        PlanError: There are not as many relevances and preferences as documents.
    """
    n = len(asked.documents)
    if len(relevance) != n or len(preference) != n:
        raise PlanError(
            f"{n} documents need as many relevances and preferences, not {len(relevance)} and {len(preference)}"
        )
    order = np.empty(n, int)
    order[np.argsort(-np.asarray(preference), kind="stable")] = np.argsort(
        -np.asarray(relevance), kind="stable"
    )
    return reorder(asked, order.tolist())


def word_overlap(asked: DocumentQuestion) -> Float[np.ndarray, " document"]:
    """A plain retriever: the question's words that a document holds, each weighing the less the more documents hold it.

    Σ ln((1 + N) / (1 + n_w)) over words w that both hold, of N documents n_w with w; whatever the case of letters.
    """
    held = [set(_words(document)) for document in asked.documents]
    weights = {
        word: float(np.log((1 + len(held)) / (1 + sum(word in words for words in held))))
        for word in set(_words(asked.question))
    }
    return np.array([sum(weights[word] for word in weights if word in words) for words in held])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
