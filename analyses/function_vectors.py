"""Function vectors (Todd et al. 2024): how well a vector stands in for the examples of a task.

Accuracy of the answer's first token on questions without examples, for six of headlab's tasks between words: as it is,
with ten examples (the ceiling), and with the task's vector added, beside vectors made alike of random heads and random
directions of the same norm. Heads are those of largest average indirect effect over the tasks; they, the vectors, and
the layer and factor (one choice for all tasks) are found on half of each task's pairs, and the other half is asked
about. The task is the unit of the intervals over tasks, the question that of the others. The paper's tasks are many
more, and its models larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from common import Figure, is_model, main

import headlab as hl
from headlab.attention import matched_sets
from headlab.attention.heads import Head, parse_heads
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval
from headlab.steering import Case, FunctionVector, indirect_effects, top_heads
from headlab.steering.behaviours.icl import training_prompts, zero_shot
from headlab.steering.function_vectors import outputs
from headlab.steering.head_vectors import mean_z
from headlab.steering.learned import head_names, shape_of
from headlab.tasks import icl_prompts, relations, split_pairs

TASKS = ("antonym", "plural", "past_tense", "present_participle", "third_person", "capitalised")
#: Heads summed, draws of each control, prompts with shuffled labels, and factors tried.
HEADS, DRAWS, SHUFFLED, FACTORS = 10, 3, 8, (1.0, 2.0)
GPT_J = "EleutherAI/gpt-j-6b"
#: Accuracy in % over the paper's six main tasks, as remembered: not checked against the paper's text.
PUBLISHED = {"no examples": 5.5, "function vector": 57.5}


@dataclass(frozen=True)
class Task:
    """What was found of a task on its first half, and what is asked of its second."""

    outputs: torch.Tensor  # [layer × head, d_model]: what every head writes, on average
    asked: hl.steering.Behaviour
    tried: hl.steering.Behaviour
    ceiling: hl.steering.Behaviour

    def vector(self, model: hl.Model, heads: Sequence[Head], layer: int, factor: float):
        """The task's vector from some heads."""
        every = {head: at for at, head in enumerate(parse_heads("*.*", model.spec))}
        total = self.outputs[[every[head] for head in heads]].sum(0)
        return FunctionVector(head_names(tuple(heads)), shape_of(model), total, layer, factor)


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """The accuracies."""
    try:
        return _figures(model, seed, n_prompts)
    except HeadlabError as error:
        return [Figure("accuracy", None, note=f"not measurable: {error}")]


def _figures(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    tasks, effects = {}, []
    every = parse_heads("*.*", model.spec)
    for name in TASKS:
        given, shuffled = training_prompts(name, n_prompts, min(SHUFFLED, n_prompts), seed=seed)
        effects.append(indirect_effects(model, given, shuffled, seed=seed))
        means = mean_z(model, [prompt.text for prompt in given], every)
        asked = zero_shot(name, n_prompts, seed)
        half, _ = split_pairs(relations(name)[0], seed)
        questions = icl_prompts(half, half, n_prompts=n_prompts, n_shots=0, seed=seed)
        tried = replace(asked, cases=tuple(Case(one.text, one.answer) for one in questions))
        written = torch.stack(list(outputs(model, every, means)))
        tasks[name] = Task(written, asked, tried, zero_shot(name, n_prompts, seed, 10))
    heads = top_heads(effects, min(HEADS, len(every) // 2))
    layer, factor = _chosen(model, tasks, heads)
    sets, _ = matched_sets(model.spec, heads, DRAWS, seed)
    found: dict[str, list[np.ndarray]] = {}
    for task in tasks.values():
        own = task.vector(model, heads, layer, factor)
        rows = {
            "no examples": [(task.asked, None)],
            "ten examples": [(task.ceiling, None)],
            "function vector": [(task.asked, own)],
            "vector of random heads": [
                (task.asked, task.vector(model, drawn, layer, factor)) for drawn in sets
            ],
            "random direction": [
                (task.asked, own.randomised(seed + draw)) for draw in range(DRAWS)
            ],
        }
        for what, runs in rows.items():
            values = [behaviour.values(model, method) for behaviour, method in runs]
            found.setdefault(what, []).append(100 * np.mean(values, 0))
    return [
        Figure("heads by average indirect effect", head_names(heads), note=_largest(effects)),
        Figure("layer and factor", f"{layer}, {factor:g}", note="chosen on the other half"),
        *_rows(found, tasks, seed, is_model(model, GPT_J)),
    ]


def _chosen(model: hl.Model, tasks: dict[str, Task], heads: Sequence[Head]) -> tuple[int, float]:
    """Layer and factor of the largest mean accuracy on questions about the half that was learned from."""
    n = model.spec.n_layers
    layers = sorted({n * share // 30 for share in (8, 12, 16, 20)})
    tried = {
        (layer, factor): np.mean(
            [
                task.tried.values(model, task.vector(model, heads, layer, factor)).mean()
                for task in tasks.values()
            ]
        )
        for layer in layers
        for factor in FACTORS
    }
    return max(tried, key=lambda key: tried[key])


def _largest(effects: Sequence[hl.Effects]) -> str:
    mean = np.mean([table.frame["effect"].to_numpy() for table in effects], 0)
    at = int(mean.argmax())
    head = Head(*(int(effects[0].frame[name].iloc[at]) for name in ("layer", "head")))
    return f"the largest: {head}, {mean[at]:.3g} in probability"


def _rows(
    found: dict[str, list[np.ndarray]], tasks: dict[str, Task], seed: int, same: bool
) -> list[Figure]:
    figures = []
    for what, values in found.items():
        means = np.array([value.mean() for value in values])
        low, high = bootstrap_interval(means[:, None], seed)
        note = f"mean over {len(means)} tasks, 95 % of tasks {low[0]:.3g}–{high[0]:.3g}"
        published = PUBLISHED.get(what)
        figures.append(
            Figure(
                f"{what}, % right",
                float(means.mean()),
                published,
                "GPT-J" if published is not None else "",
                same and published is not None,
                note if published is None else f"{note}; the paper's tasks are others",
            )
        )
    for at, name in enumerate(tasks):
        parts = []
        for what, values in found.items():
            low, high = bootstrap_interval(values[at][:, None], seed)
            parts.append(f"{what} {values[at].mean():.3g} ({low[0]:.3g}–{high[0]:.3g})")
        gain = found["function vector"][at] - found["no examples"][at]
        note = f"{'; '.join(parts)}; n = {len(gain)}"
        figures.append(Figure(f"{name}: gain of the vector, points", float(gain.mean()), note=note))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
