"""Massive values in q and k (Jin et al. 2025): where they are, and what disrupting them costs.

Texts are prose of 128 tokens. Behaviours are log-probabilities of one right token, where the paper has accuracies on
benchmarks of its own, quoted from its project page; so effects can be compared in sign and order only. The controls are
the smallest dimension, the paper's, and one drawn at random, which is ours and the harder one: the smallest dimension
hardly varies, so its mean is nearly itself.
"""

from __future__ import annotations

from common import Figure, is_model, main

import headlab as hl
from headlab.parameters.on_prompts.disruption_effects import disruption
from headlab.parameters.on_prompts.massive_values import massive_values
from headlab.tasks import prose, prose_windows

LLAMA_3, RANGE = "Meta-Llama-3-8B-Instruct", "Llama, Gemma, Qwen"
LENGTH = 128
PLACES = {
    ("massive", "q"): "concentrated dimensions",
    ("massive", "k"): "concentrated dimensions",
    ("massive", "v"): "none",
    ("low frequency", "q"): "low-frequency pairs",
    ("low frequency", "k"): "low-frequency pairs",
    ("matched", "q"): "the same dimensions in q and k",
    ("matched pair", "q"): None,
}
DISRUPTED = {
    "repeated tokens": "passkey 100% → 0–2%",
    "secret word": "passkey 100% → 0–2%",
    "facts": "cities still at 76–88%",
}


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure and disrupt."""
    same = is_model(model, LLAMA_3)
    figures = []
    if model.tokenizer is not None:
        length = min(LENGTH, model.spec.max_context or LENGTH)
        ids = prose_windows(
            model.tokenizer, prose(), max(2, n_prompts // 2), length, seed, model.bos
        )
        found = massive_values(model, ids, seed=seed)
        for row in found.summary(seed).itertuples():
            published = PLACES[row.what, row.site]
            note = f"of {row.n}"
            if row.null == row.null:
                note += f"; {row.null:.2g} by chance, p {row.p_value:.2g}"
            ours = None if row.value != row.value else float(row.value)
            figures.append(Figure(f"{row.what} in {row.site}, share", ours, published, RANGE if published else "",
                                  same and published is not None, note))  # fmt: skip
    effects = disruption(model, n_prompts=n_prompts, seed=seed)
    for row in effects.frame.itertuples():
        published = {
            "largest": DISRUPTED.get(row.behaviour),
            "smallest": "falls by less than 1%",
        }.get(row.which)
        note = f"{row.clean:.3g} → {row.value:.3g} nats, {row.ci_low:.2g} to {row.ci_high:.2g}, q {row.q_value:.2g}"
        if row.which == "largest":
            note += f"; beyond the stronger control {row.beyond_control:.2g}, p {row.control_p:.2g}"
        figures.append(
            Figure(f"{row.behaviour} ({row.kind}), {row.which} dimension set to its mean", float(row.effect),
                   published, RANGE if published else "", same and published is not None, note)
        )  # fmt: skip
    for name in ("repeated tokens", "secret word"):
        if {name, "facts"} <= set(effects.values):
            gap = effects.contrast(name, "facts", seed)
            figures.append(Figure(f"effect of the largest on {name} less that on facts", gap["difference"],
                                  "contextual tasks collapse, parametric ones lose 15–20%", RANGE, same,
                                  f"nats, {gap['ci_low']:.2g} to {gap['ci_high']:.2g}"))  # fmt: skip
    return figures


if __name__ == "__main__":
    main(run, __doc__)
