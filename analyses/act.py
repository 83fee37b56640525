"""ACT (Yu et al. 2024): where attention sinks lie beyond the first token, and what taking weight off them does.

Published: the gain that the repository states and the numbers of heads its code keeps, on 7B models and larger; the
code has no step that chooses heads. Ours: first-token accuracy and the answer's log-probability on 5-shot antonyms.
Heads are chosen on some questions and measured on questions with other answers, against random heads of the same
layers. Only heads with sinks beyond the first token are tried, since the others stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from common import Figure, main

import headlab as hl
from headlab.errors import HeadlabError, PlanError
from headlab.steering import ACT, answer_log_probability, evaluate
from headlab.steering.behaviours.icl import zero_shot

TRIED = 24


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Count sinks, choose heads, and measure on other questions."""
    n = max(6, n_prompts)
    try:
        whole = zero_shot("antonym", 4 * n, seed, n_shots=5)
        fit, test = _split(whole, n, seed)
        share = _sink_share(model, [case.prompt for case in test.cases[:8]])
    except HeadlabError as error:
        return [Figure("accuracy", None, note=f"not measurable: {error}")]
    chosen = ACT().chosen(model)
    with_sinks = [head for head in chosen if share[head.layer, head.head] > 0]
    figures = [
        Figure("heads with a sink beyond the first token (%)", 100 * float((share > 0).mean()),
               note="in any of 8 prompts; mean received above 0.1"),
    ]  # fmt: skip
    log = replace(
        test, measure=answer_log_probability(), about="log-probability of the answer, nats"
    )
    for behaviour in (test, log):
        figures += _figures(model, ACT(), behaviour, "default heads", seed)
    order = sorted(with_sinks, key=lambda head: -share[head.layer, head.head])[:TRIED]
    kept = "184 of 1,024 (classification), 74 (multiple choice)"
    try:
        if not order:
            raise PlanError("no head has a sink beyond the first token")
        fitted = ACT.fit(
            model, replace(fit, measure=answer_log_probability()), heads=order, seed=seed
        )
    except PlanError as error:
        return [*figures, Figure("heads kept", 0.0, kept, "Llama-2-7B", note=str(error))]
    figures.append(
        Figure("heads kept", float(len(fitted.heads)), kept, "Llama-2-7B",
               note=f"of the {len(order)} with most sinks: {', '.join(map(str, fitted.heads))[:80]}")
    )  # fmt: skip
    for behaviour in (test, log):
        figures += _figures(model, fitted, behaviour, "chosen heads", seed, controls=2)
    return figures


def _figures(
    model: hl.Model, method: ACT, behaviour: object, whose: str, seed: int, controls: int = 0
) -> list[Figure]:
    found = evaluate(
        model,
        method,
        behaviour,
        strengths=(method.beta,),
        n_controls=controls,
        n_texts=4,
        seed=seed,
    )
    row = found.frame[found.frame["kind"] == "method"].iloc[0]
    base = found.frame.iloc[0]
    accuracy = behaviour.about.startswith(("first", "share", "accuracy"))
    what = "accuracy" if accuracy else behaviour.about
    note = (
        f"unsteered {base['value']:.3g} [{base['value_low']:.3g}, {base['value_high']:.3g}], {int(base['n'])} "
        f"questions; q = {row['q_value']:.2g}; loss on plain text {row['loss_change']:+.3f} nats per token"
    )
    published = ("+0.073 at best, average over tasks", "Llama-30B") if accuracy else (None, "")
    figures = [
        Figure(f"change of {what}, β = {method.beta:g}, {whose}",
               f"{row['effect']:.3g} [{row['effect_low']:.3g}, {row['effect_high']:.3g}]",
               *published, note=note)
    ]  # fmt: skip
    if not np.isnan(row["excess"]):
        figures.append(
            Figure(f"the same over random heads ({what})",
                   f"{row['excess']:.3g} [{row['excess_low']:.3g}, {row['excess_high']:.3g}]",
                   note=f"{controls} draws; q = {row['excess_q']:.2g}")
        )  # fmt: skip
    return figures


def _split(behaviour: object, n: int, seed: int) -> tuple:
    """Cases to choose heads on and cases to measure, with different answers."""
    answers = sorted({case.answer for case in behaviour.cases})
    rng = np.random.default_rng(seed)
    first = set(rng.permutation(answers)[: len(answers) // 2].tolist())
    one = tuple(case for case in behaviour.cases if case.answer in first)[:n]
    two = tuple(case for case in behaviour.cases if case.answer not in first)[: 2 * n]
    return replace(behaviour, cases=one), replace(behaviour, cases=two)


def _sink_share(model: hl.Model, prompts: list) -> np.ndarray:
    """Share of keys that are sinks, [layer, head]."""
    found = [ACT().sinks(model, prompt)[0].double().mean(-1) for prompt in prompts]
    return torch.stack(found).mean(0).cpu().numpy()


if __name__ == "__main__":
    main(run, __doc__)
