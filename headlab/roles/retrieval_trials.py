"""What the retrieval role runs: headlab's needles, or facts and prompts of the user's; and how responses are scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headlab.errors import PromptError
from headlab.roles.base import Probing
from headlab.tasks import (
    Needle,
    NeedleError,
    NeedleTrial,
    RecordError,
    bare_length,
    check_offsets,
    needle_trials,
    prompt_trial,
    prose,
)

if TYPE_CHECKING:
    from headlab.model import Model

LENGTHS = (256, 512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Tokens a response may have at least; an answer of more than half of this gets more.
NEW_TOKENS = 24
#: Trials of the behaviour, and their length in tokens: they run under many edits.
SHORT_TRIALS, SHORT = 8, 160

SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Needle or prompt",
    "description": "Either a fact to be hidden in a long text, with a question about it, or a whole prompt in "
    "which the answer stands. Every record is used; facts are used again, at other lengths and depths, until there "
    "are n_prompts trials.",
    "type": "object",
    "properties": {
        "fact": {
            "type": "string",
            "minLength": 1,
            "description": "Sentence to hide in the haystack; it holds the answer exactly once.",
        },
        "question": {
            "type": "string",
            "minLength": 1,
            "description": "What is asked after the text.",
        },
        "prompt": {
            "type": "string",
            "minLength": 1,
            "description": "A whole prompt, to be continued with the answer; no chat template is put around it.",
        },
        "answer": {
            "type": "string",
            "minLength": 1,
            "description": "The words to be copied, letter for letter as in the fact or the prompt.",
        },
        "answer_start": {
            "type": "integer",
            "minimum": 0,
            "description": "Character of the prompt at which the answer begins, counted from 0; needed where the "
            "answer stands there more than once.",
        },
    },
    "required": ["answer"],
    "if": {"required": ["prompt"]},
    "then": {"propertyNames": {"enum": ["prompt", "answer", "answer_start"]}},
    "else": {
        "required": ["fact", "question"],
        "propertyNames": {"enum": ["fact", "question", "answer"]},
    },
    "additionalProperties": False,
    "examples": [
        {
            "fact": "The ferry to Perrow is pulled across the bay by two white oxen every morning.",
            "question": "What pulls the ferry to Perrow across the bay?",
            "answer": "two white oxen",
        },
        {
            "prompt": "Ticket 118: the password for the old archive is plum harvest for now.\n"
            "Q: What is the password for the old archive?\nA:",
            "answer": "plum harvest",
        },
    ],
}


def trials_of(
    probing: Probing, lengths: Sequence[int], depths: Sequence[float], n: int
) -> tuple[NeedleTrial, ...]:
    """Trials of headlab's needles, or of the user's records where there are any.

    Raises:
        RecordError: A record of the user's cannot be used.
        PromptError: The tokenizer, the context or the haystack cannot hold a trial.
    """
    check_offsets(probing.model.tokenizer)
    if probing.records is None:
        return _hidden(probing, lengths, depths, n)
    facts: dict[Needle, int] = {}
    trials: list[NeedleTrial] = []
    for number, record in enumerate(probing.records):
        try:
            if "prompt" in record:
                trials.append(_whole(probing, **record))
            else:
                facts.setdefault(Needle(**record), number)
        except PromptError as error:
            raise RecordError(f"record {number}: {error}") from error
    if facts:
        try:
            trials += _hidden(probing, lengths, depths, max(n, len(facts)), tuple(facts))
        except NeedleError as error:
            raise RecordError(f"record {facts[error.needle]}: {error}") from error
    return tuple(trials)


def short_trials(probing: Probing) -> tuple[NeedleTrial, ...]:
    """The behaviour's trials: other needles in short texts, or the shortest of the user's."""
    tokenizer, length = probing.model.tokenizer, SHORT
    if probing.records is not None:
        facts = [Needle(**record) for record in probing.records if "fact" in record]
        length = max([SHORT, *(bare_length(tokenizer, needle) for needle in facts)])
    other = replace(probing, seed=probing.seed + 11)
    trials = trials_of(other, (length,), DEPTHS, min(SHORT_TRIALS, probing.n_prompts))
    return tuple(sorted(trials, key=lambda trial: len(trial.ids))[:SHORT_TRIALS])


def _hidden(
    probing: Probing,
    lengths: Sequence[int],
    depths: Sequence[float],
    n: int,
    needles: tuple[Needle, ...] = (),
) -> tuple[NeedleTrial, ...]:
    room = probing.length(max(lengths) + NEW_TOKENS) - NEW_TOKENS
    fitting = tuple(length for length in lengths if length <= room)
    if not fitting:
        raise PromptError(f"the context holds no prompt of {min(lengths)} tokens")
    own = {"needles": needles} if needles else {}
    return needle_trials(
        probing.model.tokenizer,
        prose(probing.haystack),
        fitting,
        tuple(depths),
        n,
        probing.seed,
        **own,
    )


def _whole(
    probing: Probing, prompt: str, answer: str, answer_start: int | None = None
) -> NeedleTrial:
    model = probing.model
    trial = prompt_trial(model.tokenizer, prompt, answer, answer_start)
    needed = len(trial.ids) + trial.span[1] - trial.span[0]
    if probing.length(needed) < needed:
        raise PromptError(
            f"the prompt and its answer take {needed} tokens, but {model.name} has a context of "
            f"{model.spec.max_context}"
        )
    return trial


def settings(model: Model, trials: Sequence[NeedleTrial]) -> dict[str, Any]:
    """Arguments of ``generate`` for the responses to these prompts.

    There is room for the answers and some words around them; a line break ends a response, unless an answer holds
    one; and no penalty on repetition is taken from the model's own settings, since an answer is one.
    """
    wanted = max(NEW_TOKENS, *(2 * (trial.span[1] - trial.span[0]) for trial in trials))
    context = model.spec.max_context
    if context is not None:
        wanted = min(wanted, context - max(len(trial.ids) for trial in trials))
    stop = model.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
    if any("\n" in trial.answer for trial in trials):
        stop = []
    chosen = {"max_new_tokens": wanted, "stop": stop or None, "repetition_penalty": 1.0}
    own = model.module.generation_config.eos_token_id
    ends = [*stop, *(own if isinstance(own, list) else [] if own is None else [own])]
    # transformers takes a pad token inside a prompt for padding and hides it, unless it is an end token too.
    return chosen | ({"pad_token_id": int(ends[0])} if ends else {})


def recall(response: str, answer: str) -> float:
    """Share of the answer's words that the response holds: ROUGE-1 recall without stemming."""
    words = re.findall(r"\w+", answer.lower())
    left = re.findall(r"\w+", response.lower())
    found = 0
    for word in words:
        if word in left:
            left.remove(word)
            found += 1
    return found / len(words)


def recalled(model: Model, trials: Sequence[NeedleTrial]) -> Float[np.ndarray, " prompt"]:
    """ROUGE-1 recall, in percent, of the model's greedy response to each prompt, with whatever edits are in force."""
    prompts = [list(trial.ids) for trial in trials]
    generated = model.generate(prompts, **settings(model, trials))
    shares = [
        recall(text, trial.answer) for text, trial in zip(generated.texts, trials, strict=True)
    ]
    return 100 * np.array(shares)


def needle_recall(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """:func:`recalled` on short prompts chosen by the seed alone, so the model may fail some of them."""
    return recalled(probing.model, short_trials(probing))
