"""How each method is made ready on headlab's own data, and what it is then measured on: what the command line uses.

What a method learns from and what it is measured on never share an item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headlab.attention import HeadsLike, parse_heads
from headlab.errors import PlanError
from headlab.steering.base import Method
from headlab.steering.evaluation import Behaviour
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: Questions that focus directions are learned from, and heads that they steer (the authors' number).
_LEARNED_FROM, _CONTEXTUAL = 16, 20


@dataclass(frozen=True)
class Setting:
    """What a recipe is followed with.

    Attributes:
        model: The model.
        heads: Heads to steer; None leaves the choice to the recipe.
        spans: Marked text, for methods that mark; replaced by each case's own where a behaviour is measured.
        task: Relation between words, for methods that learn a task.
        n_cases: Cases of a behaviour.
        seed: Seed of everything drawn.
        tell: Told, in a few words, what is being done.
    """

    model: Model
    heads: str | None = None
    spans: tuple[str, ...] = ()
    task: str = "antonym"
    n_cases: int = 24
    seed: int = 0
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Recipe:
    """One method made ready.

    Attributes:
        about: What the method does, in a few words.
        behaviour: The behaviour it is measured on by default, a name of :data:`BEHAVIOURS`.
        make: Makes the method.
        marks: Whether it needs marked text.
    """

    about: str
    behaviour: str
    make: Callable[[Setting], Method]
    marks: bool = False


def recipe(name: str) -> Recipe:
    """A recipe by the method's name.

    Raises:
        PlanError: There is none.
    """
    if name not in RECIPES:
        raise PlanError(f"there is no method {shown(name)}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


def behaviour(name: str, setting: Setting) -> Behaviour:
    """A behaviour by name.

    Raises:
        PlanError: There is none.
    """
    if name not in BEHAVIOURS:
        raise PlanError(f"there is no behaviour {shown(name)}; there are {', '.join(BEHAVIOURS)}")
    return BEHAVIOURS[name](setting)


# -- methods -----------------------------------------------------------------------------------------------------------


def _marking(name: str) -> Callable[[Setting], Method]:
    """A method whose first field is marked text."""

    def make(setting: Setting) -> Method:
        made: Any = Method.all[name]
        spans = list(setting.spans)
        return made(spans) if setting.heads is None else made(spans, setting.heads)

    return make


def _sink_removal(setting: Setting) -> Method:
    from headlab.steering.sink_removal import SinkRemoval

    return SinkRemoval(setting.heads or "*.*")


def _act(setting: Setting) -> Method:
    from headlab.steering.act import ACT

    return ACT(setting.heads)


def _focus(setting: Setting) -> Method:
    from headlab.steering.focus import FocusDirections, gold_mass
    from headlab.tasks import document_prompt, document_questions

    # The right answers stand in for the model's own, which small models often get wrong.
    examples = [
        document_prompt(setting.model.tokenizer, asked, response=asked.answer)
        for asked in document_questions(_LEARNED_FROM, 4, setting.seed + 1)
    ]
    heads: HeadsLike | None = setting.heads
    if heads is None:
        setting.tell("looking for contextual heads")
        every = parse_heads("*.*", setting.model.spec)
        best = np.argsort(-gold_mass(setting.model, examples).mean(0), kind="stable")
        heads = tuple(every[at] for at in best[:_CONTEXTUAL])
    return FocusDirections.fit(
        setting.model, examples, heads, factor=1.0, seed=setting.seed, tell=setting.tell
    )


def _kv_budget(setting: Setting) -> Method:
    from headlab.steering.kv_budget import KVBudget

    if setting.heads is None:
        raise PlanError(
            "kv_budget needs the heads that keep whole caches, such as retrieval heads; name them "
            "(headlab score MODEL --roles retrieval finds some)"
        )
    return KVBudget(setting.heads)


def _function_vector(setting: Setting) -> Method:
    from headlab.steering.behaviours import icl
    from headlab.steering.function_vectors import FunctionVector

    given, shuffled = icl.training_prompts(setting.task, seed=setting.seed)
    # Higher than the paper's third of the way up: small models write the task late.
    return FunctionVector.fit(
        setting.model,
        given,
        setting.heads,
        shuffled=shuffled,
        layer=setting.model.spec.n_layers // 2,
        tell=setting.tell,
    )


def _task_vectors(setting: Setting) -> Method:
    from headlab.steering.behaviours import icl
    from headlab.steering.task_vectors import TaskVectors

    if setting.heads is not None:
        raise PlanError("task_vectors weighs every head; leave the heads out")
    given, _ = icl.training_prompts(setting.task, seed=setting.seed)
    bare, _ = icl.training_prompts(setting.task, n_shots=0, n_prompts=64, seed=setting.seed)
    return TaskVectors.fit(setting.model, given, bare, seed=setting.seed, tell=setting.tell)


def _conflict(twice: bool) -> Callable[[Setting], Method]:
    def make(setting: Setting) -> Method:
        from headlab.steering.behaviours.conflicts import found_heads
        from headlab.steering.juice import JuICE, JuNE

        kind = JuICE if twice else JuNE
        if setting.heads is not None:
            return kind(enhance=setting.heads)
        enhance, suppress = found_heads(setting.model, seed=setting.seed, tell=setting.tell)
        return kind(enhance, suppress)

    return make


#: Methods by name.
RECIPES: dict[str, Recipe] = {
    "pasta": Recipe(
        "weigh down what lies outside marked text (PASTA)",
        "marked_context",
        _marking("pasta"),
        marks=True,
    ),
    "split_softmax": Recipe(
        "keep up the attention on a marked instruction (split-softmax)",
        "resisting_injection",
        _marking("split_softmax"),
        marks=True,
    ),
    "found_in_the_middle": Recipe(
        "take the bias by place out of attention to marked documents",
        "documents",
        _marking("found_in_the_middle"),
        marks=True,
    ),
    "act": Recipe("share out what sinks besides the first take (ACT)", "documents", _act),
    "sink_removal": Recipe("take weight off the first tokens", "documents", _sink_removal),
    "focus": Recipe("turn queries towards relevant text (focus directions)", "documents", _focus),
    "kv_budget": Recipe(
        "whole caches for the named heads, sink and recent tokens for the others",
        "needles",
        _kv_budget,
    ),
    "function_vector": Recipe(
        "add a task's function vector to the residual stream", "zero_shot", _function_vector
    ),
    "task_vectors": Recipe(
        "add learned weighted sums of head outputs after every layer", "zero_shot", _task_vectors
    ),
    "juice": Recipe(
        "answer by memory against the text, running twice (JuICE)",
        "conflict_memory",
        _conflict(True),
    ),
    "june": Recipe(
        "answer by memory against the text, in one run (JuNE)", "conflict_memory", _conflict(False)
    ),
}


# -- behaviours --------------------------------------------------------------------------------------------------------


def _zero_shot(setting: Setting) -> Behaviour:
    from headlab.steering.behaviours import icl

    return icl.zero_shot(setting.task, setting.n_cases, setting.seed)


def _conflicts(towards: Literal["memory", "context"]) -> Callable[[Setting], Behaviour]:
    def make(setting: Setting) -> Behaviour:
        from headlab.steering.behaviours import conflicts

        items = conflicts.known_conflicts(setting.model, setting.n_cases, setting.seed)
        return conflicts.conflict(items, "substitution", towards)

    return make


def _marked_context(setting: Setting) -> Behaviour:
    from headlab.steering.behaviours.marked_context import marked_context

    return marked_context(setting.n_cases, seed=setting.seed)


def _documents(setting: Setting) -> Behaviour:
    from headlab.steering.behaviours.documents import documents

    return documents(
        setting.model, setting.n_cases, 4, measure="log_probability", seed=setting.seed
    )


def _resisting(setting: Setting) -> Behaviour:
    from headlab.steering.behaviours.injections import resisting

    return resisting(setting.model, setting.n_cases, setting.seed)


def _needles(setting: Setting) -> Behaviour:
    from headlab.steering.behaviours.needles import needles

    return needles(setting.model, setting.n_cases, length=512, seed=setting.seed)


#: Behaviours by name.
BEHAVIOURS: dict[str, Callable[[Setting], Behaviour]] = {
    "marked_context": _marked_context,
    "documents": _documents,
    "resisting_injection": _resisting,
    "needles": _needles,
    "zero_shot": _zero_shot,
    "conflict_memory": _conflicts("memory"),
    "conflict_context": _conflicts("context"),
}
