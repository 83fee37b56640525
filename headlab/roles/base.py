"""What a role is to headlab: a probe, a statistic, a null and a decision, in one class of one file."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from headlab.attention.ablations import ablate
from headlab.attention.edits import Edit
from headlab.attention.heads import Head
from headlab.errors import HeadlabError
from headlab.roles.scores import RoleInfo
from headlab.shards import Arrays, Remember, forget

if TYPE_CHECKING:
    from headlab.model import Model

#: Packages add roles under this group of entry points; each names a :class:`Role` or a class of one.
ENTRY_POINTS = "headlab.roles"


@dataclass(frozen=True)
class Probing:
    """What a role may use to probe a model.

    Attributes:
        model: The model.
        seed: Seed of everything random.
        n_prompts: Prompts per probe.
        haystack: Folder of the user's text, or None for headlab's essays.
        records: The user's own probe data for this role, each fitting the role's schema; None for headlab's.
        remember: Keeps finished parts, so that a killed run resumes.
        tell: Told, in a few words, what is being done.
    """

    model: Model
    seed: int = 0
    n_prompts: int = 20
    haystack: Path | None = None
    records: tuple[Mapping[str, Any], ...] | None = None
    remember: Remember = forget
    tell: Callable[[str], None] = lambda text: None

    @property
    def bos(self) -> int | None:
        """Token that begins a sequence, where the model has one."""
        return self.model.bos

    def part(self, name: str, ids: np.ndarray, compute: Callable[[], Arrays]) -> Arrays:
        """What ``compute`` makes of a prompt, remembered under a name and the prompt's tokens."""
        digest = hashlib.sha256(np.ascontiguousarray(ids, dtype=np.int64).tobytes()).hexdigest()[
            :12
        ]
        return self.remember(f"{name}-{digest}", compute)

    def length(self, wanted: int) -> int:
        """A prompt length that the model's context can hold."""
        limit = self.model.spec.max_context
        return wanted if limit is None else min(wanted, limit)


@dataclass(frozen=True)
class Look:
    """One probe prompt with the statistic of each of its rows, to pick examples from.

    Attributes:
        ids: The prompt.
        queries: Query positions the values belong to.
        values: The role's statistic per row.
    """

    ids: Int[np.ndarray, " position"]
    queries: Int[np.ndarray, " query"]
    values: Float[np.ndarray, "layer head query"]


@dataclass(frozen=True)
class Detail:
    """Further numbers of every head that explain its score; they decide nothing.

    Attributes:
        values: One number per head, [layer, head]; a profile per head, [layer, head, at]; or one number or profile
            per layer, with a head axis of length 1. NaN where there is none.
        at: Where each entry of a profile stands, such as lags in tokens.
        meaning: What the numbers are, with their unit, in a few words.
        per_layer: Whether the numbers belong to layers.
    """

    values: np.ndarray
    meaning: str
    at: Float[np.ndarray, " at"] | None = None
    per_layer: bool = False


@dataclass(frozen=True)
class Measurement:
    """What a role's probe found.

    Attributes:
        values: The statistic per prompt and head; NaN where it could not be measured.
        null: The same statistic under the control that breaks the role, prompt by prompt.
        looks: Prompts to show examples from.
        notes: What to say of a head, by (layer, head); of every head under (−1, −1).
        details: Further numbers by name.
    """

    values: Float[np.ndarray, "prompt layer head"]
    null: Float[np.ndarray, "prompt layer head"]
    looks: tuple[Look, ...] = ()
    notes: Mapping[tuple[int, int], str] = field(default_factory=dict)
    details: Mapping[str, Detail] = field(default_factory=dict)

    @classmethod
    def not_measurable(cls, probing: Probing, why: str) -> Measurement:
        """A probe that could not be run: no head has a score, and each says why."""
        spec = probing.model.spec
        blank = np.full((1, spec.n_layers, spec.n_heads), np.nan)
        return cls(blank, blank, notes={(-1, -1): f"not measurable: {why}"})


@dataclass(frozen=True)
class Behaviour:
    """What a model does with the help of a role's heads; ablating them should spoil it.

    Attributes:
        name: What is measured, with its unit, such as ``"log-probability of the second copy (nats per token)"``.
        measure: Runs the model, with whatever edits are in force, and gives one number per prompt, more being
            better, NaN for a prompt that does not count. It must not use ``probing.part``: the same prompts are run
            under many edits.
    """

    name: str
    measure: Callable[[Probing], Float[np.ndarray, " prompt"]]


class Role(ABC):
    """A role a head can play. Subclass it, fill ``info``, write ``measure``, and :func:`register` it.

    Attributes:
        info: What the role is and how it is decided.
        schema: JSON Schema (draft 2020-12) of one record of the user's own probe data; None where the probe takes
            none.
        needs_records: Whether there is no probe but the user's.
        behaviour: What ablating the claimed heads should spoil; None where nothing is known.
    """

    info: RoleInfo
    schema: ClassVar[Mapping[str, Any] | None] = None
    needs_records: ClassVar[bool] = False
    behaviour: ClassVar[Behaviour | None] = None

    @abstractmethod
    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""

    def ablation(self, heads: Iterable[Head]) -> Edit:
        """What takes the role away from heads, for the causal check: z set to zero at every position."""
        return ablate(list(heads), kind="zero")


#: Roles by name, in the order in which reports show them.
ROLES: dict[str, Role] = {}


def register(role: Role) -> Role:
    """Make a role known under its name, to :func:`headlab.score` and to reports."""
    ROLES[role.info.name] = role
    return role


@cache
def load_entry_points() -> None:
    """Register the roles that installed packages offer under :data:`ENTRY_POINTS`.

    Raises:
        RoleError: A package's role cannot be loaded.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            role = found() if isinstance(found, type) else found
        except Exception as error:
            raise RoleError(
                f"the role {entry.name!r} of {entry.value} cannot be loaded: {error}; mend or uninstall its package"
            ) from error
        if not isinstance(role, Role):
            raise RoleError(
                f"the entry point {entry.name!r} of {entry.value} is not a headlab.roles.Role"
            )
        register(role)


def role_named(name: str) -> Role:
    """The role of this name, headlab's own or an installed package's.

    Raises:
        RoleError: There is none.
    """
    load_entry_points()
    if name not in ROLES:
        near = get_close_matches(name, ROLES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RoleError(f"there is no role {name!r}; {hint}there are {', '.join(ROLES)}")
    return ROLES[name]


class RoleError(HeadlabError):
    """A role does not exist, or a model cannot be scored for it."""
