"""One instance of every method of steering for a tiny model; its prompts are token ids 5 to 96."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import headlab as hl
from headlab.steering import (
    ACT,
    FocusDirections,
    FoundInTheMiddle,
    FunctionVector,
    HeadVectors,
    JuICE,
    JuNE,
    KVBudget,
    Method,
    Pasta,
    SinkRemoval,
    SplitSoftmax,
    TaskVectors,
    ValueEdit,
)
from headlab.steering.learned import shape_of

HEADS = "0.1, 1.0, 1.2"
#: Tokens that every prompt has at these positions: what methods that mark text mark.
MARKED = (2, 4)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def function_vector(model: hl.Model) -> Method:
    return FunctionVector(HEADS, shape_of(model), noise(model.spec.d_model), 0, factor=4.0)


def head_vectors(model: hl.Model) -> Method:
    return HeadVectors(HEADS, shape_of(model), noise(3, model.spec.layers[0].d_value), factor=0.8)


def task_vectors(model: hl.Model) -> Method:
    layers, heads, _, width = shape_of(model)
    return TaskVectors(
        "*.*", shape_of(model), noise(layers, heads), 3 * noise(layers, heads, width, seed=1)
    )


def value_edit(model: hl.Model) -> Method:
    values = noise(3, model.spec.layers[0].d_value)
    return ValueEdit(HEADS, shape_of(model), values, [MARKED], factor=2.0)


def focus(model: hl.Model) -> Method:
    directions = 3 * noise(3, model.spec.d_head)
    return FocusDirections(HEADS, shape_of(model), directions, HEADS, factor=1.0)


#: Makes a method for a model, by name.
MADE: dict[str, Callable[[Any], Method]] = {
    "pasta": lambda model: Pasta([MARKED], HEADS, alpha=0.05),
    "split_softmax": lambda model: SplitSoftmax([MARKED], HEADS, k=0.4),
    "sink_removal": lambda model: SinkRemoval(HEADS, p=0.1, sinks=2),
    "act": lambda model: ACT(HEADS, beta=0.0, threshold=0.15),
    "found_in_the_middle": lambda model: FoundInTheMiddle(
        [(1, 3), (3, 6)], HEADS, temperature=0.01, dummy=(40, 41)
    ),
    "focus": focus,
    "kv_budget": lambda model: KVBudget("0.1", sink=1, recent=3),
    "function_vector": function_vector,
    "head_vectors": head_vectors,
    "task_vectors": task_vectors,
    "value_edit": value_edit,
    "june": lambda model: JuNE("0.1", "1.2", a_l=2.0),
    "juice": lambda model: JuICE("0.1", "1.2", a_l=2.0),
}
