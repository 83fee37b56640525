"""Focus directions (Zhu et al. 2025): do directions of contextual heads make answers follow the relevant document?

Directions are learned on one half of the questions and measured on the other: attention mass on the gold document, and
the log-probability of the right answer, against the unsteered model, as many random heads with the directions learned
for them, and random directions of the same norms. Contextual heads are those with most mass on the gold documents of
the first half. The paper's figures (HELMET, Llama-3.2-3B, Qwen2.5-7B, Ministral-8B) could not be read; it says that a
positive factor helps and that a large one hurts. It trains on hundreds of prompts of 20 passages with answers of the
model's own; ours are few and short, with the right answers given, so that directions stay shorter and factors differ.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.errors import PromptError
from headlab.statistics import bootstrap_interval
from headlab.steering import FocusDirections, compare_sides, evaluate, gold_mass, steer
from headlab.steering.behaviours.documents import documents
from headlab.tasks import document_prompt, document_questions

TOP, DOCUMENTS = 20, 4
FACTORS = (0.3, 1.0, 3.0)
CONTROLS, TEXTS = 2, 4
LR = 3e-3


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Learn on one half of the questions, measure on the other."""
    asked = document_questions(2 * max(2, n_prompts), DOCUMENTS, seed)
    fit_on, held_out = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    try:
        train, held = (
            [document_prompt(model.tokenizer, one, response=one.answer) for one in half]
            for half in (fit_on, held_out)
        )
    except PromptError as error:
        return [Figure("focus directions", None, note=f"not measurable: {error}")]
    heads = hl.parse_heads("*.*", model.spec)
    mass = gold_mass(model, train, heads).mean(0)
    best = np.argsort(-mass, kind="stable")[: min(TOP, len(heads) // 3)]
    top = tuple(heads[at] for at in sorted(best))
    learned = FocusDirections.fit(model, train, heads, lr=LR, factor=1.0, seed=seed)
    focus = learned.on(top)
    before = gold_mass(model, held, top).mean(1)
    with steer(model, focus):
        after = gold_mass(model, held, top).mean(1)
    low, high = bootstrap_interval((after - before)[:, None], seed)
    direction = learned.directions[best[0]]
    sides = compare_sides(model, list(held[0].ids), top, direction)
    figures = [
        Figure(
            "contextual heads",
            ", ".join(str(heads[at]) for at in best[:5]),
            note=f"first 5 of {len(top)}",
        ),
        Figure(
            f"rise of mass on held-out gold documents, {len(top)} heads, factor 1",
            float((after - before).mean()),
            note=f"[{low[0]:.3f}, {high[0]:.3f}] from {before.mean():.3f}, {len(held)} questions",
        ),
        Figure(
            "largest change of a logit by a direction on every key",
            sides["key"],
            0.0,
            "any model: it cancels in the softmax",
            note=f"rounding; the same direction on every query: {sides['query']:.3g}",
        ),
    ]
    behaviour = documents(model, asked=held_out, marked="gold", measure="log_probability")
    found = evaluate(
        model, focus, behaviour, strengths=FACTORS, n_controls=CONTROLS, n_texts=TEXTS, seed=seed
    )
    figures.append(
        Figure(
            "log-probability of the right answer, unsteered (nats per token)",
            found.row("unsteered")["value"],
        )
    )
    for factor in FACTORS:
        row = found.row("method", factor)
        controls = {
            kind: found.row(kind, factor)["effect"]
            for kind in ("random_heads", "random_direction")
            if kind in set(found.frame["kind"])
        }
        said = ", ".join(
            f"{kind.replace('_', ' ')} {value:+.3f}" for kind, value in controls.items()
        )
        figures.append(
            Figure(
                f"change of the answer's log-probability, factor {factor:g} (nats per token)",
                row["effect"],
                "positive factors help, large ones hurt" if factor == FACTORS[0] else None,
                "three models of 3 to 8 billion parameters" if factor == FACTORS[0] else "",
                note=f"[{row['effect_low']:.3f}, {row['effect_high']:.3f}], q {row['q_value']:.2g}; {said}; beyond "
                f"both {row['excess']:+.3f} [{row['excess_low']:.3f}, {row['excess_high']:.3f}], "
                f"q {row['excess_q']:.2g}; "
                f"loss on plain text {row['loss_change']:+.3f} nats",
            )
        )
    return figures


if __name__ == "__main__":
    main(run, __doc__)
