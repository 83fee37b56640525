"""Doing a task between words without examples: what a function vector is to bring about."""

from __future__ import annotations

from headlab.steering.evaluation import Behaviour, Case
from headlab.steering.measures import first_token_correct
from headlab.tasks import ICLPrompt, Relation, icl_prompts, relations, split_pairs

#: Tasks that small models do with examples and not without.
TASKS = (
    "antonym",
    "plural",
    "past_tense",
    "present_participle",
    "third_person",
    "capitalised",
    "upper_case",
    "agent_noun",
)


def zero_shot(
    task: str | Relation, n_cases: int = 24, seed: int = 0, n_shots: int = 0
) -> Behaviour:
    """First-token accuracy on questions of a task without examples, about the second half of its pairs.

    Args:
        task: A relation of :func:`headlab.tasks.relations`, or one of yours.
        n_cases: Questions.
        seed: Seed of the halves and of what is drawn.
        n_shots: Examples before each question, where the model's ceiling is wanted.

    Raises:
        PromptError: There is no such relation, or it has too few pairs.
    """
    relation = task if isinstance(task, Relation) else relations(task)[0]
    _, asked = split_pairs(relation, seed)
    prompts = icl_prompts(asked, asked, n_prompts=n_cases, n_shots=n_shots, seed=seed + 1)
    cases = tuple(Case(prompt.text, prompt.answer) for prompt in prompts)
    about = "accuracy of the answer's first token"
    return Behaviour(relation.name, about, cases, first_token_correct(), batch=16)


def training_prompts(
    task: str | Relation,
    n_prompts: int = 30,
    n_shuffled: int = 12,
    n_shots: int = 10,
    seed: int = 0,
) -> tuple[tuple[ICLPrompt, ...], tuple[ICLPrompt, ...]]:
    """n-shot prompts of a task with right and with shuffled labels, from the first half of its pairs.

    Raises:
        PromptError: There is no such relation, or it has too few pairs.
    """
    shots, _ = split_pairs(task if isinstance(task, Relation) else relations(task)[0], seed)
    given = icl_prompts(shots, shots, n_prompts=n_prompts, n_shots=n_shots, seed=seed + 2)
    shuffled = icl_prompts(
        shots, shots, n_prompts=n_shuffled, n_shots=n_shots, shuffled=True, seed=seed + 3
    )
    return given, shuffled
