"""Split-softmax (Li et al. 2024): does more attention to an instruction make it win over an order in the data?

The paper keeps chat models to their system prompt over many turns; neither its text nor its numbers could be read, and
its measure (drift of a persona) is another. Ours: an instruction asks for one word, the data for another, and the
number is the difference of the two words' logits. The control raises the attention to the first sentence of the data
instead, as long a text roughly. All heads are steered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.steering import SplitSoftmax, evaluate, find_spans
from headlab.steering.behaviours.injections import resisting

STRENGTHS = (0.9, 0.7, 0.5)


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Sweep k with the instruction marked and with the data marked."""
    try:
        behaviour = resisting(model, min(30, max(2, n_prompts)), seed)
        method = SplitSoftmax(spans=["x"])
        found = evaluate(
            model, method, behaviour, strengths=STRENGTHS, n_controls=0, n_texts=4, seed=seed
        )
        other = replace(behaviour, cases=tuple(_elsewhere(model, case) for case in behaviour.cases))
        controls = [
            other.values(model, method.at(k)) - found.values[0] for k in STRENGTHS
        ]  # fmt: skip
    except HeadlabError as error:
        return [Figure("logit difference", None, note=f"not measurable: {error}")]
    effects = found.values[1:] - found.values[0]
    excess = effects - np.stack(controls)
    q = corrected(_two_sided(np.concatenate([effects, controls, excess]), seed))
    n, k = len(behaviour.cases), len(STRENGTHS)
    figures = [
        _share_error(model, behaviour.cases[0], seed),
        Figure(f"{behaviour.about}, unsteered", _text(found.values[0], seed), note=f"{n} prompts"),
    ]
    for at, strength in enumerate(STRENGTHS):
        loss = found.frame["loss_change"].to_numpy()[1 + at]
        rows = (
            ("instruction marked", effects[at], q[at]),
            ("data marked (control)", controls[at], q[k + at]),
            ("instruction over data", excess[at], q[2 * k + at]),
        )
        for what, values, corrected_p in rows:
            note = f"q = {corrected_p:.2g}"
            if what == "instruction marked":
                note += f"; loss on plain text {loss:+.3f} nats per token"
            figures.append(
                Figure(f"change at k = {strength}, {what}", _text(values, seed), note=note)
            )
    return figures


def _share_error(model: hl.Model, case: object, seed: int) -> Figure:
    """How far the share of the marked keys is from π^k, over all rows of one head."""
    ids = [list(case.prompt)]
    keep = hl.keep.statistics("segment_mass", layers=[0], segments={"marked": case.spans[0]})
    before = model.trace(ids, keep).statistic("segment_mass", "marked").double()
    with hl.steer(model, SplitSoftmax(spans=[case.spans[0]], heads="0.*", k=0.5)):
        after = model.trace(ids, keep).statistic("segment_mass", "marked").double()
    error = float((after - before**0.5).abs().nan_to_num(0).max())
    return Figure(
        "largest error of the raised share π^k, layer 0", error, 0.0, "the formula, any model"
    )


def _elsewhere(model: hl.Model, case: object) -> object:
    """The same case with the first sentence of its data marked."""
    text = model.text(case.prompt)
    first = text[text.index("Data: ") + 6 :] if "Data: " in text else text[text.index(":") + 1 :]
    sentence = first.split(".")[0].strip()
    return replace(case, spans=(find_spans(model, case.prompt, [sentence])[0],))


def _two_sided(table: np.ndarray, seed: int) -> np.ndarray:
    return np.minimum(1, 2 * np.minimum(sign_flip_p(table.T, seed), sign_flip_p(-table.T, seed)))


def _text(values: np.ndarray, seed: int) -> str:
    low, high = bootstrap_interval(values[:, None], seed)
    return f"{values.mean():.3g} [{low[0]:.3g}, {high[0]:.3g}]"


if __name__ == "__main__":
    main(run, __doc__)
