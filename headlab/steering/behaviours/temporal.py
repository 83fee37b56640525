"""What a head carries of one prompt, written into the values of another: what value edits are to bring about.

After Park et al. 2025 an edit succeeds where the first token changes and the continuation holds what the source's
question is answered with. Their sources ask the same year about another subject; a source that asks the same subject
about another year, offered here too, is the sharper test of whether a head carries the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float

from headlab.arguments import count, seed_number
from headlab.errors import PlanError
from headlab.steering.evaluation import Behaviour, Case, Measure
from headlab.steering.measures import holds
from headlab.tasks import TimePair, TimePrompts, temporal_facts, temporal_pairs

if TYPE_CHECKING:
    from headlab.model import Model

#: Tokens of a continuation that may hold the answer (the paper's number).
N_TOKENS = 50
#: What another source differs in.
Other = Literal["subject", "time"]


@dataclass(frozen=True)
class Transfer:
    """A prompt to write into, and the prompt whose values are written.

    Attributes:
        prompt: Token ids of the question that is asked.
        span: Positions [start, stop) of its time.
        source: Token ids of the question that values are taken from.
        answer: What the source's question is answered with, with its leading space.
        own: What the prompt's own question is answered with, with its leading space.
    """

    prompt: tuple[int, ...]
    span: tuple[int, int]
    source: tuple[int, ...]
    answer: str
    own: str

    @property
    def case(self) -> Case:
        """As a case: the source's answer is wanted, its own is the foil, the time is marked."""
        return Case(self.prompt, self.answer, self.own, (self.span,))


def transfers(
    model: Model, n: int = 15, *, other: Other = "subject", seed: int = 0
) -> tuple[Transfer, ...]:
    """Questions about a time, each with a source that differs in the subject or in the time.

    Args:
        model: The model, whose tokenizer makes the prompts.
        n: How many.
        other: What the sources differ in.
        seed: Seed of which facts, times and sources.

    Raises:
        PlanError: ``other`` is something else, or there are fewer.
        PromptError: The tokenizer gives no offsets.
    """
    if other not in ("subject", "time"):
        raise PlanError(f"other={other!r:.40} must be 'subject' or 'time'")
    rng = np.random.default_rng(seed_number(seed))
    prompts = TimePrompts(model.tokenizer, None, model.spec.max_context)  # as in the paper, no BOS
    pairs = (group[0] for group in temporal_pairs(prompts, temporal_facts(), seed))
    made = _other_subjects(pairs, model, rng) if other == "subject" else map(_other_time, pairs)
    found = tuple(islice(made, count(n, "n")))
    if len(found) < n:
        raise PlanError(f"there are {len(found)} transfers between questions, not {n}")
    return found


def written(cases: Sequence[Transfer], n_tokens: int = N_TOKENS) -> Behaviour:
    """Share of questions whose first token changes and whose greedy continuation holds the source's answer.

    The cases make one batch, so that a method may hold one source for each.
    """
    about = f"first token changed, and the source's answer within {n_tokens} tokens"
    measure = _succeeds(count(n_tokens, "n_tokens"))
    made = tuple(one.case for one in cases)
    return Behaviour("written", about, made, measure, batch=max(1, len(made)))


def _succeeds(n_tokens: int) -> Measure:
    def measure(model: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        ids = [_ids(model, case.prompt) for case in cases]
        new = model.generate(ids, max_new_tokens=n_tokens)
        with model.plain():
            first = model.generate(ids, max_new_tokens=1)
        changed = [
            int(ours[0]) != int(theirs[0]) for ours, theirs in zip(new.ids, first.ids, strict=True)
        ]
        told = [holds(text, case.answer) for text, case in zip(new.texts, cases, strict=True)]
        return np.array(changed, float) * np.array(told, float)

    return measure


def _ids(model: Model, prompt: str | tuple[int, ...]) -> list[int]:
    ids: list[int] = model.tokens(prompt if isinstance(prompt, str) else list(prompt))[0].tolist()
    return ids


def _other_time(pair: TimePair) -> Transfer:
    own, answer = (f" {name}" for name in pair.names)
    return Transfer(pair.clean, pair.span, pair.corrupted, answer, own)


def _other_subjects(
    pairs: Iterator[TimePair], model: Model, rng: np.random.Generator
) -> Iterator[Transfer]:
    facts = temporal_facts().temporal
    for pair in pairs:
        time, own = pair.times[0], pair.names[0]
        others = [
            fact
            for fact in facts
            if fact.template != pair.template and fact.objects.get(time, own) != own
        ]
        if others:
            fact = others[rng.integers(len(others))]
            text = fact.template.rstrip().replace("{time}", time)
            source = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
            yield Transfer(pair.clean, pair.span, source, f" {fact.objects[time]}", f" {own}")
