"""Scoring a model's heads for roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from headlab.attention.keep import is_whole
from headlab.errors import UnsupportedError
from headlab.roles.base import (
    ROLES,
    Arrays,
    Measurement,
    Probing,
    Remember,
    Role,
    RoleError,
    forget,
)
from headlab.roles.evidence import decide
from headlab.roles.scores import Scores

if TYPE_CHECKING:
    from headlab.model import Model

#: False-discovery rate of a role's claims.
ALPHA = 0.05
#: Prompts per probe: sign flips of fewer cannot reach the p-values that correction over many heads asks for.
N_PROMPTS = 20


def score(
    model: Model,
    roles: str | Iterable[str | Role] = "all",
    *,
    seed: int = 0,
    n_prompts: int = N_PROMPTS,
    alpha: float = ALPHA,
    haystack: str | Path | None = None,
    remember: Remember = forget,
    tell: Callable[[str], None] = lambda text: None,
) -> Scores:
    """Score every head for roles, with sample counts, intervals, nulls and corrected p-values.

    Args:
        model: The model.
        roles: ``"all"``, names such as ``"induction,sink"`` or ``["induction", "sink"]``, or :class:`Role` objects.
        seed: Seed of prompts, resampling and sign flips; the same seed gives the same table.
        n_prompts: Prompts per probe.
        alpha: False-discovery rate per role.
        haystack: Folder of ``.txt`` files to use in place of headlab's essays.
        remember: Keeps finished parts; see :class:`headlab.roles.shards.Shards`.
        tell: Told, in a few words, what is being done.

    Raises:
        RoleError: A role does not exist.
        UnsupportedError: The model is an encoder-decoder.
    """
    chosen = select(roles)
    return judge(
        chosen, measure(model, chosen, seed, n_prompts, haystack, remember, tell), alpha, seed
    )


def select(roles: str | Iterable[str | Role]) -> tuple[Role, ...]:
    """Roles by name or object.

    Raises:
        RoleError: A role does not exist, or none is named.
    """
    if isinstance(roles, str):
        roles = ROLES.values() if roles == "all" else [part.strip() for part in roles.split(",")]
    chosen: list[Role] = []
    for role in roles:
        if isinstance(role, str):
            if role not in ROLES:
                raise RoleError(f"there is no role {role!r}; there are {', '.join(ROLES)}")
            role = ROLES[role]
        chosen.append(role)
    if not chosen:
        raise RoleError(f"no role was named; there are {', '.join(ROLES)}")
    return tuple(dict.fromkeys(chosen))


def measure(
    model: Model,
    roles: tuple[Role, ...],
    seed: int,
    n_prompts: int,
    haystack: str | Path | None,
    remember: Remember = forget,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Measurement]:
    """Run the probes of roles."""
    if any(layer.stack == "cross" for layer in model.spec.layers):
        raise UnsupportedError(
            f"{model.name} is an encoder-decoder; roles are defined for decoder-only and encoder-only models"
        )
    if not is_whole(n_prompts) or n_prompts < 2:
        raise RoleError(f"n_prompts={n_prompts!r} must be a whole number of at least 2")
    if not is_whole(seed) or seed < 0:
        raise RoleError(f"seed={seed!r} must be a whole number, not negative")
    folder = None if haystack is None else Path(haystack)
    once: dict[str, Arrays] = {}

    def within_run(key: str, compute: Callable[[], Arrays]) -> Arrays:
        # Roles that read the same rows share them, whether or not anything is stored on disk.
        if key not in once:
            once[key] = remember(key, compute)
        return once[key]

    def telling(name: str, text: str) -> None:
        tell(f"{name}: {text}")

    found = {}
    for role in roles:
        name = role.info.name
        probing = Probing(model, seed, n_prompts, folder, within_run, partial(telling, name))
        found[name] = role.measure(probing)
    return found


def judge(
    roles: tuple[Role, ...], found: dict[str, Measurement], alpha: float, seed: int
) -> Scores:
    """Turn measurements into scores."""
    frames = [decide(role.info, found[role.info.name], alpha, seed) for role in roles]
    return Scores(pd.concat(frames, ignore_index=True), alpha, tuple(role.info for role in roles))
