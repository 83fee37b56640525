"""PASTA (Zhang et al. 2023): does weighing down unmarked text in profiled heads make the model follow marked text?

Heads are profiled on one half of the cases (every head steered alone) and measured on the other, against the unsteered
model, as many random heads of the same layers, and all heads. The task is ours: two statements contradict each other,
and one is marked; a case counts as right where the marked value's first token gets the larger logit. The paper's tasks
are others (JSON formatting, pronouns, biographies, counterfactuals), its headline is an average over them, and its
heads belong to its model.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from common import Figure, is_model, main

import headlab as hl
from headlab.errors import PromptError
from headlab.steering import Evaluation, Pasta, evaluate, find_spans, profile
from headlab.steering.behaviours.marked_context import marked_context

#: The ten best heads of LLaMA-7B on the JSON task, as shipped (QingruZhang/PASTA).
TOP_LLAMA = "L3H17 L3H6 L3H12 L5H24 L0H17 L7H13 L11H16 L8H28 L8H24 L4H3"
CONTROLS, TEXTS, MOST = 3, 4, 18


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Profile, choose, and measure on other cases."""
    each = min(n_prompts, MOST)
    whole = marked_context(2 * each, seed=seed)
    chosen_on, held_out = (replace(whole, cases=whole.cases[half::2]) for half in (0, 1))
    try:
        for case in whole.cases:
            find_spans(model, model.tokens(case.prompt)[0].tolist(), case.spans)
    except PromptError as error:
        return [Figure("PASTA", None, note=f"not measurable: {error}")]
    found = profile(model, Pasta(["-"]), chosen_on, seed=seed)
    n_heads = len(found.frame)
    figures = [
        Figure(
            "best ten heads when steered alone",
            ", ".join(map(str, found.top(min(10, n_heads)))),
            ", ".join(TOP_LLAMA.split()),
            "LLaMA-7B (JSON formatting)",
            is_model(model, "huggyllama/llama-7b"),
            f"ours on {each} cases; {int((found.frame['q_value'] <= 0.05).sum())} of {n_heads} heads at q ≤ 0.05",
        )
    ]
    options = {"n_texts": TEXTS, "seed": seed}
    top = Pasta(["-"], found.top(max(1, n_heads // 10)))
    figures += _effects(
        "the best tenth of heads", evaluate(model, top, held_out, n_controls=CONTROLS, **options)
    )
    figures += _effects(
        "all heads", evaluate(model, top.on("*.*"), held_out, n_controls=0, **options)
    )
    return figures


def _effects(which: str, found: Evaluation) -> list[Figure]:
    right = 100 * (found.values > 0).mean(1)
    figures = []
    for at, row in enumerate(found.frame.itertuples()):
        if row.kind == "unsteered":
            if which != "all heads":
                figures.append(
                    Figure(
                        "marked statement followed, unsteered (% of cases)",
                        right[at],
                        note=f"{row.n} cases",
                    )
                )
            continue
        who = (
            f"{row.n} cases; {which}"
            if row.kind == "method"
            else "as many random heads of the same layers"
        )
        name = f"{which if row.kind == 'method' else 'random heads'}, α {row.strength:g}"
        gained = right[at] - right[0]
        figures.append(
            Figure(
                f"rise of cases that follow the marked statement, {name} (points)",
                gained,
                22.0
                if row.kind == "method" and which != "all heads" and np.isclose(row.strength, 0.01)
                else None,
                "LLaMA-7B, average accuracy of the paper's tasks" if row.kind == "method" else "",
                note=f"{who}; logit difference {row.effect:+.2f} [{row.effect_low:.2f}, {row.effect_high:.2f}] nats, "
                f"q {row.q_value:.2g}; loss on plain text {row.loss_change:+.3f} nats",
            )
        )
        if row.kind == "method" and np.isfinite(row.excess):
            figures.append(
                Figure(
                    f"rise of the logit difference beyond random heads, {name} (nats)",
                    row.excess,
                    note=f"[{row.excess_low:.2f}, {row.excess_high:.2f}], q {row.excess_q:.2g}",
                )
            )
    return figures


if __name__ == "__main__":
    main(run, __doc__)
