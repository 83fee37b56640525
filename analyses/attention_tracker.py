"""Attention Tracker (Hung et al. 2024): injected orders told by how much a few heads look at the instruction.

Published: the numbers of heads that ship with the authors' code, and the gain in AUROC that the abstract states; AUROCs
of single models could not be read. Heads and threshold are fitted on 30 sentences with one wording of attack; AUROC is
of other sentences and other wordings, one minus the focus score against whether there is an attack. An attack makes
data longer, which alone draws attention to it: the last rows set attacked texts against benign ones of two sentences.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main
from scipy.stats import mannwhitneyu

import headlab as hl
from headlab.errors import HeadlabError
from headlab.lookback.statistics import auroc, auroc_interval
from headlab.statistics import corrected
from headlab.steering import important_heads, instruction_prompt
from headlab.steering.behaviours.injections import injections, wording_of
from headlab.steering.tracker import PROBE, focus

#: Another instruction than the one that heads are chosen under.
OTHER = "Summarise the text in one short sentence"
DRAWS = 20
_COUNTS = (
    "4–41 (Llama-3-8B 4, Phi-3 10, Qwen2-1.5B 14, Mistral-7B 25, Gemma-2-9B 31, Granite-3-8B 41)"
)


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Choose heads on one wording, and tell other wordings apart."""
    n = min(30, max(6, n_prompts))
    fit, test = injections("fit", n, seed), injections("test", n, seed)
    try:
        benign, attacked = (_focus(model, PROBE, part) for part in (fit.benign, fit.attacked))
        held = {
            name: (_focus(model, name, test.benign), _focus(model, name, test.attacked))
            for name in (PROBE, OTHER)
        }
        longer = _focus(
            model, PROBE, [f"{a} {test.benign[at - 1]}" for at, a in enumerate(test.benign)]
        )
    except HeadlabError as error:
        return [Figure("important heads", None, note=f"not measurable: {error}")]
    counts = {at: len(important_heads(benign, attacked, at)) for at in range(6)}
    strict = max((at for at in counts if counts[at] >= 3), default=0)
    heads = important_heads(benign, attacked, strict) or important_heads(benign, attacked, -1)
    total = benign.shape[1] * benign.shape[2]
    figures = [
        Figure(f"heads of {total} that separate by n = {at}", float(counts[at]),
               _COUNTS if at == 4 else None, "shipped with the code" if at == 4 else "",
               note="the paper is said to take n = 4" if at == 4 else "")
        for at in counts
    ]  # fmt: skip
    rng = np.random.default_rng(seed)
    rows, p = [], []
    chosen, every = _columns(heads), (slice(None), slice(None))
    rows.append((f"AUROC, held out ({len(heads)} heads, n = {strict})", *held[PROBE], chosen))
    rows.append(("AUROC, held out, another instruction", *held[OTHER], chosen))
    rows.append(("AUROC, held out, every head", *held[PROBE], every))
    for whose, columns in (("", chosen), (", every head", every)):
        what = f"AUROC, against benign texts of two sentences{whose}"
        rows.append((what, longer, held[PROBE][1], columns))
    for name, at in wording_of(test).items():
        rows.append(
            (f"AUROC, held out, “{name}”", held[PROBE][0], held[PROBE][1][list(at)], chosen)
        )
    texts = []
    for at, (_, good, bad, columns) in enumerate(rows):
        good, bad = (_score(x, columns) for x in (good, bad))
        labels = np.repeat([0, 1], [len(good), len(bad)])
        scores = 1 - np.concatenate([good, bad])
        whose = np.arange(len(labels)) if at > 4 else np.tile(np.arange(n), 2)
        low, high = auroc_interval(scores, labels, whose, seed)
        texts.append(f"{float(auroc(scores, labels)):.3f} [{float(low):.3f}, {float(high):.3f}]")
        p.append(mannwhitneyu(good, bad).pvalue)
    q = corrected(np.array(p))
    published = {
        0: ("up to 10.0 points above earlier detectors", "several models, from the abstract")
    }
    for at, (what, good, bad, _) in enumerate(rows):
        note = f"{len(good)} benign, {len(bad)} attacked; q = {q[at]:.2g}"
        figures.append(Figure(what, texts[at], *published.get(at, (None, "")), note=note))
    sets = [
        np.unravel_index(rng.choice(total, len(heads), replace=False), benign.shape[1:])
        for _ in range(DRAWS)
    ]
    for what, good in (
        ("held out", held[PROBE][0]),
        ("against benign texts of two sentences", longer),
    ):
        draws = []
        for columns in sets:
            scores = np.concatenate([_score(x, columns) for x in (good, held[PROBE][1])])
            draws.append(float(auroc(1 - scores, np.repeat([0, 1], n))))
        note = f"{DRAWS} draws from {min(draws):.3f} to {max(draws):.3f}"
        figures.append(
            Figure(f"AUROC, {what}, as many random heads", float(np.mean(draws)), note=note)
        )
    middle = (_score(benign, chosen).mean() + _score(attacked, chosen).mean()) / 2
    for what, x in (("false alarms", held[PROBE][0]), ("attacks caught", held[PROBE][1])):
        share = 100 * float((_score(x, chosen) <= middle).mean())
        figures.append(
            Figure(f"{what} at the midpoint threshold (%)", share, note="texts held out")
        )
    return figures


def _focus(model: hl.Model, instruction: str, texts: list[str] | tuple[str, ...]) -> np.ndarray:
    return focus(model, [instruction_prompt(model, instruction, text) for text in texts])


def _columns(heads: tuple[hl.Head, ...]) -> tuple[list[int], list[int]]:
    return [head.layer for head in heads], [head.head for head in heads]


def _score(scores: np.ndarray, columns: tuple) -> np.ndarray:
    return np.nanmean(scores[:, columns[0], columns[1]].reshape(len(scores), -1), 1)


if __name__ == "__main__":
    main(run, __doc__)
