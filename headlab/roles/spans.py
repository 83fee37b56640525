"""Heads defined by spans of the user's: rows of one span attend to another beyond chance.

For every record, and every row of ``from`` that sees the whole of ``to``, the score is the row's mass on ``to``.
Null: the mass that as many other tokens get in the same row, averaged over every cyclic placement among the row's
visible keys, i.e. |to| times the mean mass of a key that is not in ``to``. The first token and the special tokens
that the tokenizer adds are left out of it, since heads rest on them whatever the text says. So chance keeps the row,
the head and the length; it does not keep the place, and a head that merely looks nearby scores on spans that are
near. The detail ``beside``, the same number for the tokens on either side of ``to``, tells such heads apart.

headlab's own definition; span masses as such are common, e.g. Hung et al. 2024 (Attention Tracker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Behaviour, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.scores import RoleInfo
from headlab.tasks import SPAN_SCHEMA, RecordError, SpanTrial, span_trials

_INFO = RoleInfo(
    name="spans",
    title="Spans of yours",
    question="Do the rows of one span of your texts attend to another span beyond chance?",
    statistic="mass on the span `to`, of rows of the span `from` that see all of it",
    null="the mass of as many other tokens in the same row, over every cyclic placement among its visible keys",
    decision="score ≥ 0.1 and at least 0.05 above the null, at q ≤ the false-discovery rate",
    reference="headlab; the spans are yours",
    min_score=0.1,
    min_effect=0.05,
    row_convention="the token's own row, or the row before it where a record says `predicting`",
    sink_convention="the first token and added special tokens are left out of the null",
)


@dataclass(frozen=True)
class Masses:
    """One record's statistic per head, each [layer, head]; NaN where a head's window cuts ``to`` off.

    Attributes:
        to: Mean mass on ``to``.
        chance: Mean mass of as many other tokens.
        beside: The same of as many tokens beside ``to``; NaN where there are none.
        rows: Mass on ``to`` row by row, [layer, head, row].
    """

    to: Float[np.ndarray, "layer head"]
    chance: Float[np.ndarray, "layer head"]
    beside: Float[np.ndarray, "layer head"]
    rows: Float[np.ndarray, "layer head row"]


def answer_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability, in nats per token, of each record's answer; NaN for records without one."""
    model = probing.model
    records = (probing.records or ())[: probing.n_prompts]
    found = np.full(len(records), np.nan)
    if not all(layer.causal for layer in model.spec.layers):
        return found
    for at, trial in enumerate(_trials(probing, records)):
        if trial.answered is not None:
            ids, start = trial.answered
            logits = model.logits([list(ids)])[0, start - 1 : -1].float().log_softmax(-1)
            wanted = torch.tensor(ids[start:], device=logits.device)[:, None]
            found[at] = float(logits.gather(1, wanted).mean())
    return found


class Spans(Role):
    """See the module's docstring.

    Args:
        name: Name of the role, so that several kinds of heads can be asked for at once:
            ``hl.score(model, roles=[Spans("instruction"), Spans("context")], data={"instruction": …, "context": …})``.
        title: Its name for people.
        min_score: Least mass of a claimed head.
        min_effect: Least mass above chance of a claimed head.
    """

    schema = SPAN_SCHEMA
    needs_records = True
    behaviour = Behaviour(
        "log-probability of the records' answers (nats per token)", answer_log_probability
    )

    def __init__(
        self,
        name: str = _INFO.name,
        title: str | None = None,
        min_score: float = _INFO.min_score,
        min_effect: float = _INFO.min_effect,
    ) -> None:
        named = _INFO.title if name == _INFO.name else name.replace("_", " ").capitalize()
        self.info = replace(
            _INFO,
            name=name,
            title=title or named,
            min_score=min_score,
            min_effect=min_effect,
            decision=f"score ≥ {min_score:g} and at least {min_effect:g} above the null, "
            "at q ≤ the false-discovery rate",
        )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if not probing.records:
            return Measurement.not_measurable(probing, "no records of yours were given")
        try:
            trials = _trials(probing, probing.records)
        except RecordError:
            raise
        except PromptError as error:
            return Measurement.not_measurable(probing, str(error))
        found = []
        for at, trial in enumerate(trials):
            probing.tell(f"record {at + 1} of {len(trials)}")
            name, ids = f"spans-{trial.digest}", np.array(trial.ids)
            kept = probing.part(name, ids, partial(read_masses, probing, trial))
            found.append(span_masses(kept, trial, probing))
        values, null = np.stack([one.to for one in found]), np.stack([one.chance for one in found])
        looks = tuple(
            Look(np.array(trial.ids), np.array(trial.rows), one.rows)
            for trial, one in list(zip(trials, found, strict=True))[:2]
        )
        notes = {
            (int(layer), int(head)): "out of window: no row of this head sees the whole of `to`"
            for layer, head in np.argwhere(np.isnan(values).all(0))
        }
        beside = np.stack([one.beside for one in found])
        known = ~np.isnan(beside)
        mean = np.where(known, beside, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)
        details = {
            "beside": Detail(mean, "mass of as many tokens right beside `to`, in the same rows")
        }
        return Measurement(values, null, looks, notes, details)


def _trials(probing: Probing, records: Sequence[Mapping[str, Any]]) -> tuple[SpanTrial, ...]:
    spec = probing.model.spec
    causal = all(layer.causal for layer in spec.layers)
    return span_trials(
        probing.model.tokenizer, records, causal=causal, max_context=spec.max_context
    )


def read_masses(probing: Probing, trial: SpanTrial) -> Arrays:
    """Run one text.

    Returns:
        Mass on the spans ``to``, ``others`` and ``beside``, each [layer, head, row], and ``received`` [layer, key]:
        whether any head gives a key anything at all.
    """
    segments = {}
    for name, places in (("to", trial.keys), ("others", trial.others), ("beside", trial.beside)):
        segments[name] = torch.zeros(len(trial.ids), dtype=torch.bool)
        segments[name][list(places)] = True
    trace = probing.model.trace(
        [list(trial.ids)],
        keep=keep.statistics(
            "segment_mass", "received", segments=segments, queries=list(trial.rows)
        ),
        logits="none",
    )
    masses = {
        name: trace.statistic("segment_mass", name)[0].float().cpu().numpy() for name in segments
    }
    received = trace.statistic("received")[0].nan_to_num(0) > 0
    return masses | {"received": received.any(1).cpu().numpy()}


def span_masses(kept: Arrays, trial: SpanTrial, probing: Probing) -> Masses:
    """Average what :func:`read_masses` returned over the rows that see the whole of ``to``."""
    length = len(trial.keys)
    sees = visible(trial, probing)
    # A visible key never gets exactly nothing from every row of every head: attention in chunks hides it.
    sees &= kept["received"][:, None]
    among = {
        name: sees[..., list(getattr(trial, name))].sum(-1) for name in ("keys", "others", "beside")
    }
    used = (among["keys"] == length) & (among["others"] >= length)
    rows = np.where(used[:, None], kept["to"], np.nan)
    shares = {}
    for name in ("others", "beside"):
        count = among[name][:, None]
        shares[name] = np.divide(
            length * kept[name].astype(np.float64),
            count,
            out=np.full(kept[name].shape, np.nan),
            where=used[:, None] & (count > 0),
        )
    return Masses(_mean(rows), _mean(shares["others"]), _mean(shares["beside"]), rows)


def visible(trial: SpanTrial, probing: Probing) -> Bool[np.ndarray, "layer row key"]:
    """Which keys each row of ``from`` sees, by causality and sliding window."""
    lag = np.array(trial.rows)[:, None] - np.arange(len(trial.ids))
    return np.stack(
        [
            (np.abs(lag) < (layer.window or len(trial.ids))) & ((lag >= 0) | (not layer.causal))
            for layer in probing.model.spec.layers
        ]
    )


def _mean(values: Float[np.ndarray, "layer head row"]) -> Float[np.ndarray, "layer head"]:
    known = ~np.isnan(values)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return np.where(known, values, 0).sum(-1, dtype=np.float64) / count


register(Spans())
