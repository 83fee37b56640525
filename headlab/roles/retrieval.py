"""Retrieval heads (Wu et al. 2024): heads that copy the needle out of the haystack.

A trial hides a fact in a long text and lets the model answer greedily. A generated token w counts for a head if
the row that predicts w has its largest weight on a token of the answer's span, and that token is w. The score of
a trial is the share of the answer's tokens a head copied, each once (the paper's definition, eq. 1; with
``convention="code"`` once per step, as in the authors' code, where repeats can take it above 1). Of equal largest
weights the lowest position counts. Trials whose response has at most half of the answer's words say nothing about
retrieval and are left out.

Null: the same rows with answer tokens and attended tokens paired wrongly, averaged over every cyclic shift of
the steps. A head that dwells on the needle without following it scores no more than this.

Wu et al. mask a head by setting its query to zero, which spreads its attention evenly, in the rows that predict
the response and not in the prompt (``ablation="uniform_decode"``); the default sets z to zero at every position.
Their needles are three; ours are many, and their spans come from character offsets in place of token sets.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.attention.edits import Edit, Where, apply
from headlab.attention.heads import Head
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Behaviour, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.retrieval_trials import (
    DEPTHS,
    LENGTHS,
    SCHEMA,
    needle_recall,
    recall,
    settings,
    trials_of,
)
from headlab.roles.scores import RoleInfo
from headlab.tasks import NeedleTrial, RecordError

#: Share of the answer's words a response must hold more than for its trial to count (Wu et al.: ROUGE-1 recall > 50 %).
MIN_RECALL = 0.5
#: Score of a retrieval head (Wu et al.).
MIN_SCORE = 0.1


#: Tokens of the prompts that run together: enough that decoding them shares its cost, few enough for long contexts.
_BATCH_TOKENS = 4096


class Retrieval(Role):
    """See the module's docstring.

    Args:
        lengths: Prompt lengths in tokens.
        depths: Where needles go, from 0 to 1.
        convention: ``"paper"`` counts each answer token once, ``"code"`` once per step.
        ablation: ``"zero"`` sets z to zero everywhere, ``"uniform_decode"`` is the paper's masking.
    """

    info = RoleInfo(
        name="retrieval",
        title="Retrieval",
        question="When the model copies a fact out of a long text, does this head do the looking?",
        statistic="share of the answer's tokens whose predicting row has its largest weight on that token",
        null="the same rows with generated and attended tokens paired wrongly, over all cyclic shifts",
        decision="score ≥ 0.1 (Wu et al.) and at least 0.05 above the null, at q ≤ the false-discovery rate",
        reference="Wu et al. 2024, Retrieval head mechanistically explains long-context factuality",
        min_score=MIN_SCORE,
        min_effect=0.05,
        row_convention="the row that predicts the generated token",
        reduction="share of the answer's tokens, then mean over the trials the model answered",
        sink_convention="kept: a row whose largest weight is on the first token copies nothing",
    )
    schema = SCHEMA
    behaviour = Behaviour("needle recall of greedy responses (ROUGE-1, %)", needle_recall)

    def __init__(
        self,
        lengths: Sequence[int] = LENGTHS,
        depths: Sequence[float] = DEPTHS,
        convention: Literal["paper", "code"] = "paper",
        ablation: Literal["zero", "uniform_decode"] = "zero",
    ) -> None:
        self.lengths = tuple(lengths)
        self.depths = tuple(depths)
        self.convention = convention
        self.kind = ablation
        if ablation == "uniform_decode":
            said = "query set to zero (even attention) in the rows that predict generated tokens"
            self.info = replace(self.info, ablation=said)

    def ablation(self, heads: Iterable[Head]) -> Edit:
        """What takes the role away from heads."""
        return uniform_decode(heads) if self.kind == "uniform_decode" else super().ablation(heads)

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe.

        Raises:
            RecordError: A record of the user's cannot be used.
        """
        model = probing.model
        stacks = {layer.stack for layer in model.spec.layers}
        if stacks != {"decoder"} or not model.module.can_generate():
            return Measurement.not_measurable(probing, "retrieval needs a model that generates")
        try:
            trials = trials_of(probing, self.lengths, self.depths, probing.n_prompts)
        except RecordError:
            raise
        except PromptError as error:  # no reason to give up the other roles of a run
            return Measurement.not_measurable(probing, str(error))
        values, null, looks, counted = [], [], [], []
        for trial, found in zip(trials, answered(probing, trials), strict=True):
            if recall(model.text(found["new"].tolist(), special=False), trial.answer) <= MIN_RECALL:
                continue
            score, chance = self._scored(found["attended"], found["new"], trial)
            score[~found["seen"]] = chance[~found["seen"]] = np.nan
            values.append(score)
            null.append(chance)
            looks.append(_look(found, trial))
            counted.append(trial)
        if not values:
            why = f"the model recalled the needle in none of {len(trials)} trials"
            return Measurement.not_measurable(probing, why)
        stacked = np.stack(values)
        notes = {
            (int(layer), int(head)): "out of window: the needle lay beyond what this head sees"
            for layer, head in np.argwhere(np.isnan(stacked).all(0))
        }
        recalled = f"{len(values)} of {len(trials)} needles recalled"
        looks.sort(key=lambda look: len(look.ids))  # short prompts make readable examples
        return Measurement(
            stacked,
            np.stack(null),
            tuple(looks[:2]),
            {(-1, -1): recalled} | notes,
            profiles(stacked, counted),
        )

    def _scored(
        self,
        attended: Int[np.ndarray, "layer head step"],
        new: Int[np.ndarray, " step"],
        trial: NeedleTrial,
    ) -> tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]]:
        score = copied_share(attended, new, trial, self.convention)
        steps = len(new)
        shifted = [
            copied_share(attended, np.roll(new, shift), trial, self.convention)
            for shift in range(1, steps)
        ]
        return score, np.mean(shifted, 0) if shifted else np.zeros_like(score)


def answered(probing: Probing, trials: Sequence[NeedleTrial]) -> list[Arrays]:
    """What :func:`run_trials` finds for each trial; trials of like length run together, and are remembered so."""
    order = sorted(range(len(trials)), key=lambda at: len(trials[at].ids))
    batches: list[list[int]] = []
    for at in order:
        length = len(trials[at].ids)
        last = batches[-1] if batches else []
        # Padding costs as much as tokens do, so a batch holds prompts of about one length.
        alike = bool(last) and 5 * len(trials[last[0]].ids) >= 4 * length
        if alike and (len(last) + 1) * length <= _BATCH_TOKENS:
            last.append(at)
        else:
            batches.append([at])
    found: list[Arrays] = [{}] * len(trials)
    done = 0
    for number, batch in enumerate(batches):
        some = [trials[at] for at in batch]
        longest = len(some[-1].ids)
        probing.tell(f"needles {done + 1}–{done + len(some)} of {len(trials)} in {longest} tokens")
        ids = np.concatenate([[*trial.ids, -1] for trial in some])
        part = probing.part(f"needles-{number:03d}", ids, partial(run_trials, probing, some))
        for row, at in enumerate(batch):
            new = part["new"][row]
            steps = int((new >= 0).sum())
            attended = part["attended"][row, ..., :steps]
            found[at] = {"new": new[:steps], "attended": attended, "seen": part["seen"][row]}
        done += len(some)
    return found


def run_trials(probing: Probing, trials: Sequence[NeedleTrial]) -> Arrays:
    """Generate the answers, and read where each predicting row has its largest weight.

    Returns:
        ``new`` [trial, step], the generated tokens, −1 after an answer's end; ``attended``
        [trial, layer, head, step], key positions; and ``seen`` [trial, layer], whether the layer's predicting rows
        reach back to the answer's first token.
    """
    model = probing.model
    first = [(trial.span[0], trial.span[0] + 1) for trial in trials]
    generated = model.generate(
        [list(trial.ids) for trial in trials],
        keep=keep.statistics(
            "argmax", "segment_mass", segments={"first": first}, queries="generated"
        ),
        **settings(model, trials),
    )
    assert generated.trace is not None
    # A visible key never gets exactly nothing from every row of every head: such a layer cannot see it, be it for
    # a sliding window or for attention in chunks. Later rows are only farther away.
    mass = generated.trace.statistic("segment_mass", "first")[..., 0]
    return {
        "new": generated.ids.cpu().numpy(),
        "attended": generated.trace.statistic("argmax").cpu().numpy().astype(np.int32),
        "seen": (mass.nan_to_num() > 0).any(-1).cpu().numpy(),
    }


def copied_share(
    attended: Int[np.ndarray, "layer head step"],
    new: Int[np.ndarray, " step"],
    trial: NeedleTrial,
    convention: Literal["paper", "code"] = "paper",
) -> Float[np.ndarray, "layer head"]:
    """Share of the answer's tokens that each head copied (Wu et al. 2024, eq. 1)."""
    start, stop = trial.span
    prompt = np.array(trial.ids)
    inside = (attended >= start) & (attended < stop)
    hit = inside & (prompt[np.clip(attended, 0, len(prompt) - 1)] == new)
    if convention == "code":
        return hit.sum(-1) / (stop - start)
    copied = [((attended == position) & hit).any(-1) for position in range(start, stop)]
    return np.sum(copied, 0) / (stop - start)


def profiles(
    values: Float[np.ndarray, "prompt layer head"], trials: Sequence[NeedleTrial]
) -> dict[str, Detail]:
    """How often each head fires (Wu et al.: some always, some on some needles only), and where.

    A trial counts as one in which a head fired when it copied at least one token of the answer.
    """
    known = ~np.isnan(values)
    fired = np.where(known, values > 0, np.nan)
    details = {
        "activation_frequency": Detail(
            _mean(fired), "share of answered trials in which the head copied at least one token"
        )
    }
    if any(trial.needle is None for trial in trials):  # whole prompts lie on no grid
        return details
    for name, meaning in (
        ("length", "score by length of the prompt, in tokens"),
        ("depth", "score by depth of the needle, from 0 to 1"),
    ):
        where = np.array([getattr(trial, name) for trial in trials], np.float64)
        at = np.unique(where)
        scores = np.stack([_mean(values[where == place]) for place in at], -1)
        details[f"score_by_{name}"] = Detail(scores, meaning, at)
    return details


def uniform_decode(heads: Iterable[Head]) -> Edit:
    """The masking of Wu et al.: query zero, so that attention is even, wherever a token is generated.

    That is the last row of every call of a generation: of the prompt's, which predicts the first new token, and the
    only row of each later one. The prompt's other rows, and the keys and values of all, stay as they are. Under a
    learned sink or a bias by distance, attention is even but for those.
    """

    def last_row(q: Tensor, where: Where) -> Tensor:
        q = q.clone()
        q[:, -1] = 0
        return q

    return apply(list(heads), last_row, site="q")


def _mean(values: Float[np.ndarray, "prompt layer head"]) -> Float[np.ndarray, "layer head"]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no trials is NaN, as meant
        return np.asarray(np.nanmean(values, 0))


def _look(found: Arrays, trial: NeedleTrial) -> Look:
    start, stop = trial.span
    inside = (found["attended"] >= start) & (found["attended"] < stop)
    tokens = np.array(trial.ids)[np.clip(found["attended"], 0, len(trial.ids) - 1)]
    queries = len(trial.ids) - 1 + np.arange(len(found["new"]))
    ids = np.concatenate([trial.ids, found["new"][:-1]])
    return Look(ids, queries, (inside & (tokens == found["new"])).astype(np.float32))


register(Retrieval())
