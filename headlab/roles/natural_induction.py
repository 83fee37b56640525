"""Induction on natural text: where a token occurred before, attention to what followed it then.

Random tokens show whether a head can do induction; this shows whether it does where the model lives. In windows of
256 tokens of text, a row q counts if its token x_q occurred before. Its targets are the tokens after the earlier
occurrences, S_q = {j + 1 : j < q, x_j = x_q}, and

    score = mean over rows of Σ_{k ∈ S_q} A[q, k].

Tokens that stand more than 4 times in a window (articles, commas) are left out, since their last follower says
little; so are targets fewer than 3 tokens back, which a head sees for being near.

The null keeps distance: each target's lag q − k is looked up in the rows up to 16 tokens from q where the key at that
lag is no target, and the mean attention there stands for it. A head with a taste for distances scores its null.

Whether a layer sees a key is read off the patterns: a visible key does not get exactly 0 from every head. So windows
and attention in chunks are respected; rows none of whose targets a layer sees do not count for it. The definition
and its cut-offs are headlab's. Patterns of one text at a time are in memory: layers · heads · tokens² · 4 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import (
    Arrays,
    Behaviour,
    Detail,
    Look,
    Measurement,
    Probing,
    Role,
    register,
)
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.scores import RoleInfo
from headlab.tasks import RecordError, prose, prose_windows

#: Tokens of a window of text.
LENGTH = 256
#: A token that stands more often in a window does not count.
MOST_OFTEN = 4
#: Targets nearer than this do not count.
NEAREST = 3
#: How far from its row a target's null rows lie.
NEARBY = 16
#: Least rows of a prompt.
LEAST_ROWS = 4
#: Longest text of a record, for the sake of memory.
LONGEST = 1024
#: Keys of the detail, in tokens after the last earlier occurrence that counts.
AROUND = (-1, 0, 1, 2)
_BEHAVIOUR_WINDOWS = 4


#: One record of the user's.
SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A text that repeats itself",
    "description": "Natural text in which some words come again; each record is one prompt.",
    "type": "object",
    "properties": {
        "text": {
            "type": "string",
            "minLength": 1,
            "description": f"The text, of at most {LONGEST} tokens.",
        }
    },
    "required": ["text"],
    "additionalProperties": False,
    "examples": [
        {
            "text": "Marrow Point lies north of Tarnholt. The keeper of Marrow Point rows to Tarnholt twice a week, "
            "and the bakers of Tarnholt wait for the keeper at the landing of Marrow Point."
        }
    ],
}


def _windows(probing: Probing) -> list[Int[np.ndarray, " position"]]:
    """Texts behind a beginning-of-sequence token.

    Raises:
        RecordError: A record is too long, or its tokens do not come again.
        PromptError: There is no tokenizer, or too little text.
    """
    model = probing.model
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer, so it cannot read text")
    if probing.records is None:
        return list(_prose(probing, probing.n_prompts, probing.seed))
    most = min(LONGEST, model.spec.max_context or LONGEST)
    first = [] if probing.bos is None else [probing.bos]
    windows = []
    for at, record in enumerate(probing.records):
        text: Any = record["text"]
        ids = [*first, *model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        if len(ids) > most:
            raise RecordError(f"record {at}: its {len(ids)} tokens are more than {most}; split it")
        window = np.array(ids, dtype=np.int64)
        if len(find_targets(window).rows) < LEAST_ROWS:
            raise RecordError(
                f"record {at}: fewer than {LEAST_ROWS} of its tokens come again at most {MOST_OFTEN} times, "
                f"at least {NEAREST - 1} tokens apart; give a text that repeats more"
            )
        windows.append(window)
    return windows


def _prose(probing: Probing, n_windows: int, seed: int) -> Int[np.ndarray, "window position"]:
    length = probing.length(LENGTH)
    text = prose(probing.haystack)
    ids = prose_windows(probing.model.tokenizer, text, n_windows, length, seed, probing.bos)
    return ids.numpy()


def bigram_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability of tokens that complete a pair of tokens seen before, in nats, per window of text."""
    model = probing.model
    blank = np.full(_BEHAVIOUR_WINDOWS, np.nan)
    if not model.spec.layers[0].causal or model.tokenizer is None:
        return blank
    if probing.records is not None:
        windows = [row[:LENGTH] for row in _windows(probing)[:_BEHAVIOUR_WINDOWS]]
    else:
        windows = list(_prose(probing, _BEHAVIOUR_WINDOWS, probing.seed + 5))
    found = []
    for ids in windows:
        completes = completing(ids)
        log_p = next_token_log_probability(model, torch.from_numpy(ids)[None])[0].double().numpy()
        found.append(log_p[completes - 1].mean() if len(completes) else np.nan)
    return np.array(found)


def completing(ids: Int[np.ndarray, " position"]) -> Int[np.ndarray, " position"]:
    """Positions whose token and the one before stood next to each other earlier in the text."""
    seen: set[tuple[int, int]] = set()
    places = []
    for at in range(2, len(ids)):
        pair = int(ids[at - 1]), int(ids[at])
        if pair in seen:
            places.append(at)
        seen.add(pair)
    return np.array(places, dtype=np.int64)


COMPLETED_PAIRS = Behaviour(
    "log-probability of tokens that complete an earlier pair (nats per token)",
    bigram_log_probability,
)


class NaturalInduction(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="natural_induction",
        title="Induction on natural text",
        question="When a token of ordinary text occurred before, does the head look at what followed it?",
        statistic="mean attention, where a token occurs again, to the tokens after its earlier occurrences",
        null="the same distances in nearby rows where they lead to no such token",
        decision="score ≥ 0.05 and at least 0.04 above the null, at q ≤ the false-discovery rate",
        reference="headlab's, after Olsson et al. 2022",
        min_score=0.05,
        min_effect=0.04,
        row_convention="the token's own row, which is also the row that predicts its follower",
        reduction="sum over a row's targets, mean over rows, then over prompts",
    )
    schema = SCHEMA
    behaviour = COMPLETED_PAIRS

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        try:
            windows = _windows(probing)
        except RecordError:
            raise
        except PromptError as error:
            return Measurement.not_measurable(probing, str(error))
        values, null, looks, profiles = [], [], [], []
        for at, ids in enumerate(windows):
            targets = find_targets(ids)
            if len(targets.rows) < LEAST_ROWS:
                continue
            probing.tell(f"reading text {at + 1} of {len(windows)}")
            found = probing.part(
                f"natural-induction-{at:03d}", ids, partial(_run, probing, ids, targets)
            )
            values.append(_mean(found["values"]))
            null.append(_mean(found["null"]))
            profiles.append(found["around"])
            looks.append(Look(ids, targets.rows, found["values"]))
        if not values:
            why = "too few tokens of the text occur again"
            return Measurement.not_measurable(probing, why)
        stacked = np.stack(values)
        notes = {
            (int(layer), int(head)): "out of window: no earlier occurrence lies within reach"
            for layer, head in np.argwhere(np.isnan(stacked).all(0))
        }
        detail = Detail(
            np.where(np.isnan(stacked).all(0)[..., None], np.nan, np.mean(profiles, 0)),
            "mean attention by key position, in tokens after the last earlier occurrence",
            np.array(AROUND, np.float64),
        )
        return Measurement(
            stacked,
            np.stack(null),
            tuple(looks[:2]),
            notes,
            {"attention_around_occurrence": detail},
        )


@dataclass(frozen=True)
class Targets:
    """Rows of a text whose token occurred before, and where to look.

    Attributes:
        rows: The rows.
        pairs: Index into ``rows``, and key, of every target.
        null_pairs: Index into ``pairs``, query and key of every place that stands for a target in the null.
        last: The last earlier occurrence of each row's token that is far enough.
    """

    rows: Int[np.ndarray, " row"]
    pairs: Int[np.ndarray, "target 2"]
    null_pairs: Int[np.ndarray, "place 3"]
    last: Int[np.ndarray, " row"]


def find_targets(ids: Int[np.ndarray, " position"]) -> Targets:
    """Rows and targets of a text whose first token is left out as a target's origin and as a key."""
    length = len(ids)
    same = ids[:, None] == ids
    same[:, 0] = False
    rare = same[:, 1:].sum(1) <= MOST_OFTEN
    lag = np.arange(length)[:, None] - np.arange(length)
    # follows[q, k]: the token before k is the token of q, and stands before q.
    follows = np.zeros_like(same)
    follows[:, 1:] = same[:, :-1]
    follows &= lag >= 0
    wanted = follows & (lag >= NEAREST) & rare[:, None]
    wanted[0] = False
    rows = np.flatnonzero(wanted.any(1))
    row, key = np.nonzero(wanted[rows])
    places = []
    for pair, (query, at) in enumerate(zip(rows[row], key, strict=True)):
        near = np.arange(max(1, query - NEARBY), min(length, query + NEARBY + 1))
        there = near - (query - at)
        fits = (there >= 1) & (near != query)
        near, there = near[fits], there[fits]
        free = ~follows[near, there]
        places += [(pair, *place) for place in zip(near[free], there[free], strict=True)]
    last = [int(np.flatnonzero(same[query, : query - NEAREST])[-1]) for query in rows]
    return Targets(
        rows,
        np.stack([row, key], 1),
        np.array(places, dtype=np.int64).reshape(-1, 3),
        np.array(last, dtype=np.int64),
    )


@torch.no_grad()
def _run(probing: Probing, ids: np.ndarray, targets: Targets) -> Arrays:
    """``values`` and ``null`` [layer, head, row]; NaN in rows none of whose targets the layer sees."""
    model = probing.model
    trace = model.trace(torch.from_numpy(ids)[None], keep=keep.tensors("pattern"), logits="none")
    shape = model.spec.n_layers, model.spec.n_heads
    values = np.full((*shape, len(targets.rows)), np.nan, np.float32)
    null, around = np.full_like(values, np.nan), np.full((*shape, len(AROUND)), np.nan)
    for layer in range(model.spec.n_layers):
        pattern = trace.tensor("pattern", layer)[0]
        own, other = row_masses(pattern, targets)
        heads = len(own)
        values[layer, :heads], null[layer, :heads] = own.cpu().numpy(), other.cpu().numpy()
        keys = torch.from_numpy(targets.last)[:, None] + torch.tensor(AROUND)
        near = pattern[:, torch.from_numpy(targets.rows)[:, None], keys.clamp(min=0)]
        around[layer, :heads] = near.double().mean(1).cpu().numpy()
    return {"values": values, "null": null, "around": around}


def row_masses(
    pattern: Float[Tensor, "head query key"], targets: Targets
) -> tuple[Float[Tensor, "head row"], Float[Tensor, "head row"]]:
    """Each row's attention to its targets, and what the null has in their place; NaN where no target is seen."""
    index, key = torch.from_numpy(targets.pairs).to(pattern.device).T
    rows = torch.from_numpy(targets.rows).to(pattern.device)
    pair, near, there = torch.from_numpy(targets.null_pairs).to(pattern.device).T
    at_target, at_place = pattern[:, rows[index], key], pattern[:, near, there]
    seen = (at_target > 0).any(0)  # [target]
    visible = (at_place > 0).any(0)
    sums = pattern.new_zeros(len(pattern), len(index)).index_add(1, pair, at_place * visible)
    count = pattern.new_zeros(len(index)).index_add(0, pair, visible.to(pattern))
    # A target without a place of its kind nearby is left out on both sides.
    known = seen & (count > 0)
    stand_in = sums / count.clamp(min=1)
    blank = pattern.new_zeros(len(pattern), len(rows))
    own = blank.index_add(1, index, at_target * known)
    other = blank.index_add(1, index, stand_in * known)
    lost = blank[0].index_add(0, index, known.to(pattern)) == 0
    return own.masked_fill(lost, torch.nan), other.masked_fill(lost, torch.nan)


def _mean(rows: np.ndarray) -> Float[np.ndarray, "layer head"]:
    """Mean over rows, where enough of them count."""
    count = (~np.isnan(rows)).sum(-1)
    summed = np.nansum(rows, -1, dtype=np.float64)
    mean = np.full(summed.shape, np.nan)
    return np.divide(summed, count, out=mean, where=count >= LEAST_ROWS)


register(NaturalInduction())
