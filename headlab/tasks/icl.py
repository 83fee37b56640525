"""In-context learning: a few worked examples of a relation between words, then a word to do it to.

The template is that of Todd et al. 2024 (function vectors): ``Q: hot\\nA: cold\\n\\nQ: big\\nA:``. With the answers of
the examples shuffled among them a prompt has the same words and says nothing of the relation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headlab.arguments import count, seed_number
from headlab.errors import PromptError
from headlab.tasks.relation import Relation

TEMPLATE = "Q: {source}\nA: {target}\n\n"
QUERY = "Q: {source}\nA:"


@dataclass(frozen=True)
class ICLPrompt:
    """One prompt.

    Attributes:
        text: The examples and the question, up to where the answer follows.
        source: The word that is asked about.
        answer: The right answer, with its leading space.
        n_shots: Examples before the question.
        shuffled: Whether the answers of the examples were shuffled among them.
    """

    text: str
    source: str
    answer: str
    n_shots: int
    shuffled: bool


def split_pairs(
    relation: Relation, seed: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Two halves of a relation's pairs, drawn at random: one to learn from, one to be asked about."""
    order = np.random.default_rng(seed_number(seed)).permutation(len(relation.pairs))
    pairs = [relation.pairs[at] for at in order]
    return pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]


def icl_prompts(
    shots: Sequence[tuple[str, str]],
    asked: Sequence[tuple[str, str]],
    *,
    n_prompts: int,
    n_shots: int = 10,
    shuffled: bool = False,
    seed: int = 0,
) -> tuple[ICLPrompt, ...]:
    """Prompts whose examples come from one set of pairs and whose question comes from another.

    Args:
        shots: Pairs of words to take examples from.
        asked: Pairs to ask about, each at most once before any is asked again. A word that is asked about is never
            among the examples of its prompt, as question or as answer.
        n_prompts: How many prompts.
        n_shots: Examples in each; 0 for the bare question.
        shuffled: Whether to shuffle the answers of the examples among them, so that none stays where it was if that can
            be had.
        seed: Seed of everything drawn.

    Raises:
        PromptError: There are too few pairs.
    """
    n_prompts, n_shots = count(n_prompts, "n_prompts"), count(n_shots, "n_shots", least=0)
    rng = np.random.default_rng(seed_number(seed))
    if not asked:
        raise PromptError("there is no pair to ask about")
    order = np.concatenate(
        [rng.permutation(len(asked)) for _ in range(-(-n_prompts // len(asked)))]
    )
    made = []
    for at in order[:n_prompts]:
        source, target = asked[at]
        others = [pair for pair in shots if source not in pair]
        if len(others) < n_shots:
            raise PromptError(
                f"{n_shots} examples cannot be drawn from {len(shots)} pairs, of which {len(others)} are without "
                f"{source!r:.40}, which is asked about; give more pairs or fewer examples"
            )
        drawn = [others[i] for i in rng.permutation(len(others))[:n_shots]]
        targets = [pair[1] for pair in drawn]
        if shuffled:
            targets = _deranged(targets, rng)
        text = "".join(
            TEMPLATE.format(source=pair[0], target=shown)
            for pair, shown in zip(drawn, targets, strict=True)
        )
        made.append(
            ICLPrompt(text + QUERY.format(source=source), source, f" {target}", n_shots, shuffled)
        )
    return tuple(made)


def _deranged(targets: list[str], rng: np.random.Generator) -> list[str]:
    """The same words in another order, with as few as possible at the place they had."""
    if not targets:
        return []
    words = list(dict.fromkeys(targets))
    rank = dict(zip(words, rng.permutation(len(words)).tolist(), strict=True))
    order = sorted(rng.permutation(len(targets)).tolist(), key=lambda at: rank[targets[at]])
    # Equal words now stand together, in a circle: turned by the longest run, each comes to a place of another.
    turn = max(map(targets.count, words))
    made = list(targets)
    for at, place in enumerate(order):
        made[place] = targets[order[(at + turn) % len(order)]]
    return made
