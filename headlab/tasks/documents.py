"""Several documents and a question that one of them answers, with the tokens of each document marked.

A prompt's documents tell of made-up things of one kind in one wording, so that a relevant document differs from
irrelevant ones in what it says and not in length or make. The gold document's place goes evenly round all places.
Documents are numbered as in the multi-document questions of Liu et al. 2023 (Lost in the middle), which Zhu et al.
2025 use.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from headlab.errors import PromptError
from headlab.tasks.needles import token_span
from headlab.tasks.prose import data_folder

TEMPLATE = (
    "Answer the question in a few words, using only the documents below.\n\n"
    "{documents}\n\nQuestion: {question}\nAnswer:"
)
_PLACES = re.compile(r"(\{documents\}|\{question\})")


@dataclass(frozen=True)
class DocumentQuestion:
    """A question and the documents to answer it from.

    Attributes:
        documents: Their texts.
        gold: Which of them answers the question.
        question: What is asked.
        answer: The right answer.
        template: Prompt with ``{documents}`` and ``{question}`` in it, once each.

    Raises:
        PromptError: There is no such document, a text is blank, or the template lacks a place.
    """

    documents: tuple[str, ...]
    gold: int
    question: str
    answer: str
    template: str = TEMPLATE

    def __post_init__(self) -> None:
        n = len(self.documents)
        if n < 2:
            raise PromptError(f"there must be at least 2 documents, not {n}")
        if not 0 <= self.gold < n:
            raise PromptError(
                f"gold is {self.gold}, but there are {n} documents, numbered from 0 to {n - 1}"
            )
        same = [
            at for at in range(n) if self.documents[at].strip() == self.documents[self.gold].strip()
        ]
        if len(same) > 1:
            raise PromptError(
                f"documents {same[0]} and {same[1]} are the same, so the gold one cannot be told apart; keep one"
            )
        for at, document in enumerate(self.documents):
            if not document.strip():
                raise PromptError(f"document {at} is empty")
        if not self.question.strip() or not self.answer.strip():
            raise PromptError("the question or its answer is empty")
        if sorted(_PLACES.findall(self.template)) != ["{documents}", "{question}"]:
            raise PromptError("the template must hold {documents} and {question} once each")

    @property
    def contradicted(self) -> bool:
        """Whether the answer stands, word for word, in another document and not in the gold one."""
        found = [_mention(self.answer).search(document) is not None for document in self.documents]
        return any(found) and not found[self.gold]

    def fewer(self, n: int) -> DocumentQuestion:
        """The same question with only ``n`` of its documents: the gold one and those next to it."""
        start = min(max(self.gold - n // 2, 0), max(len(self.documents) - n, 0))
        kept = self.documents[start : start + n]
        return replace(self, documents=kept, gold=self.gold - start)


@dataclass(frozen=True)
class DocumentPrompt:
    """A question as the model reads it.

    Attributes:
        ids: Token ids of the prompt, and of the response where one was given.
        start: Position of the response's first token: the number of the prompt's tokens.
        documents: Positions [start, stop) of each document's tokens.
        gold: Which document answers the question.
        answer: The right answer.
        answer_span: Positions [start, stop) of the answer's tokens in the gold document, at its first mention; None
            where the document does not hold it word for word, or not in tokens of its own.
    """

    ids: tuple[int, ...]
    start: int
    documents: tuple[tuple[int, int], ...]
    gold: int
    answer: str
    answer_span: tuple[int, int] | None

    @property
    def response(self) -> tuple[int, ...]:
        """Tokens of the response that was given; none where the model is to write its own."""
        return self.ids[self.start :]


def document_questions(n_prompts: int, n_documents: int, seed: int) -> tuple[DocumentQuestion, ...]:
    """Questions about made-up things; each answer stands once in its gold document and nowhere else.

    Args:
        n_prompts: How many questions.
        n_documents: Documents of each, from 2 to 20.
        seed: Seed of everything drawn.

    Raises:
        PromptError: There are not so many different documents of one kind.
    """
    data = _data()
    most = min(len(words) for words in data["lists"].values())
    if not 2 <= n_documents <= most:
        raise PromptError(f"n_documents={n_documents} must be from 2 to {most}")
    rng = np.random.default_rng(seed)
    golds = _rounds(rng, n_documents, n_prompts)
    kinds = _rounds(rng, len(data["kinds"]), n_prompts)
    return tuple(
        _question(rng, data["kinds"][kind], data["lists"], n_documents, gold)
        for kind, gold in zip(kinds, golds, strict=True)
    )


def document_prompt(tokenizer: Any, asked: DocumentQuestion, response: str = "") -> DocumentPrompt:
    """Tokenise a question; documents are found by character offsets.

    Args:
        tokenizer: Must give character offsets; with a chat template, the prompt is put as a user's turn.
        asked: The question.
        response: What the model is made to have answered; empty if it is to answer itself.

    Raises:
        PromptError: The tokenizer gives no offsets, no token covers a document or the response, or one reaches
            beyond a document's edge.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError(
            "documents need a tokenizer that gives character offsets (a fast tokenizer)"
        )
    prompt, places = _prompt(tokenizer, asked)
    gap = "" if not response.strip() or prompt[-1:].isspace() else " "
    text = prompt + gap + response.strip()
    encoded = tokenizer(
        text,
        add_special_tokens=tokenizer.chat_template is None,  # a chat template writes them itself
        return_offsets_mapping=True,
        verbose=False,
    )
    # Some tokenizers join a document's full stop and the blank line after it: blanks at a token's end do not count.
    offsets = [(low, low + len(text[low:high].rstrip())) for low, high in encoded["offset_mapping"]]
    ids = tuple(int(token) for token in encoded["input_ids"])
    start = len(ids)
    if response.strip():
        spoken = [at for at, (_, high) in enumerate(offsets) if high > len(prompt)]
        if not spoken:
            raise PromptError(f"no token covers the response {response!r:.80}")
        start, ids = spoken[0], ids[: spoken[-1] + 1]
    spans = tuple(token_span(offsets, low, high, text) for low, high in places)
    answer_span = None
    low, high = places[asked.gold]
    if found := _mention(asked.answer).search(text, low, high):
        with suppress(PromptError):  # tokens that hold more than the answer do not mark it
            answer_span = token_span(offsets, *found.span(), text)
    return DocumentPrompt(ids, start, spans, asked.gold, asked.answer.strip(), answer_span)


def _mention(answer: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(answer.strip())}(?!\w)")


def _prompt(tokenizer: Any, asked: DocumentQuestion) -> tuple[str, list[tuple[int, int]]]:
    """The prompt, and the characters of each document in it."""
    content, places = "", []
    for part in _PLACES.split(asked.template.strip()):
        if part == "{question}":
            content += asked.question.strip()
        elif part == "{documents}":
            for at, document in enumerate(asked.documents):
                content += ("\n" if at else "") + f"Document [{at + 1}] "
                places.append((len(content), len(content) + len(document.strip())))
                content += document.strip()
        else:
            content += part
    if tokenizer.chat_template is None:
        return content, places
    turn = [{"role": "user", "content": content}]
    prompt = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    shift = prompt.find(content)
    if shift < 0:
        raise PromptError("the tokenizer's chat template does not leave the prompt as it is")
    return prompt, [(low + shift, high + shift) for low, high in places]


def _question(
    rng: np.random.Generator, kind: Any, lists: Any, n_documents: int, gold: int
) -> DocumentQuestion:
    named = re.findall(r"\{(\w+)\}", kind["name"])
    drawn = {
        name: rng.permutation(lists[name]) for name in sorted({*named, *kind["slots"].values()})
    }
    wording = kind["documents"][rng.integers(len(kind["documents"]))]
    names, filled, documents = [], [], []
    for at in range(n_documents):
        uses: dict[str, int] = {}
        name = kind["name"]
        for part in named:
            words = drawn[part]
            # A list that a name uses twice gives another word each time.
            place = (at + uses.get(part, 0) * len(words) // 2) % len(words)
            name = name.replace(f"{{{part}}}", words[place], 1)
            uses[part] = uses.get(part, 0) + 1
        values = {slot: str(drawn[source][at]) for slot, source in kind["slots"].items()}
        names.append(name)
        filled.append(values)
        documents.append(wording.format(name=name, **values))
    slot = sorted(kind["questions"])[rng.integers(len(kind["questions"]))]
    question = kind["questions"][slot].format(name=names[gold])
    return DocumentQuestion(tuple(documents), gold, question, filled[gold][slot])


def _rounds(rng: np.random.Generator, n: int, wanted: int) -> list[int]:
    """Numbers below ``n`` in random order, each as often as any other, give or take one."""
    rounds = [rng.permutation(n) for _ in range(-(-wanted // n))]
    return [int(number) for number in np.concatenate([*rounds, []])[:wanted]]


@cache
def _data() -> Any:
    path = data_folder() / "documents.json"
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError(f"the document data in {path} cannot be read: {error}") from error
