"""Do the heads of a role matter for what the role is said to do? Ablate them, and as many others, and compare.

For each role with claimed heads, all of them are ablated together (:meth:`Role.ablation`), and so are at least 20
random sets of as many heads from the same layers that were not claimed. Two things are watched: the role's own
behaviour, such as the log-probability of a repeated passage for induction, and a general one, the log-probability of
plain text. An effect is the change per prompt; a set is confirmed when its effect is negative, with a bootstrap
interval over prompts below 0, and lower than that of random sets at p = (1 + random sets as low) / (1 + random sets)
≤ 0.05.

A layer may have too few other heads for 20 different sets; then the layers next to it lend theirs, nearest first.
Where a role claims so many heads that the others do not suffice, sets are drawn from all heads, claimed ones
included. The rows say so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from headlab.attention import matched_sets
from headlab.attention.edits import Edit
from headlab.attention.heads import Head, parse_heads
from headlab.roles.base import Arrays, Behaviour, Probing, Remember, Role, RoleError, forget
from headlab.roles.scores import Scores
from headlab.statistics import bootstrap_interval
from headlab.tasks import RecordsLike, prose, prose_windows

if TYPE_CHECKING:
    from headlab.model import Model

#: Columns of the table, in order. ``heads`` names what was ablated together, ``effect`` is the change of ``metric``
#: from ``baseline`` with its 95 % interval, ``control_*`` the mean and range of the same over random sets of heads,
#: ``n`` counts prompts, and ``confirmed`` says whether the effect lies beyond the random sets.
CAUSAL_COLUMNS = (
    "role",
    "heads",
    "method",
    "metric",
    "baseline",
    "effect",
    "ci_low",
    "ci_high",
    "control_effect",
    "control_low",
    "control_high",
    "n",
    "confirmed",
    "note",
)
#: Random sets of heads. Fewer than 19 cannot reach p ≤ 0.05.
DRAWS = 20
_P = 0.05
_GENERAL_PROMPTS, _GENERAL_LENGTH = 4, 128
#: Logits held at once: prompts of large vocabularies run one after another.
_LOGITS = 1 << 27


def general_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability of the next token of plain text, in nats, per stretch of 128 tokens."""
    model = probing.model
    ids = prose_windows(
        model.tokenizer,
        prose(probing.haystack),
        _GENERAL_PROMPTS,
        probing.length(_GENERAL_LENGTH),
        probing.seed + 7,
        probing.bos,
    )
    return next_token_log_probability(model, ids).mean(1).numpy()


def next_token_log_probability(model: Model, ids: torch.Tensor) -> Float[torch.Tensor, "prompt q"]:
    """Log-probability, in nats, of each token but the first given those before it."""
    found = []
    at_once = max(1, _LOGITS // (ids.shape[1] * model.spec.n_vocab))
    for some in ids.split(at_once):
        logits = model.logits(some)[:, :-1].float()
        wanted = some[:, 1:, None].to(logits.device)
        found.append(torch.log_softmax(logits, -1).gather(-1, wanted)[..., 0].cpu())
    return torch.cat(found)


GENERAL = Behaviour("log-probability of plain text (nats per token)", general_log_probability)


def confirm(
    model: Model,
    scores: Scores,
    *,
    seed: int = 0,
    n_prompts: int = 10,
    draws: int = DRAWS,
    haystack: str | Path | None = None,
    data: Mapping[str, RecordsLike] | None = None,
    remember: Remember = forget,
    tell: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Ablate the claimed heads of every role, and random sets of other heads, and compare what breaks.

    Args:
        model: The model.
        scores: What :func:`headlab.score` returned for it.
        seed: Seed of prompts and of random sets.
        n_prompts: Prompts per behaviour.
        draws: Random sets per role, at least 20.
        haystack: Folder of ``.txt`` files to use in place of headlab's essays.
        data: Probe data of yours by role, as given to :func:`headlab.score`.
        remember: Keeps finished parts.
        tell: Told, in a few words, what is being done.

    Returns:
        Two rows per role with claimed heads, one for its own behaviour (where one is known) and one for plain text,
        with the columns of :data:`CAUSAL_COLUMNS`.

    Raises:
        RoleError: ``draws`` is below 20, or a role is not registered.
        HeadError: The scores are of another model.
    """
    from headlab.roles.scoring import (  # scoring imports roles, which import this part
        prepare,
        read_data,
        select,
    )

    roles = select(list(scores.names), data)
    probing = prepare(model, seed, n_prompts, haystack, remember, tell)
    return confirm_roles(probing, roles, scores, read_data(roles, data), draws)


def confirm_roles(
    probing: Probing,
    roles: Sequence[Role],
    scores: Scores,
    data: Mapping[str, Any],
    draws: int = DRAWS,
) -> pd.DataFrame:
    """:func:`confirm` for roles that are at hand."""
    from headlab.roles.scoring import for_role

    if draws < DRAWS:
        raise RoleError(f"draws={draws} is too few to tell: use at least {DRAWS}")
    rows = []
    for role in roles:
        labels = scores.claimed(role.info.name)
        if labels:
            heads = parse_heads(labels, probing.model.spec)
            rows += _confirm_role(for_role(probing, role, data), role, heads, draws)
    return pd.DataFrame(rows, columns=list(CAUSAL_COLUMNS))


def _confirm_role(
    probing: Probing, role: Role, heads: tuple[Head, ...], draws: int
) -> list[dict[str, Any]]:
    controls, note = matched_sets(probing.model.spec, heads, draws, probing.seed)
    behaviours = [behaviour for behaviour in (role.behaviour, GENERAL) if behaviour is not None]
    rows = []
    for behaviour in behaviours:
        if behaviour is GENERAL and probing.model.tokenizer is None:
            continue
        before = _run(probing, behaviour, None)
        effect = _run(probing, behaviour, role.ablation(heads), role.info.name, heads) - before
        random = []
        for at, control in enumerate(controls):
            probing.tell(f"ablating random heads {at + 1} of {len(controls)}")
            after = _run(probing, behaviour, role.ablation(control), role.info.name, control)
            random.append(float(np.nanmean(after - before)))
        rows.append(_row(role, behaviour, heads, before, effect, np.array(random), note, probing))
    return rows


def _row(
    role: Role,
    behaviour: Behaviour,
    heads: tuple[Head, ...],
    before: np.ndarray,
    effect: np.ndarray,
    random: np.ndarray,
    note: str,
    probing: Probing,
) -> dict[str, Any]:
    known = ~np.isnan(effect)
    row: dict[str, Any] = {
        "role": role.info.name,
        "heads": ", ".join(map(str, heads)),
        "method": f"{role.info.ablation}; {len(random)} random sets of as many heads from the same layers",
        "metric": behaviour.name,
        "n": int(known.sum()),
        "note": note,
    }
    numbers = (
        "baseline",
        "effect",
        "ci_low",
        "ci_high",
        "control_effect",
        "control_low",
        "control_high",
    )
    if not known.any():
        why = "not measurable: the model shows this behaviour on none of the prompts"
        return row | dict.fromkeys(numbers, math.nan) | {"confirmed": False, "note": why}
    low, high = bootstrap_interval(effect[:, None], probing.seed)
    mean = float(np.nanmean(effect))
    p = (1 + int((random <= mean).sum())) / (1 + len(random))
    controls = (random.mean(), random.min(), random.max()) if len(random) else (math.nan,) * 3
    values = (float(np.nanmean(before)), mean, float(low[0]), float(high[0]), *map(float, controls))
    confirmed = bool(p <= _P and high[0] < 0)
    return row | dict(zip(numbers, values, strict=True)) | {"confirmed": confirmed}


def _run(
    probing: Probing,
    behaviour: Behaviour,
    edit: Edit | None,
    role: str = "",
    heads: tuple[Head, ...] = (),
) -> Float[np.ndarray, " prompt"]:
    """The behaviour under an edit, remembered under what was ablated and how."""
    measure = behaviour.measure
    named = f"{measure.__module__}.{getattr(measure, '__qualname__', repr(measure))}"
    what = f"{named}|{behaviour.name}|{probing.n_prompts}|{role}|{', '.join(map(str, heads))}|{probing.records}"
    key = f"causal-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    return probing.remember(key, partial(_measured, probing, behaviour, edit))["values"]


def _measured(probing: Probing, behaviour: Behaviour, edit: Edit | None) -> Arrays:
    with probing.model.edit(edit) if edit is not None else nullcontext():
        return {"values": np.asarray(behaviour.measure(probing), np.float64)}
