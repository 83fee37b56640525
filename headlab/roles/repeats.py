"""How heads attend on repeated tokens: one measurement that induction and duplicate-token heads share.

Prompts are [BOS, x, x] with x of 50 distinct random tokens, and their controls [BOS, x, y]: the same
positions hold tokens that never occurred, so whatever a head owes to position alone it keeps.

A record of the user's gives x as text or words. Its control is x and the same tokens in another order, and only
tokens that stand once in x count: for the others there is more than one earlier occurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Behaviour, Detail, Look, Measurement, Probing
from headlab.roles.confirmation import next_token_log_probability
from headlab.tasks import (
    RecordError,
    RepeatedTokens,
    given_tokens,
    plain_tokens,
    random_tokens,
    repeated_tokens,
    shuffled_apart,
)

#: Tokens of x.
N = 50
#: Least tokens of x.
LEAST = 8
#: Keys of the profile, in tokens after the earlier occurrence of the query's token.
AROUND = (-2, -1, 0, 1, 2, 3)
_BATCH = 10
#: Least rows of a record.
_ROWS = 4
#: Prompts of the behaviour, and tokens of their x.
_BEHAVIOUR_PROMPTS, _BEHAVIOUR_N = 6, 40


@dataclass(frozen=True)
class Repeats:
    """Prompts that are run together.

    Attributes:
        prompts: The prompts.
        counts: Which tokens of x have rows that count, in every copy but the first.
        first: Number of the first of them among all prompts.
    """

    prompts: RepeatedTokens
    counts: Bool[np.ndarray, " token"]
    first: int

    @property
    def queries(self) -> Int[np.ndarray, " query"]:
        """Rows of the second and later copies that count."""
        every = np.arange(self.prompts.n, self.prompts.copies * self.prompts.n)
        return self.prompts.start + every[self.counts[every % self.prompts.n]]


def repeats(probing: Probing, n: int = N, copies: int = 2, skip: int = 1) -> list[Repeats]:
    """The probe's prompts, of random tokens or of the user's records.

    Args:
        probing: What to probe with.
        n: Tokens of x, fewer where the model's context or vocabulary asks for it.
        copies: How often x stands in a prompt.
        skip: Tokens of x, from its first, whose rows do not count: nothing before the first token of the second
            copy shows that x repeats.

    Raises:
        RecordError: A record is too short, too long or too repetitive.
        PromptError: The model's vocabulary or context is too small.
    """
    model = probing.model
    start = int(probing.bos is not None)
    if probing.records is not None:
        limit = model.spec.max_context
        most = None if limit is None else (limit - start) // copies
        tokens = given_tokens(model.tokenizer, probing.records, LEAST, most)
        return [_of_record(probing, at, x, copies, skip) for at, x in enumerate(tokens)]
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    n = min(n, (probing.length(copies * n + start) - start) // copies, len(plain) // copies)
    if n < LEAST:
        raise PromptError(
            f"{model.name} cannot hold {LEAST} distinct tokens {copies} times, so repeats cannot be probed"
        )
    drawn = repeated_tokens(plain, probing.n_prompts, n, probing.seed, probing.bos, copies)
    counts = np.arange(n) >= skip
    return [
        Repeats(
            RepeatedTokens(
                drawn.repeated[at : at + _BATCH], drawn.control[at : at + _BATCH], n, start, copies
            ),
            counts,
            at,
        )
        for at in range(0, probing.n_prompts, _BATCH)
    ]


def _of_record(probing: Probing, at: int, x: np.ndarray, copies: int, skip: int) -> Repeats:
    others = [shuffled_apart(x, probing.seed + copy) for copy in range(copies - 1)]
    once = np.array([(x == token).sum() == 1 for token in x])
    moved = np.all([other != x for other in others], 0)
    counts = once & moved & (np.arange(len(x)) >= skip)
    if counts.sum() < _ROWS:
        raise RecordError(
            f"record {at}: fewer than {_ROWS} of its tokens stand there once, so most have no one earlier occurrence"
        )
    first = [] if probing.bos is None else [[probing.bos]]

    def row(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([*first, *parts]).astype(np.int64))[None]

    prompts = RepeatedTokens(row([x] * copies), row([x, *others]), len(x), len(first), copies)
    return Repeats(prompts, counts, at)


def measure_repeats(probing: Probing, kind: Literal["induction", "duplicate"]) -> Measurement:
    """Mean attention on the targets of the second copy, and the same on the controls.

    A duplicate-token head attends to the earlier occurrence of the token, n tokens back; an induction head to the
    token after it, n − 1 tokens back.
    """
    try:
        groups = repeats(probing)
    except RecordError:
        raise
    except PromptError as error:
        return Measurement.not_measurable(probing, str(error))
    profiles = masses(probing, groups, "repeats", profile)
    at = AROUND.index(0 if kind == "duplicate" else 1)
    rows = [mass[..., at] for mass in profiles["repeated"]]
    control = [mass[..., at] for mass in profiles["control"]]
    means, null = prompt_means(rows), prompt_means(control)
    notes = {}
    for layer in np.flatnonzero(blind(rows + control)):
        means[:, layer] = null[:, layer] = np.nan
        distances = sorted({group.prompts.n - AROUND[at] for group in groups})
        far = "–".join(map(str, dict.fromkeys([distances[0], distances[-1]])))
        for head in range(means.shape[2]):
            notes[int(layer), head] = f"out of window: the target lies {far} tokens back"
    around = np.concatenate([mass.mean(3, dtype=np.float64) for mass in profiles["repeated"]])
    detail = Detail(
        np.where(np.isnan(means).all(0)[..., None], np.nan, around.mean(0)),
        "mean attention of the second copy by key position, in tokens after the same token's earlier occurrence",
        np.array(AROUND, np.float64),
    )
    found = looks(groups, rows)
    return Measurement(means, null, found, notes, {"attention_around_repeat": detail})


def masses(
    probing: Probing,
    groups: list[Repeats],
    name: str,
    run: Callable[[Probing, Tensor, Repeats], np.ndarray],
) -> dict[str, list[np.ndarray]]:
    """What ``run`` makes of prompts and controls, group by group, remembered under ``name``."""
    found: dict[str, list[np.ndarray]] = {"repeated": [], "control": []}
    total = groups[-1].first + len(groups[-1].prompts.repeated)
    for which, parts in found.items():
        for group in groups:
            ids = getattr(group.prompts, which)
            probing.tell(f"{which} prompts {group.first + 1}–{group.first + len(ids)} of {total}")

            def compute(ids: Tensor = ids, group: Repeats = group) -> Arrays:
                return {"masses": run(probing, ids, group)}

            part = probing.part(f"{name}-{which}-{group.first:03d}", ids.numpy(), compute)
            parts.append(part["masses"])
    return found


def profile(
    probing: Probing, ids: Int[Tensor, "prompt position"], group: Repeats
) -> Float[np.ndarray, "prompt layer head query key"]:
    """Attention of the second copy's rows to the keys of :data:`AROUND`."""
    n = group.prompts.n
    edges = range(n - AROUND[-1], n - AROUND[0] + 2)  # lags rise where keys fall
    plan = keep.statistics("lag_mass", bins=edges, queries=group.queries.tolist())
    trace = probing.model.trace(ids, keep=plan, logits="none")
    mass: np.ndarray = trace.statistic("lag_mass").flip(-1).float().cpu().numpy()
    return mass


def prompt_means(rows: list[np.ndarray]) -> Float[np.ndarray, "prompt layer head"]:
    """Means over the rows of each prompt, of groups with [prompt, layer, head, query]."""
    return np.concatenate([mass.mean(-1, dtype=np.float64) for mass in rows])


def blind(rows: list[np.ndarray]) -> Bool[np.ndarray, " layer"]:
    """Layers that cannot see the target, be it for a sliding window or for attention in chunks.

    A visible key never gets exactly nothing from every row of every head.
    """
    return np.all([(mass == 0).all((0, 2, 3)) for mass in rows], 0)


def looks(groups: list[Repeats], rows: list[np.ndarray]) -> tuple[Look, ...]:
    """The first two prompts."""
    found = [
        Look(ids.numpy(), group.queries, mass)
        for group, masses in zip(groups, rows, strict=True)
        for ids, mass in zip(group.prompts.repeated, masses, strict=True)
    ]
    return tuple(found[:2])


def second_copy_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability of the second copy's tokens but its first, in nats, per prompt of 2 × 40 tokens."""
    model = probing.model
    start, limit = int(probing.bos is not None), probing.length(2 * _BEHAVIOUR_N + 1)
    most = min(_BEHAVIOUR_N, (limit - start) // 2)
    if not model.spec.layers[0].causal or most < 2:
        return np.full(_BEHAVIOUR_PROMPTS, np.nan)
    if probing.records is not None and all({"text", "words"} & set(r) for r in probing.records):
        given = given_tokens(model.tokenizer, probing.records[:_BEHAVIOUR_PROMPTS], 2, None)
        batches = [x[None, :most] for x in given]
    else:
        plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
        n = min(most, len(plain))
        batches = [random_tokens(plain, _BEHAVIOUR_PROMPTS, n, probing.seed + 11)]
    found = []
    for x in batches:
        begin = np.full((len(x), start), 0 if probing.bos is None else probing.bos)
        ids = torch.from_numpy(np.concatenate([begin, x, x], 1))
        log_p = next_token_log_probability(model, ids)
        found.append(log_p[:, 1 - x.shape[1] :].mean(1).double().numpy())
    return np.concatenate(found)


SECOND_COPY = Behaviour(
    "log-probability of the second copy (nats per token)", second_copy_log_probability
)
