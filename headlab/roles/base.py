"""What a role is to headlab: a probe, a statistic, a null and a decision, in one class of one file."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from headlab.errors import HeadlabError
from headlab.roles.scores import RoleInfo

if TYPE_CHECKING:
    from headlab.model import Model

Arrays = Mapping[str, np.ndarray]
#: ``remember(key, compute)`` returns stored arrays, or computes and stores them.
Remember = Callable[[str, Callable[[], Arrays]], Arrays]


def forget(key: str, compute: Callable[[], Arrays]) -> Arrays:
    """A :data:`Remember` that keeps nothing."""
    return compute()


@dataclass(frozen=True)
class Probing:
    """What a role may use to probe a model.

    Attributes:
        model: The model.
        seed: Seed of everything random.
        n_prompts: Prompts per probe.
        haystack: Folder of the user's text, or None for headlab's essays.
        remember: Keeps finished parts, so that a killed run resumes.
        tell: Told, in a few words, what is being done.
    """

    model: Model
    seed: int = 0
    n_prompts: int = 20
    haystack: Path | None = None
    remember: Remember = forget
    tell: Callable[[str], None] = lambda text: None

    @property
    def bos(self) -> int | None:
        """Token that begins a sequence, where the model has one."""
        tokenizer, config = self.model.tokenizer, self.model.module.config
        for token in (
            getattr(tokenizer, "bos_token_id", None),
            getattr(tokenizer, "cls_token_id", None),
            getattr(config, "bos_token_id", None),
        ):
            if token is not None:
                return int(token)
        return None

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
class Measurement:
    """What a role's probe found.

    Attributes:
        values: The statistic per prompt and head; NaN where it could not be measured.
        null: The same statistic under the control that breaks the role, prompt by prompt.
        looks: Prompts to show examples from.
        notes: What to say of a head, by (layer, head); of every head under (−1, −1).
    """

    values: Float[np.ndarray, "prompt layer head"]
    null: Float[np.ndarray, "prompt layer head"]
    looks: tuple[Look, ...] = ()
    notes: Mapping[tuple[int, int], str] = field(default_factory=dict)


class Role(ABC):
    """A role a head can play. Subclass it, fill ``info``, write ``measure``, and :func:`register` it."""

    info: RoleInfo

    @abstractmethod
    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""


ROLES: dict[str, Role] = {}


def register(role: Role) -> Role:
    """Make a role known under its name, to :func:`headlab.score` and to reports."""
    ROLES[role.info.name] = role
    return role


class RoleError(HeadlabError):
    """A role does not exist, or a model cannot be scored for it."""
