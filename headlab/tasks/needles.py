"""Needle in a haystack: one odd fact in a long text, a question about it, and where its answer stands.

Spans come from the tokenizer's character offsets, so the answer is found exactly or the trial is refused; a
search for overlapping token sets, as in published code, may begin early or match the wrong words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from headlab.errors import PromptError

_TASK = "\n\nBased on the content of the text, answer the question.\nQuestion: {question}\nAnswer:"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Needle:
    """A fact no text contains.

    Attributes:
        fact: The sentence to hide; it holds the answer word for word.
        question: What is asked.
        answer: The words a head must copy.
    """

    fact: str
    question: str
    answer: str

    def __post_init__(self) -> None:
        if self.fact.count(self.answer) != 1:
            raise PromptError(
                f"the needle {self.fact!r} must contain its answer {self.answer!r} exactly once"
            )


NEEDLES = (
    Needle(
        "The lighthouse keeper at Marrow Point feeds her seven tame foxes with salted plums every evening.",
        "What does the lighthouse keeper at Marrow Point feed her foxes with?",
        "salted plums",
    ),
    Needle(
        "The painter Odile Brandt mixed her famous green from copper dust and crushed mint leaves.",
        "What did the painter Odile Brandt mix her famous green from?",
        "copper dust and crushed mint leaves",
    ),
    Needle(
        "In the village of Tarnholt the bakers hide a silver thimble inside the largest loaf each spring.",
        "What do the bakers of Tarnholt hide inside the largest loaf?",
        "a silver thimble",
    ),
    Needle(
        "Captain Ruslan Veck always kept a jar of orange marmalade beside the ship's compass.",
        "What did Captain Ruslan Veck keep beside the ship's compass?",
        "a jar of orange marmalade",
    ),
    Needle(
        "The library of Saint Corvin lends out wooden flutes together with its travel books.",
        "What does the library of Saint Corvin lend out together with its travel books?",
        "wooden flutes",
    ),
    Needle(
        "The clockmaker Ines Halloway paid her apprentices in walnut cake and blue ribbon.",
        "What did the clockmaker Ines Halloway pay her apprentices in?",
        "walnut cake and blue ribbon",
    ),
    Needle(
        "On the island of Perrow the ferry is pulled across the bay by two white oxen.",
        "What pulls the ferry across the bay on the island of Perrow?",
        "two white oxen",
    ),
    Needle(
        "Professor Adaeze Lund measures rainfall with an upturned brass trumpet in her garden.",
        "What does Professor Adaeze Lund measure rainfall with?",
        "an upturned brass trumpet",
    ),
)


@dataclass(frozen=True)
class NeedleTrial:
    """One prompt with a needle in it.

    Attributes:
        ids: Token ids of the prompt.
        span: Positions [start, stop) of the answer's tokens.
        needle: What was hidden.
        length: Tokens asked for.
        depth: Where the needle was put, 0 at the start of the text and 1 at its end.
    """

    ids: tuple[int, ...]
    span: tuple[int, int]
    needle: Needle
    length: int
    depth: float


def needle_trials(
    tokenizer: Any,
    text: str,
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    n_trials: int,
    seed: int,
    needles: tuple[Needle, ...] = NEEDLES,
) -> tuple[NeedleTrial, ...]:
    """Trials that spread evenly over lengths, depths and needles, each in its own stretch of text.

    Args:
        tokenizer: Must give character offsets; with a chat template, the prompt is put as a user's turn.
        text: The haystack.
        lengths: Prompt lengths in tokens.
        depths: Where needles go, from 0 to 1.
        n_trials: How many trials.
        seed: Seed of which needle goes where.
        needles: The needles.

    Raises:
        PromptError: The tokenizer gives no offsets, the text is too short for a prompt, or a token straddles the
            answer's edge.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError(
            "needles need a tokenizer that gives character offsets (a fast tokenizer)"
        )
    rng = np.random.default_rng(seed)
    grid = [(length, depth) for depth in depths for length in lengths]
    order = np.concatenate([rng.permutation(len(grid)) for _ in range(n_trials // len(grid) + 1)])
    sentences = _SENTENCE_END.split(text)
    trials = []
    for trial in range(n_trials):
        length, depth = grid[order[trial]]
        needle = needles[trial % len(needles)]
        start = int(rng.integers(len(sentences)))
        trials.append(_trial(tokenizer, sentences, start, needle, length, depth))
    return tuple(trials)


def _trial(
    tokenizer: Any, sentences: list[str], start: int, needle: Needle, length: int, depth: float
) -> NeedleTrial:
    bare = len(_encode(tokenizer, _prompt(tokenizer, [needle.fact], needle))["input_ids"])
    if bare > length:
        raise PromptError(
            f"a prompt of {length} tokens cannot hold the needle and its question, which take {bare}"
        )
    context = _context(tokenizer, sentences, start, length, bare)
    while True:
        whole = list(context)
        whole.insert(round(depth * len(context)), needle.fact)
        prompt = _prompt(tokenizer, whole, needle)
        encoded = _encode(tokenizer, prompt)
        if len(encoded["input_ids"]) <= length:
            break
        context.pop()  # sentences side by side may take a token more than each alone
    at = prompt.index(needle.fact) + needle.fact.index(needle.answer)
    span = token_span(encoded["offset_mapping"], at, at + len(needle.answer), prompt)
    return NeedleTrial(tuple(encoded["input_ids"]), span, needle, length, depth)


def _context(tokenizer: Any, sentences: list[str], start: int, length: int, bare: int) -> list[str]:
    """Sentences from ``start`` on that fit, going round at the end of the text."""
    context: list[str] = []
    room = length - bare
    for offset in range(len(sentences)):
        sentence = sentences[(start + offset) % len(sentences)]
        room -= len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
        if room < 0:
            return context
        context.append(sentence)
    raise PromptError(f"the text is too short for a prompt of {length} tokens; give a longer one")


def _prompt(tokenizer: Any, context: list[str], needle: Needle) -> str:
    content = " ".join(context) + _TASK.format(question=needle.question)
    if tokenizer.chat_template is None:
        return content
    turn = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def _encode(tokenizer: Any, prompt: str) -> Any:
    # A chat template writes the special tokens itself.
    return tokenizer(
        prompt,
        add_special_tokens=tokenizer.chat_template is None,
        return_offsets_mapping=True,
        verbose=False,
    )


def token_span(offsets: list[tuple[int, int]], start: int, stop: int, text: str) -> tuple[int, int]:
    """Positions [first, last + 1) of the tokens that cover characters [start, stop), and nothing else.

    A leading space belongs to a token in many tokenizers, so a token may begin with blanks before ``start``.

    Raises:
        PromptError: No token covers the characters, or one reaches beyond them.
    """
    inside = [
        at for at, (low, high) in enumerate(offsets) if low < stop and high > start and high > low
    ]
    if not inside:
        raise PromptError(f"no token covers {text[start:stop]!r}")
    first, last = inside[0], inside[-1]
    if text[offsets[first][0] : start].strip() or offsets[last][1] > stop:
        raise PromptError(f"a token straddles the edge of {text[start:stop]!r}; change its wording")
    return first, last + 1
