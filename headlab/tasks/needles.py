"""Needle in a haystack: one odd fact in a long text, a question about it, and where its answer stands.

Needles are made from templates and word lists (``data/needles.json``): objects, foods, places, numbers and names of
an invented world, so that no model knows an answer beforehand. An answer always stands between two spaces, where
nearly every tokenizer begins a token.

Spans come from the tokenizer's character offsets, so the answer is found exactly or the trial is refused; a
search for overlapping token sets, as in published code, may begin early or match the wrong words.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from headlab.errors import PromptError
from headlab.tasks.prose import data_folder

_TASK = "\n\nBased on the content of the text, answer the question.\nQuestion: {question}\nAnswer:"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class NeedleError(PromptError):
    """A needle cannot be used, whatever text it is hidden in.

    Attributes:
        needle: Which one.
    """

    def __init__(self, message: str, needle: Needle) -> None:
        super().__init__(message)
        self.needle = needle


@dataclass(frozen=True)
class Needle:
    """A fact no text contains.

    Attributes:
        fact: The sentence to hide; it holds the answer word for word.
        question: What is asked.
        answer: The words a head must copy.

    Raises:
        PromptError: The fact does not contain the answer exactly once, or the answer holds no word.
    """

    fact: str
    question: str
    answer: str

    def __post_init__(self) -> None:
        check_answer(self.answer)
        if occurrences(self.fact, self.answer) != 1:
            raise PromptError(
                f"the needle {self.fact!r} must contain its answer {self.answer!r} exactly once"
            )


def check_answer(answer: str) -> None:
    """Raise :class:`PromptError` for an answer without a word."""
    if re.search(r"\w", answer) is None:
        raise PromptError(f"the answer {answer!r} holds no word, so no response can recall it")


def occurrences(text: str, part: str) -> int:
    """How often a part stands in a text, overlaps counted."""
    return sum(text.startswith(part, at) for at in range(len(text)))


def draw_needles(n: int, seed: int) -> tuple[Needle, ...]:
    """Different needles, evenly over templates, with words drawn at random.

    Args:
        n: How many; the word lists make thousands.
        seed: Seed of the words and of the order.
    """
    data = json.loads((data_folder() / "needles.json").read_text("utf-8"))
    rng = np.random.default_rng(seed)
    drawn: dict[Needle, None] = {}
    while len(drawn) < n:
        for at in rng.permutation(len(data["templates"])):
            template = data["templates"][at]
            words = {slot: str(rng.choice(choices)) for slot, choices in data["words"].items()}
            answer = data["answers"][template["kind"]].format(**words)
            fact = template["fact"].format(answer=answer, **words)
            drawn[Needle(fact, template["question"].format(**words), answer)] = None
    return tuple(drawn)[:n]


#: The needles that trials are made of.
NEEDLES = draw_needles(400, seed=0)


@dataclass(frozen=True)
class NeedleTrial:
    """One prompt in which an answer stands.

    Attributes:
        ids: Token ids of the prompt.
        span: Positions [start, stop) of the answer's tokens.
        answer: The words of the answer.
        length: Tokens asked for.
        depth: Where the answer was put, 0 at the start of the text and 1 at its end.
        needle: What was hidden; None for a whole prompt of the user's.
    """

    ids: tuple[int, ...]
    span: tuple[int, int]
    answer: str
    length: int
    depth: float
    needle: Needle | None = None


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
        PromptError: The tokenizer gives no offsets, or the text is too short for a prompt.
        NeedleError: A needle is too long for a prompt, or a token straddles its answer's edge.
    """
    check_offsets(tokenizer)
    rng = np.random.default_rng(seed)
    grid = [(length, depth) for depth in depths for length in lengths]
    cells = _evenly(len(grid), n_trials, rng)
    picks = _evenly(len(needles), n_trials, rng)
    sentences = _SENTENCE_END.split(text)
    trials = []
    for cell, pick in zip(cells, picks, strict=True):
        length, depth = grid[cell]
        start = int(rng.integers(len(sentences)))
        trials.append(_trial(tokenizer, sentences, start, needles[pick], length, depth))
    return tuple(trials)


def prompt_trial(
    tokenizer: Any, prompt: str, answer: str, answer_start: int | None = None
) -> NeedleTrial:
    """A trial of a whole prompt, taken as it is: no chat template is put around it.

    Args:
        tokenizer: Must give character offsets.
        prompt: The prompt, to be continued with the answer.
        answer: Words that stand in it.
        answer_start: Character at which the answer begins; may be left out where it stands there once.

    Raises:
        PromptError: The answer does not stand in the prompt, or at ``answer_start``, or more than once without
            it, or a token straddles its edge.
    """
    check_offsets(tokenizer)
    check_answer(answer)
    found = occurrences(prompt, answer)
    if found == 0:
        raise PromptError(f"the answer {answer!r} does not stand in the prompt")
    if answer_start is None:
        if found > 1:
            raise PromptError(
                f"the answer {answer!r} stands in the prompt {found} times; say which with answer_start"
            )
        answer_start = prompt.index(answer)
    elif not prompt.startswith(answer, answer_start):
        raise PromptError(
            f"the answer {answer!r} does not stand at character {answer_start} of the prompt"
        )
    encoded = tokenizer(prompt, return_offsets_mapping=True, verbose=False)
    ids = tuple(encoded["input_ids"])
    stop = answer_start + len(answer)
    span = token_span(encoded["offset_mapping"], answer_start, stop, prompt)
    return NeedleTrial(ids, span, answer, len(ids), span[0] / len(ids))


def check_offsets(tokenizer: Any) -> None:
    """Raise :class:`PromptError` for a tokenizer that gives no character offsets."""
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError(
            "needles need a tokenizer that gives character offsets (a fast tokenizer)"
        )


def bare_length(tokenizer: Any, needle: Needle) -> int:
    """Tokens of a prompt that holds nothing but the needle and its question."""
    return len(_encode(tokenizer, _prompt(tokenizer, [needle.fact], needle))["input_ids"])


def _evenly(n: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` numbers below n, in random order, each as often as the others or once more."""
    return np.concatenate([rng.permutation(n) for _ in range(count // n + 1)])[:count]


def _trial(
    tokenizer: Any, sentences: list[str], start: int, needle: Needle, length: int, depth: float
) -> NeedleTrial:
    bare = bare_length(tokenizer, needle)
    if bare > length:
        raise NeedleError(
            f"a prompt of {length} tokens cannot hold the needle and its question, which take {bare}",
            needle,
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
    try:
        span = token_span(encoded["offset_mapping"], at, at + len(needle.answer), prompt)
    except PromptError as error:
        raise NeedleError(str(error), needle) from error
    ids = tuple(encoded["input_ids"])
    return NeedleTrial(ids, span, needle.answer, length, depth, needle)


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
