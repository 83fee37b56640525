"""How each method is made ready on headlab's own data, and what it is then measured on: what the command line uses.

What a method learns from and what it is measured on never share an item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headlab.errors import PlanError
from headlab.steering.base import Method
from headlab.steering.evaluation import Behaviour
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model


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


def _pasta(setting: Setting) -> Method:
    from headlab.steering.pasta import Pasta

    return Pasta(setting.spans, setting.heads or "*.*")


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
        "weigh down what lies outside marked text (PASTA)", "marked_context", _pasta, marks=True
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


def _conflicts(towards: str) -> Callable[[Setting], Behaviour]:
    def make(setting: Setting) -> Behaviour:
        from headlab.steering.behaviours import conflicts

        items = conflicts.known_conflicts(setting.model, setting.n_cases, setting.seed)
        return conflicts.conflict(items, "substitution", towards)  # type: ignore[arg-type]

    return make


#: Behaviours by name.
BEHAVIOURS: dict[str, Callable[[Setting], Behaviour]] = {
    "zero_shot": _zero_shot,
    "conflict_memory": _conflicts("memory"),
    "conflict_context": _conflicts("context"),
}
