"""Scoring a model's heads for roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
    load_entry_points,
    role_named,
)
from headlab.roles.evidence import decide, details_frame
from headlab.roles.scores import Scores
from headlab.tasks import RecordsLike, read_records

if TYPE_CHECKING:
    from headlab.model import Model

#: False-discovery rate of a role's claims.
ALPHA = 0.05
#: Prompts per probe: sign flips of fewer cannot reach the p-values that correction over many heads asks for.
N_PROMPTS = 20


#: A role's own records, by its name.
Data = Mapping[str, tuple[dict[str, object], ...]]


def score(
    model: Model,
    roles: str | Iterable[str | Role] = "all",
    *,
    seed: int = 0,
    n_prompts: int = N_PROMPTS,
    alpha: float = ALPHA,
    haystack: str | Path | None = None,
    data: Mapping[str, RecordsLike] | None = None,
    remember: Remember = forget,
    tell: Callable[[str], None] = lambda text: None,
) -> Scores:
    """Score every head for roles, with sample counts, intervals, nulls and corrected p-values.

    Args:
        model: The model.
        roles: ``"all"``, names such as ``"induction,sink"`` or ``["induction", "sink"]``, or :class:`Role` objects.
            ``"all"`` leaves out the roles that need data of yours and got none.
        seed: Seed of prompts, resampling and sign flips; the same seed gives the same table.
        n_prompts: Prompts per probe.
        alpha: False-discovery rate per role.
        haystack: Folder of ``.txt`` files to use in place of headlab's essays.
        data: Probe data of yours in place of headlab's, by role: a path to a JSON Lines file, a ``datasets``
            dataset, or a list of records. ``Role.schema`` says what a record holds.
        remember: Keeps finished parts; see :class:`headlab.shards.Shards`.
        tell: Told, in a few words, what is being done.

    Raises:
        RoleError: A role does not exist, or takes no data, or needs some.
        RecordError: Data cannot be read or does not fit its role's schema.
        UnsupportedError: The model is an encoder-decoder.
    """
    chosen = select(roles, data)
    probing = prepare(model, seed, n_prompts, haystack, remember, tell)
    return judge(chosen, measure(probing, chosen, read_data(chosen, data)), alpha, seed)


def select(
    roles: str | Iterable[str | Role], data: Mapping[str, RecordsLike] | None = None
) -> tuple[Role, ...]:
    """Roles by name or object.

    Raises:
        RoleError: A role does not exist, or none is named, or one that is named needs data.
    """
    load_entry_points()
    given = data or {}
    if isinstance(roles, str) and roles == "all":
        roles = [role for name, role in ROLES.items() if not role.needs_records or name in given]
    elif isinstance(roles, str):
        roles = [part.strip() for part in roles.split(",")]
    chosen: list[Role] = []
    for role in roles:
        if isinstance(role, str):
            role = role_named(role)
        if role.needs_records and role.info.name not in given:
            name = role.info.name
            raise RoleError(
                f"role {name!r} is defined by data of yours, and none was given for it: pass data for {name!r}; "
                f"`headlab tasks schema {name}` says what a record holds"
            )
        chosen.append(role)
    if not chosen:
        raise RoleError(f"no role was named; there are {', '.join(ROLES)}")
    return tuple(dict.fromkeys(chosen))


def read_data(roles: tuple[Role, ...], data: Mapping[str, RecordsLike] | None) -> Data:
    """The user's records for roles, checked against their schemas.

    Raises:
        RoleError: Data is given for a role that is not scored or takes none.
        RecordError: Data cannot be read or does not fit.
    """
    by_name = {role.info.name: role for role in roles}
    found = {}
    for name, source in (data or {}).items():
        if name not in by_name:
            raise RoleError(
                f"data was given for {name!r}, which is not among the roles to score: {', '.join(by_name)}"
            )
        schema = by_name[name].schema
        if schema is None:
            raise RoleError(f"role {name!r} makes its own prompts and takes no data")
        found[name] = read_records(source, schema, name)
    return found


def prepare(
    model: Model,
    seed: int,
    n_prompts: int,
    haystack: str | Path | None,
    remember: Remember = forget,
    tell: Callable[[str], None] = lambda text: None,
) -> Probing:
    """What roles probe a model with.

    Raises:
        RoleError: A setting makes no sense.
        UnsupportedError: The model is an encoder-decoder.
    """
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

    return Probing(model, seed, n_prompts, folder, None, within_run, tell)


def for_role(probing: Probing, role: Role, data: Data) -> Probing:
    """The same for one role: with its records, and its name before what is told."""
    name, tell = role.info.name, probing.tell
    return replace(probing, records=data.get(name), tell=partial(_telling, tell, role.info.name))


def _telling(tell: Callable[[str], None], name: str, text: str) -> None:
    tell(f"{name}: {text}")


def measure(probing: Probing, roles: tuple[Role, ...], data: Data) -> dict[str, Measurement]:
    """Run the probes of roles."""
    return {role.info.name: role.measure(for_role(probing, role, data)) for role in roles}


def judge(
    roles: tuple[Role, ...], found: Mapping[str, Measurement], alpha: float, seed: int
) -> Scores:
    """Turn measurements into scores."""
    frames = [decide(role.info, found[role.info.name], alpha, seed) for role in roles]
    details = [details_frame(role.info, found[role.info.name]) for role in roles]
    return Scores(
        pd.concat(frames, ignore_index=True),
        alpha,
        tuple(role.info for role in roles),
        pd.concat(details, ignore_index=True),
    )
