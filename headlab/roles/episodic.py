"""Episodic heads: attention spreads over a list that repeats as human recall spreads over a list that was studied.

A token of the second copy of x in [BOS, x, x] brings back its first occurrence; the head's profile is the mean
pre-softmax score S at each lag from there, −8 … 8, in x's first copy (lag 1 is the induction target). Ji-An et al.
(NeurIPS 2024) compare profiles at lags −5 … 5 with the model CMR of free recall: see :mod:`headlab.roles.cmr` for
their distance d. They call a head CMR-like if d < 0.5 (0.1, strictly). The code that made their profiles is not
published, so the length of their prompts and the use of BOS are unverified.

d alone also lets in heads that look at the token itself (GPT-2's L3H0 and L0H1, which peak at lag 0), so headlab asks
two things of a prompt's profile: S(1) > S(0) and S(1) > S at each far lag, ±6 … ±8. A prompt that meets them counts
1 − d, at least 0, else 0; the score is the mean. One prompt's profile is noisier than the mean over prompts, so a
score ≥ 0.5 asks for more than d < 0.5; the distance of the mean profile, which is theirs, is a detail.

Contiguity, asymmetry, primacy and recency are headlab's definitions of what Mistry et al. (NAACL 2025) look for in
attention heads; their formulas could not be verified, only their abstract.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.attention import apply, keep
from headlab.attention.edits import Edit, Where
from headlab.model import Model
from headlab.roles.base import Arrays, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.cmr import FIT_LAG, LAGS, MAX_LAG, fit
from headlab.roles.repeats import SECOND_COPY
from headlab.roles.scores import RoleInfo
from headlab.tasks import (
    LIST_SCHEMA,
    MIN_LIST,
    RecordError,
    RepeatedList,
    given_lists,
    plain_tokens,
    random_lists,
)

#: Tokens of a list.
N = 50
#: Largest CMR distance of a CMR-like head, and of a strict one (Ji-An et al. 2024).
DISTANCE, STRICT = 0.5, 0.1
_BATCH = 5
_FIT = np.abs(LAGS) <= FIT_LAG
_FAR = np.abs(LAGS) > FIT_LAG


class Episodic(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="episodic",
        title="Episodic (CMR-like)",
        question="When a list repeats, do the head's scores spread around the earlier place as human recall does?",
        statistic="1 − CMR distance of the prompt's scores by lag, at least 0; 0 where lag +1 is not above lag 0 and "
        "the far lags",
        null="the same positions in sequences whose second half does not repeat the first (of lists given by the user: "
        "repeats it in another order)",
        decision="score ≥ 0.5 (Ji-An et al.'s distance < 0.5) and at least 0.25 above the null, at q ≤ the "
        "false-discovery rate",
        reference="Ji-An et al. 2024, Linking in-context learning in transformers to human episodic memory; the "
        "rule on lag +1 is headlab's",
        min_score=1 - DISTANCE,
        min_effect=0.25,
        row_convention="the token's own row, which is also the row that predicts its follower",
        reduction="mean over rows of the score per lag, then the statistic, then its mean over prompts",
        sink_convention="scores before the softmax, so sinks play no part",
        ablation="z set to zero at every position, which equals the authors' V set to zero",
    )
    schema = LIST_SCHEMA
    behaviour = SECOND_COPY

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        lists = _lists(probing)
        if isinstance(lists, str):
            return Measurement.not_measurable(probing, lists)
        found = {name: _run_all(probing, lists, name) for name in ("repeated", "control")}
        profiles = {
            name: np.stack([part["profile"] for part in parts]) for name, parts in found.items()
        }
        looks = tuple(
            Look(item.repeated, item.start + item.n + np.arange(item.n), part["rows"])
            for item, part in zip(lists[:2], found["repeated"][:2], strict=True)
        )
        means = {name: _mean(each, ~np.isnan(each), 0) for name, each in profiles.items()}
        blind = np.isnan(profiles["repeated"]).any(-1).all(0)
        back = min(item.n for item in lists) + MAX_LAG
        notes = {
            (int(layer), int(head)): f"out of window: the lags lie up to {back} tokens back"
            for layer, head in np.argwhere(blind)
        }
        mass = {
            name: np.stack([part[name] for part in found["repeated"]]).mean(0, dtype=np.float64)
            for name in ("primacy", "recency")
        }
        return Measurement(
            closeness(profiles["repeated"]),
            closeness(profiles["control"]),
            looks,
            notes,
            _details(means["repeated"], means["control"], mass),
        )


def closeness(profiles: Float[np.ndarray, "*profile lag"]) -> Float[np.ndarray, "*profile"]:
    """1 − CMR distance, at least 0, of scores at lags −8 … 8; 0 without a peak ahead, NaN for a profile with NaN."""
    near = np.maximum(1 - fit(profiles[..., _FIT]).distance, 0)
    known = np.isfinite(profiles).all(-1)
    return np.where(known, np.where(forward_peak(profiles) > 0, near, 0), np.nan)


def forward_peak(profiles: Float[np.ndarray, "*profile lag"]) -> Float[np.ndarray, "*profile"]:
    """S(1) less the greatest of S(0) and S at the far lags; above 0 in a head that looks ahead."""
    others = _FAR | (LAGS == 0)
    return profiles[..., MAX_LAG + 1] - profiles[..., others].max(-1)


def _details(
    profile: Float[np.ndarray, "layer head lag"],
    control: Float[np.ndarray, "layer head lag"],
    mass: dict[str, np.ndarray],
) -> dict[str, Detail]:
    base = profile - profile[..., _FAR].mean(-1, keepdims=True)
    best = fit(profile[..., _FIT])
    rid = fit((profile - control)[..., _FIT])
    ahead = base[..., MAX_LAG + 1 : MAX_LAG + 4].mean(-1)
    step = base[..., MAX_LAG + 1] - base[..., MAX_LAG - 1]
    tenth = "mean attention per token of the {} tenth of the list, less that of its middle (ours)"
    return {
        "lag_profile": Detail(base, "mean score at a lag less that at lags ±6 … ±8", LAGS),
        "cmr_distance": Detail(best.distance, "CMR distance of the mean profile (Ji-An et al.)"),
        "cmr_distance_above_control": Detail(
            rid.distance,
            "the same once the control's profile is taken off, and with it what position alone does",
        ),
        "beta_enc": Detail(best.beta_enc, "CMR: drift while studying, of the nearest curve"),
        "beta_rec": Detail(best.beta_rec, "CMR: drift at recall, of the nearest curve"),
        "gamma": Detail(
            best.gamma, "CMR: share of studied context, of the nearest curve; none where β_rec = 0"
        ),
        "inverse_temperature": Detail(
            best.inverse_temperature, "score per unit of recall probability (1/τ)"
        ),
        "contiguity": Detail(
            ahead, "mean score at lags 1 … 3 less that at the far lags (ours, after Mistry et al.)"
        ),
        "asymmetry": Detail(step, "score at lag 1 less that at lag −1 (ours, after Mistry et al.)"),
        "forward_peak": Detail(
            forward_peak(profile), "score at lag 1 less the greatest at lag 0 and the far lags"
        ),
        "primacy": Detail(mass["primacy"], tenth.format("first")),
        "recency": Detail(mass["recency"], tenth.format("last")),
    }


def _lists(probing: Probing) -> tuple[RepeatedList, ...] | str:
    """The probe's lists, or why there are none."""
    model = probing.model
    if probing.records is not None:
        if model.tokenizer is None:
            return "the model came without a tokenizer, so lists of words cannot be read"
        limit = model.spec.max_context
        lists = given_lists(model.tokenizer, probing.records, probing.seed, probing.bos, limit)
        for number, item in enumerate(lists):
            if not _counting(item).any():
                raise RecordError(
                    f"record {number}: every token but those near the ends occurs twice in the list, so none has "
                    "one earlier place; give a more varied one"
                )
        return lists
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    n = min(N, (probing.length(2 * N + 1) - 1) // 2, len(plain) // 2)
    if n < MIN_LIST:
        return f"the model cannot hold {MIN_LIST} distinct tokens twice"
    return random_lists(plain, probing.n_prompts, n, probing.seed, probing.bos)


def _counting(item: RepeatedList) -> Bool[np.ndarray, " token"]:
    """Tokens whose rows count: every lag of the fit stays inside the list, and the token occurs once."""
    place = np.arange(item.n)
    return (place >= FIT_LAG) & (place < item.n - FIT_LAG) & item.once


def _run_all(probing: Probing, lists: tuple[RepeatedList, ...], which: str) -> list[Arrays]:
    """Profile, rows and masses of every list, in batches of equal length."""
    found: list[Arrays] = []
    for n, group in groupby(lists, key=lambda item: item.n):
        same = list(group)
        for start in range(0, len(same), _BATCH):
            batch = same[start : start + _BATCH]
            probing.tell(
                f"{which} lists {len(found) + 1}–{len(found) + len(batch)} of {len(lists)}"
            )
            ids = np.stack([getattr(item, which) for item in batch])
            counting = np.stack([_counting(item) for item in batch])
            part = probing.part(
                f"episodic-{which}",
                ids,
                partial(
                    profiles_of, probing.model, torch.from_numpy(ids), n, batch[0].start, counting
                ),
            )
            found += [{name: part[name][at] for name in part} for at in range(len(batch))]
    return found


def profiles_of(
    model: Model,
    ids: Int[Tensor, "prompt position"],
    n: int,
    start: int,
    counting: Bool[np.ndarray, "prompt token"],
) -> Arrays:
    """Scores by lag of lists that begin at ``start`` and repeat after n tokens.

    Returns:
        ``profile`` [prompt, layer, head, lag], the mean over the counting tokens of the score at each lag that stays
        inside the list, NaN where a head cannot see one of them; ``rows`` [prompt, layer, head, token], the score at
        lag 1 of every row less its mean at the far lags; ``primacy`` and ``recency`` [prompt, layer, head].
    """
    spec = model.spec
    scores = np.full((len(ids), spec.n_layers, spec.n_heads, n, len(LAGS)), np.nan, np.float32)
    tenth = max(1, n // 10)
    segments = {
        "first": (start, start + tenth),
        "middle": (start + tenth, start + n - tenth),
        "last": (start + n - tenth, start + n),
    }
    with model.edit(_reading(scores, n, start)):
        trace = model.trace(
            ids, keep=keep.statistics("segment_mass", segments=segments), logits="none"
        )
    mass = {
        name: trace.statistic("segment_mass", name)[..., start + n :].float().mean(-1).cpu().numpy()
        / (high - low)
        for name, (low, high) in segments.items()
    }
    inside = ~np.isnan(scores)
    profile = _mean(scores, inside & counting[:, None, None, :, None], 3)
    seen = np.isfinite(scores)
    rows = np.where(seen, scores, np.nan)[..., MAX_LAG + 1]
    rows = rows - _mean(scores[..., _FAR], seen[..., _FAR], -1)
    return {
        "profile": np.where(np.isfinite(profile), profile, np.nan),
        "rows": rows,
        "primacy": mass["first"] - mass["middle"],
        "recency": mass["last"] - mass["middle"],
    }


def _mean(values: np.ndarray, used: np.ndarray, axis: int) -> np.ndarray:
    total = np.where(used, values, 0).sum(axis, dtype=np.float64)
    count = used.sum(axis)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _reading(scores: Float[np.ndarray, "prompt layer head token lag"], n: int, start: int) -> Edit:
    """An edit that changes nothing: it reads the scores of the second copy's rows at every lag.

    Only at this site are they exact for every family (scaling, soft cap, bias and windows applied, hidden keys −inf):
    the logarithm of a weight loses those far below the row's greatest.
    """
    target = np.arange(n)[:, None] + LAGS
    inside = torch.from_numpy((target >= 0) & (target < n))
    keys = torch.from_numpy(start + target.clip(0, n - 1))

    def read(x: Tensor, where: Where) -> Tensor:
        token = where.positions[0] - start - n  # prompts of equal length: the same rows in each
        row = torch.nonzero((token >= 0) & (token < n))[:, 0]
        token = token[row].cpu()
        index = keys[token].to(x.device).expand(*x.shape[:2], -1, -1)
        found = x[:, :, row].gather(-1, index).float().cpu()
        found = found.masked_fill(~inside[token], torch.nan)
        scores[:, where.layer][:, : len(where.heads), token.numpy()] = found.numpy()
        return x

    return apply("*.*", read, site="scores")


register(Episodic())
