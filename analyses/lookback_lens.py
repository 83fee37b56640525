"""Lookback Lens (Chuang et al. 2024): a detector on lookback ratios tells which answers the context bears out.

The model answers questions about made-up things from three documents, greedily. An answer is labelled 1 if it holds
the context's answer word for word, else 0; in the paper GPT-4o marks spans of answers to Natural Questions (NQ) and of
summaries (CNN/DM). So a label belongs to a whole answer here, and the paper's figures are to look at, not to meet. The
prompt's last token counts as new, the rest as context. Figures are of questions held out, five folds; the paper's split
is two random halves of spans, in which windows of one answer lie on both sides, and stands beside ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.errors import PlanError
from headlab.lookback import Example, Lens, fit, generate, ratios
from headlab.lookback.lens import ends_of
from headlab.statistics import bootstrap_interval, sign_flip_p
from headlab.steering import holds
from headlab.tasks import document_prompt, document_questions

PAPER = "meta-llama/Llama-2-7b-chat-hf"
N_DOCUMENTS, NEW_TOKENS, CHUNK = 3, 24, 8
#: Questions to fit on, and to decode with, for every prompt asked for.
FITTED, DECODED = 8, 2
BATCH = 16


@dataclass(frozen=True)
class Answers:
    """Answers of a model, and whether each holds the context's."""

    examples: list[Example]
    right: np.ndarray

    @property
    def said(self) -> str:
        """How many are right and how many wrong."""
        return (
            f"{int(self.right.sum())} answers hold the context's, {int((~self.right).sum())} do not"
        )


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Answer, fit the lens, and decode by it."""
    found = answered(model, FITTED * n_prompts, seed)
    given = [
        Figure("answers that hold the context's", float(found.right.mean()), note=found.said),
    ]
    read = ratios(model, found.examples)
    try:
        lens = fit(model, found.examples, ratios=read, seed=seed)
        leaking = fit(model, found.examples, ratios=read, split="paper", seed=seed)
        whole = fit(model, found.examples, ratios=read, spans="given", seed=seed)
    except PlanError as error:
        return [Figure("detector", None, note=f"not measurable: {error}; {found.said}"), *given]
    figures = [*given, *of_windows(lens, found), *of_split(leaking), *of_answers(whole, found)]
    figures += of_heads(lens)
    return figures + guided(model, lens, DECODED * n_prompts, seed)


def answered(model: hl.Model, n: int, seed: int) -> Answers:
    """The model's greedy answers to questions about documents."""
    asked = document_questions(n, N_DOCUMENTS, seed)
    prompts = [document_prompt(model.tokenizer, one).ids for one in asked]
    examples, right = [], []
    for start in range(0, n, BATCH):
        rows = slice(start, start + BATCH)
        made = model.generate(list(map(list, prompts[rows])), max_new_tokens=NEW_TOKENS)
        for prompt, question, ids, text in zip(
            prompts[rows], asked[rows], made.ids, made.texts, strict=True
        ):
            new = tuple(int(token) for token in ids if token >= 0)
            if len(new) > 1 and new[-1] in ends_of(model):
                new = new[:-1]
            good = holds(text, question.answer)
            bad = () if good else ((0, len(new)),)
            examples.append(Example(prompt, new, bad, question.question))
            right.append(good)
    return Answers(examples, np.array(right))


def of_windows(lens: Lens, found: Answers) -> list[Figure]:
    """Windows of 8 tokens, questions held out."""
    known = lens.figures
    spans = f"{int(known['positive'])} of {int(known['spans'])} windows borne out; {found.said}"
    note = f"{interval(lens)}, p {known['p_value']:.2g}; {spans}; theirs on NQ, by halves of spans"
    chance = "labels dealt out anew by question, everything refitted"
    return [
        Figure(
            "windows of 8: AUROC on questions held out", known["auroc"], 0.866, PAPER, note=note
        ),
        Figure("windows of 8: AUROC of shuffled labels", known["null_mean"], note=chance),
        Figure("windows of 8: AUROC on those fitted on", known["auroc_train"], 0.886, PAPER),
        Figure(
            "windows of 8: AUROC on another task",
            None,
            0.662,
            PAPER,
            note="not measured: one task at hand; theirs from NQ to CNN/DM",
        ),
        Figure(
            "windows of 8: Brier score, calibrated (Platt)",
            known["brier_calibrated"],
            note=f"{known['brier']:.3f} before; calibration error {known['calibration_error']:.3f} before, "
            f"{known['calibration_error_calibrated']:.3f} after",
        ),
    ]


def of_split(leaking: Lens) -> list[Figure]:
    """The paper's split, and how much of its AUROC is the leak."""
    known = leaking.figures
    note = f"{interval(leaking)}; windows of one answer lie on both sides"
    chance = "what lies above 1/2 is the leak: these labels mean nothing"
    return [
        Figure("windows of 8: AUROC by the paper's split", known["auroc"], 0.866, PAPER, note=note),
        Figure("the same of shuffled labels", known["null_mean"], note=chance),
    ]


def of_answers(whole: Lens, found: Answers) -> list[Figure]:
    """Whole answers, as the paper's predefined spans are where an answer is all right or all wrong."""
    known = whole.figures
    note = f"{interval(whole)}, p {known['p_value']:.2g}; {found.said}; theirs on NQ, by halves of spans"
    lengths = np.array([len(one.response) for one in found.examples])
    return [
        Figure(
            "whole answers: AUROC on questions held out", known["auroc"], 0.914, PAPER, note=note
        ),
        Figure("whole answers: AUROC on those fitted on", known["auroc_train"], 0.987, PAPER),
        Figure(
            "whole answers: AUROC on another task",
            None,
            0.853,
            PAPER,
            note="not measured: one task at hand; theirs from NQ to CNN/DM",
        ),
        Figure(
            "whole answers: AUROC of shortness alone",
            shortness(lengths, found.right),
            note="a control: how far the answer's length tells as much",
        ),
    ]


def shortness(lengths: np.ndarray, right: np.ndarray) -> float:
    """How often a right answer is shorter than a wrong one, ties half."""
    less = lengths[right][:, None] - lengths[~right][None]
    return float(((less < 0) + (less == 0) / 2).mean())


def of_heads(lens: Lens) -> list[Figure]:
    """Heads whose ratio alone tells windows apart."""
    claimed = lens.heads[lens.heads["q_value"] <= 0.05]
    best = lens.heads.loc[(lens.heads["auroc"] - 0.5).abs().nlargest(5).index]
    names = ", ".join(
        f"L{row['layer']}H{row['head']} {row['auroc']:.2f}" for row in best.to_dict("records")
    )
    return [
        Figure(
            "heads whose ratio alone tells windows apart, q ≤ 0.05",
            float(len(claimed)),
            note=f"of {len(lens.heads)}; AUROC of the first: {names}; below 0.5: looks back more where wrong",
        )
    ]


def guided(model: hl.Model, lens: Lens, n: int, seed: int) -> list[Figure]:
    """Answers decoded by the lens beside sampled ones of the same temperature, on questions not fitted on."""
    asked = document_questions(n, N_DOCUMENTS, seed + 1)
    prompts = [document_prompt(model.tokenizer, one).ids for one in asked]
    rates = {}
    for name, candidates in (("guided", 8), ("sampled", 1)):
        texts = [
            generate(model, lens, prompt, 2 * CHUNK, chunk=CHUNK, n_candidates=candidates, seed=at)
            for at, prompt in enumerate(prompts)
        ]
        pairs = zip(texts, asked, strict=True)
        rates[name] = np.array([holds(str(text), one.answer) for text, one in pairs], float)
    gain = (rates["guided"] - rates["sampled"])[:, None]
    low, high = (float(end[0]) for end in bootstrap_interval(gain, seed))
    note = f"{n} other questions, {2 * CHUNK} tokens; theirs: span-EM on NQ"
    return [
        Figure(
            "sampled answers that hold the context's",
            rates["sampled"].mean(),
            0.712,
            PAPER,
            note=note,
        ),
        Figure(
            "guided answers that hold the context's",
            rates["guided"].mean(),
            0.742,
            PAPER,
            note=note,
        ),
        Figure(
            "guided less sampled",
            float(gain.mean()),
            0.03,
            PAPER,
            note=f"[{low:.3f}, {high:.3f}], p {float(sign_flip_p(gain, seed)[0]):.2g}; theirs against greedy",
        ),
    ]


def interval(lens: Lens) -> str:
    """The interval of a lens's AUROC."""
    return f"[{lens.figures['auroc_low']:.3f}, {lens.figures['auroc_high']:.3f}]"


if __name__ == "__main__":
    main(run, __doc__)
