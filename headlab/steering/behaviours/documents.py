"""Answering a question from several documents, the one with the answer in the midst of them: what models do worst.

Liu et al. 2023 (Lost in the middle) found accuracy to fall where the document that answers stands neither first nor
last. Documents are headlab's own, of made-up things, so that nothing is known of them beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from headlab.arguments import count, is_integer, seed_number
from headlab.errors import PlanError
from headlab.steering.evaluation import Behaviour, Case
from headlab.steering.measures import answer_log_probability, says_answer
from headlab.tasks import DocumentQuestion, document_prompt, document_questions
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: Where the document with the answer stands: ``"middle"``, ``"every"`` place in turn, or a place counted from 0.
Gold = int | Literal["middle", "every"]


def questions(
    n_cases: int = 24, n_documents: int = 10, gold: Gold = "middle", seed: int = 0
) -> tuple[DocumentQuestion, ...]:
    """Questions with the document that answers them where it is wanted.

    Args:
        n_cases: How many.
        n_documents: Documents of each, from 2 to 20.
        gold: Its place.
        seed: Seed of everything drawn.

    Raises:
        PlanError: There is no such place.
        PromptError: There are not so many documents.
    """
    n_cases, seed = count(n_cases, "n_cases"), seed_number(seed)
    made = document_questions(n_cases, n_documents, seed)
    if gold == "every":
        return made
    place = n_documents // 2 if gold == "middle" else gold
    if not is_integer(place) or not 0 <= place < n_documents:
        raise PlanError(
            f"gold={shown(gold)} must be 'middle', 'every' or a place from 0 to {n_documents - 1}"
        )
    return tuple(_moved(asked, int(place)) for asked in made)


def documents(
    model: Model,
    n_cases: int = 24,
    n_documents: int = 10,
    gold: Gold = "middle",
    *,
    marked: Literal["documents", "gold"] = "documents",
    measure: Literal["says", "log_probability"] = "says",
    seed: int = 0,
    asked: Sequence[DocumentQuestion] | None = None,
) -> Behaviour:
    """Share of greedy answers that hold the right one.

    Args:
        model: The model, whose tokenizer and chat template write the prompts.
        n_cases: How many questions.
        n_documents: Documents of each, from 2 to 20.
        gold: Place of the document that answers.
        marked: What a method that marks text marks: every document, one span each, or the gold one alone.
        measure: ``"says"``, or the answer's log-probability in nats per token.
        seed: Seed of everything drawn.
        asked: Questions to put instead of headlab's own.

    Raises:
        PlanError: An argument is of another form.
        PromptError: The tokenizer gives no character offsets, or there are not so many documents.
    """
    measures = {"says": says_answer(16), "log_probability": answer_log_probability()}
    if measure not in measures or marked not in ("documents", "gold"):
        raise PlanError(
            f"measure={shown(measure)} must be 'says' or 'log_probability', and marked={shown(marked)} 'documents' or "
            "'gold'"
        )
    cases = []
    for each in asked or questions(n_cases, n_documents, gold, seed):
        prompt = document_prompt(model.tokenizer, each)
        spans = prompt.documents if marked == "documents" else (prompt.documents[prompt.gold],)
        cases.append(Case(prompt.ids, f" {each.answer}", spans=spans))
    about = {
        "says": "share of greedy answers that hold the right one",
        "log_probability": "log-probability of the right answer, nats per token",
    }
    return Behaviour("documents", about[measure], tuple(cases), measures[measure], batch=4)


def _moved(asked: DocumentQuestion, place: int) -> DocumentQuestion:
    """The same question with its gold document at a place, which it changes with the one there."""
    texts = list(asked.documents)
    texts[place], texts[asked.gold] = texts[asked.gold], texts[place]
    return replace(asked, documents=tuple(texts), gold=place)
