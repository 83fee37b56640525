"""Induction heads (Olsson et al. 2022, prefix matching): attention to what followed the token last time.

On [BOS, x, x] with x of 50 distinct random tokens, score = mean over the second copy of A[q, j+1], where j is the
earlier occurrence of x_q; with one repeat there is a single target per row. Copying, the other half of Olsson et
al.'s definition, is scored by :mod:`headlab.roles.copying`. Other conventions of the same idea:

``"olsson"`` (p. 60): 25 distinct random tokens stand four times behind a BOS token; the rows of repeats 2–4 have one
to three targets, the followers of all earlier occurrences. Whether these are summed per row
(``reduce="sum_over_targets"``, a share of attention, as a figure's caption has it) or the entries averaged
(``"mean_entries"``) the paper does not say. Its text has tokens that "preceded" the token; its erratum and
reproductions take the follower, as here (read in secondary sources). The paper leaves out the most and the least
common tokens; headlab, which knows no counts, leaves out special and added tokens only.

``"transformer_lens"`` (``detect_head`` with ``error_measure="mul"``): ΣA·D / ΣA over the whole pattern, D being 1
where the token before the key is the query's token. Rows of the first copy count too, so an ideal head scores about
0.5, and the thresholds are halved. TransformerLens takes one prompt of the user's; here it is the default's
[BOS, x, x]. Of a record's rows those count whose token stands once in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Measurement, Probing, Role, RoleError, register
from headlab.roles.repeats import (
    SECOND_COPY,
    Repeats,
    blind,
    looks,
    masses,
    measure_repeats,
    repeats,
)
from headlab.roles.scores import RoleInfo
from headlab.tasks import TOKENS_SCHEMA, RecordError

Convention = Literal["headlab", "olsson", "transformer_lens"]
Reduce = Literal["sum_over_targets", "mean_entries"]

#: Olsson et al.: tokens of x, and how often x stands.
OLSSON_N, OLSSON_COPIES = 25, 4


class Induction(Role):
    """See the module's docstring.

    Args:
        convention: ``"headlab"``, ``"olsson"`` or ``"transformer_lens"``.
        reduce: Under ``"olsson"``, whether a row's targets are summed or all entries averaged.
    """

    info = RoleInfo(
        name="induction",
        title="Induction (prefix matching)",
        question="When a token repeats, does the head look at what followed it last time?",
        statistic="mean attention in the second copy of random tokens to the token after the earlier occurrence",
        null="the same positions in sequences whose second half does not repeat the first",
        decision="score ≥ 0.3 and at least 0.2 above the null, at q ≤ the false-discovery rate",
        reference="Olsson et al. 2022, In-context learning and induction heads, p. 60",
        min_score=0.3,
        min_effect=0.2,
        row_convention="the token's own row, which is also the row that predicts its follower",
        reduction="mean over the rows of the second copy but its first, then over prompts",
    )
    schema = TOKENS_SCHEMA
    behaviour = SECOND_COPY

    def __init__(
        self, convention: Convention = "headlab", reduce: Reduce = "sum_over_targets"
    ) -> None:
        if convention not in ("headlab", "olsson", "transformer_lens"):
            raise RoleError(f"there is no convention {convention!r} of induction")
        if reduce not in ("sum_over_targets", "mean_entries"):
            raise RoleError(f"reduce={reduce!r} must be 'sum_over_targets' or 'mean_entries'")
        self.convention, self.reduce = convention, reduce
        if convention == "olsson":
            how = {
                "sum_over_targets": "sum over a row's targets, mean over rows, then over prompts",
                "mean_entries": "mean over all pairs of row and target, then over prompts",
            }
            self.info = replace(
                self.info,
                statistic="attention in repeats 2–4 of 25 random tokens to the tokens after earlier occurrences",
                reduction=how[reduce],
            )
        if convention == "transformer_lens":
            self.info = replace(
                self.info,
                statistic="ΣA·D / ΣA over the whole pattern, D the keys whose token before is the query's",
                decision="score ≥ 0.15 and at least 0.1 above the null, at q ≤ the false-discovery rate",
                min_score=0.15,
                min_effect=0.1,
                reduction="a ratio of sums per prompt, rows of the first copy included, then mean over prompts",
            )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if self.convention == "headlab":
            return measure_repeats(probing, "induction")
        try:
            if self.convention == "olsson":
                groups = repeats(probing, OLSSON_N, OLSSON_COPIES, skip=0)
            else:
                groups = repeats(probing, skip=0)
        except RecordError:
            raise
        except PromptError as error:
            return Measurement.not_measurable(probing, str(error))
        return (
            self._olsson(probing, groups)
            if self.convention == "olsson"
            else _whole(probing, groups)
        )

    def _olsson(self, probing: Probing, groups: list[Repeats]) -> Measurement:
        """Attention to the followers of all earlier occurrences; targets beyond a layer's window are left out."""
        found = masses(probing, groups, "repeats-olsson", _followers)
        entries = found["repeated"] + found["control"]
        seen = ~np.all([(part == 0).all((0, 2, 3)) for part in entries], 0)  # [layer, target]
        rows, control = (
            [self._reduced(part, group, seen) for part, group in zip(parts, groups, strict=True)]
            for parts in found.values()
        )
        values, null = (np.concatenate([mean for mean, _ in parts]) for parts in (rows, control))
        notes = {
            (int(layer), head): "out of window: no earlier occurrence lies within reach"
            for layer in np.flatnonzero(~seen[:, 0])
            for head in range(values.shape[2])
        }
        return Measurement(values, null, looks(groups, [row for _, row in rows]), notes)

    def _reduced(
        self, entries: np.ndarray, group: Repeats, seen: np.ndarray
    ) -> tuple[
        Float[np.ndarray, "prompt layer head"], Float[np.ndarray, "prompt layer head query"]
    ]:
        earlier = (group.queries - group.prompts.start) // group.prompts.n
        real = earlier[:, None] > np.arange(entries.shape[-1])  # the copy has that many before it
        taken = np.where(real, entries, 0) * seen[:, None, None]
        rows = taken.sum(-1, dtype=np.float64)
        counted = (real[None] & seen[:, None]).sum(-1)  # [layer, query]
        weight = counted.sum(-1) if self.reduce == "mean_entries" else (counted > 0).sum(-1)
        mean = np.full(rows.shape[:-1], np.nan)
        return np.divide(rows.sum(-1), weight[:, None], out=mean, where=weight[:, None] > 0), rows


def _followers(
    probing: Probing, ids: Int[Tensor, "prompt position"], group: Repeats
) -> Float[np.ndarray, "prompt layer head query target"]:
    """Attention to the follower of the last occurrence, of the one before, and so on."""
    n = group.prompts.n
    lags = [back * n - 1 for back in range(1, group.prompts.copies)]
    plan = keep.statistics(
        "lag_mass",
        bins=[edge for lag in lags for edge in (lag, lag + 1)],
        queries=group.queries.tolist(),
    )
    mass = probing.model.trace(ids, keep=plan, logits="none").statistic("lag_mass")
    every: np.ndarray = mass[..., 0::2].float().cpu().numpy()
    return every


def _whole(probing: Probing, groups: list[Repeats]) -> Measurement:
    """TransformerLens' ratio: attention on targets over that of all rows."""
    found = masses(probing, groups, "repeats-whole", _targets_and_total)
    rows = {which: [part[..., :-1] for part in parts] for which, parts in found.items()}
    values, null = (
        np.concatenate([part[..., :-1].sum(-1, dtype=np.float64) / part[..., -1] for part in parts])
        for parts in found.values()
    )
    notes = {}
    for layer in np.flatnonzero(blind(rows["repeated"] + rows["control"])):
        values[:, layer] = null[:, layer] = np.nan
        for head in range(values.shape[2]):
            notes[int(layer), head] = "out of window: no earlier occurrence lies within reach"
    return Measurement(values, null, looks(groups, rows["repeated"]), notes)


def _targets_and_total(
    probing: Probing, ids: Int[Tensor, "prompt position"], group: Repeats
) -> Float[np.ndarray, "prompt layer head query+1"]:
    """Attention of each row of the second copy to its target, and as a last entry that of all rows to all keys."""
    n, length = group.prompts.n, ids.shape[1]
    plan = keep.statistics("lag_mass", "feature", bins=(n - 1, n), x=torch.ones(length))
    trace = probing.model.trace(ids, keep=plan, logits="none")
    targets = trace.statistic("lag_mass")[..., 0].float().cpu().numpy()[..., group.queries]
    total = trace.statistic("feature").float().cpu().numpy().reshape(*targets.shape[:3], -1).sum(-1)
    return np.concatenate([targets, total[..., None]], -1)


register(Induction())
