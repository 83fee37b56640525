"""Retrieval heads (Wu et al. 2024): heads that copy the needle out of the haystack.

A trial hides a fact in a long text and lets the model answer greedily. A generated token w counts for a head if
the row that predicts w has its largest weight on a token of the answer's span, and that token is w. The score of
a trial is the share of the answer's tokens a head copied, each once (the paper's definition; with
``convention="code"`` once per step, as in the authors' code, where repeats can take it above 1). Trials whose
answer has at most half of the needle's words say nothing about retrieval and are left out.

Attention is never materialised while decoding: the answer is generated on the fast path, and one further pass
reads the argmax of the predicting rows. Both give the same, token by token.

Null: the same rows with answer tokens and attended tokens paired wrongly, averaged over every cyclic shift of
the steps. A head that dwells on the needle without following it scores no more than this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Look, Measurement, Probing, Role, register
from headlab.roles.scores import RoleInfo
from headlab.tasks import NeedleTrial, needle_trials, prose

LENGTHS = (256, 512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Share of the answer's words a response must hold for its trial to count (Wu et al.: ROUGE-1 recall > 50 %).
MIN_RECALL = 0.5
_NEW_TOKENS = 24


class Retrieval(Role):
    """See the module's docstring.

    Args:
        lengths: Prompt lengths in tokens.
        depths: Where needles go, from 0 to 1.
        convention: ``"paper"`` counts each answer token once, ``"code"`` once per step.
    """

    info = RoleInfo(
        name="retrieval",
        title="Retrieval",
        question="When the model copies a fact out of a long text, does this head do the looking?",
        statistic="share of the answer's tokens whose predicting row has its largest weight on that token",
        null="the same rows with generated and attended tokens paired wrongly, over all cyclic shifts",
        decision="score ≥ 0.1 (Wu et al.) and at least 0.05 above the null, at q ≤ the false-discovery rate",
        reference="Wu et al. 2024, Retrieval head mechanistically explains long-context factuality",
        min_score=0.1,
        min_effect=0.05,
        row_convention="the row that predicts the generated token",
    )

    def __init__(
        self,
        lengths: Sequence[int] = LENGTHS,
        depths: Sequence[float] = DEPTHS,
        convention: Literal["paper", "code"] = "paper",
    ) -> None:
        self.lengths = tuple(lengths)
        self.depths = tuple(depths)
        self.convention = convention

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        spec = probing.model.spec
        shape = (1, spec.n_layers, spec.n_heads)
        blank = np.full(shape, np.nan)
        if any(layer.stack != "decoder" for layer in spec.layers):
            note = "not measurable: retrieval needs a model that generates"
            return Measurement(blank, blank, notes={(-1, -1): note})
        room = probing.length(max(self.lengths) + _NEW_TOKENS) - _NEW_TOKENS
        lengths = tuple(n for n in self.lengths if n <= room)
        if not lengths:
            note = f"not measurable: the context holds no prompt of {min(self.lengths)} tokens"
            return Measurement(blank, blank, notes={(-1, -1): note})
        text = prose(probing.haystack)
        try:
            trials = needle_trials(
                probing.model.tokenizer, text, lengths, self.depths, probing.n_prompts, probing.seed
            )
        except PromptError as error:  # no reason to give up the other roles of a run
            return Measurement(blank, blank, notes={(-1, -1): f"not measurable: {error}"})
        values, null, looks = [], [], []
        for at, trial in enumerate(trials):
            probing.tell(f"needle {at + 1} of {len(trials)} in {trial.length} tokens")
            name = f"needle-{at:03d}"
            found = probing.part(name, np.array(trial.ids), partial(run_trial, probing, trial))
            if recall(probing.model.text(found["new"].tolist()), trial.needle.answer) <= MIN_RECALL:
                continue
            score, chance = self._scored(found["attended"], found["new"], trial)
            out = _out_of_window(probing, trial)
            score[out] = chance[out] = np.nan
            values.append(score)
            null.append(chance)
            looks.append(_look(found, trial))
        if not values:
            note = f"not measurable: the model recalled the needle in none of {len(trials)} trials"
            return Measurement(blank, blank, notes={(-1, -1): note})
        stacked = np.stack(values)
        notes = {
            (int(layer), int(head)): "out of window: the needle lay beyond this head's window"
            for layer, head in np.argwhere(np.isnan(stacked).all(0))
        }
        recalled = f"{len(values)} of {len(trials)} needles recalled"
        looks.sort(key=lambda look: len(look.ids))  # short prompts make readable examples
        return Measurement(stacked, np.stack(null), tuple(looks[:2]), {(-1, -1): recalled} | notes)

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


def run_trial(probing: Probing, trial: NeedleTrial) -> Arrays:
    """Generate the answer, then read where each predicting row has its largest weight.

    Returns:
        ``new`` [step], the generated tokens, and ``attended`` [layer, head, step], key positions.
    """
    model = probing.model
    stop = [int(token) for token in model.tokenizer("\n", add_special_tokens=False)["input_ids"]][
        -1:
    ]
    ids = list(trial.ids)
    generated = model.generate(ids, _NEW_TOKENS, stop=stop).ids[0]
    new = generated[generated >= 0].tolist()
    rows = list(range(len(ids) - 1, len(ids) + len(new) - 1))
    trace = model.trace(
        [ids + new[:-1]], keep=keep.statistics("argmax", queries=rows), logits="none"
    )
    attended = trace.statistic("argmax")[0].cpu().numpy().astype(np.int32)
    return {"new": np.array(new, dtype=np.int64), "attended": attended}


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


def recall(response: str, answer: str) -> float:
    """Share of the answer's words that the response holds: ROUGE-1 recall without stemming."""
    words = re.findall(r"\w+", answer.lower())
    left = re.findall(r"\w+", response.lower())
    found = 0
    for word in words:
        if word in left:
            left.remove(word)
            found += 1
    return found / len(words)


def _out_of_window(probing: Probing, trial: NeedleTrial) -> np.ndarray:
    """Heads whose window cannot reach the whole needle from the first predicting row."""
    distance = len(trial.ids) - 1 - trial.span[0]
    spec = probing.model.spec
    out = [layer.window is not None and layer.window <= distance for layer in spec.layers]
    return np.repeat(np.array(out)[:, None], spec.n_heads, 1)


def _look(found: Arrays, trial: NeedleTrial) -> Look:
    start, stop = trial.span
    inside = (found["attended"] >= start) & (found["attended"] < stop)
    tokens = np.array(trial.ids)[np.clip(found["attended"], 0, len(trial.ids) - 1)]
    queries = len(trial.ids) - 1 + np.arange(len(found["new"]))
    ids = np.concatenate([trial.ids, found["new"][:-1]])
    return Look(ids, queries, (inside & (tokens == found["new"])).astype(np.float32))


register(Retrieval())
