"""Heads over training: the same measurement, on the same tokens, at checkpoint after checkpoint (Tigges et al. 2024).

    table = over_checkpoints(
        lambda revision: hl.load("EleutherAI/pythia-160m", revision=revision),
        [f"step{2**n}" for n in range(18)],
        lambda model, ids: {"ablation": hl.causal.ablate_each(model, ids, metric).map()},
        prompts,
        circuit=lambda model, ids: Circuit.of_heads(model, …).top(20),
    )

Tigges et al. show scores of the heads in each checkpoint's circuit only. A curve drawn so can fall to nothing because a
head left the circuit while its score stayed, so the table has both: ``score`` of every head, and ``masked`` to the
circuit. Their checkpoints are Pythia's 154 (this, and which tasks they run, is from memory, not checked).
"""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Int
from torch import Tensor

from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.head_names import heads_of
from headlab.errors import PlanError, PromptError
from headlab.shards import Arrays, Shards, forget

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model
    from headlab.prompts import Prompt

#: ``measure(model, ids)`` gives scores [layer, head] by name.
Measure: TypeAlias = "Callable[[Model, Int[Tensor, 'prompt position']], Mapping[str, Any]]"
#: ``find(model, ids)`` gives the heads of this checkpoint's circuit, by any names.
Find: TypeAlias = (
    "Callable[[Model, Int[Tensor, 'prompt position']], Circuit | Collection[Any] | str]"
)

_STEP = re.compile(r"(\d+)(?!.*\d)")


def over_checkpoints(
    load: Callable[[str], Model],
    revisions: Sequence[str],
    measure: Measure,
    prompts: Prompt,
    *,
    circuit: Find | None = None,
    name: str = "",
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Measure heads at every checkpoint of a model.

    One checkpoint is held at a time. Text is turned into tokens by each checkpoint's own tokenizer, which must agree.

    Args:
        load: Loads one checkpoint.
        revisions: The checkpoints, as ``load`` takes them; their last number is the ``step``.
        measure: Gives scores [layer, head] by name, from a model and token ids [prompt, position]; NaN where a head
            has none.
        prompts: The prompts.
        circuit: Gives the heads of the checkpoint's own circuit.
        name: Says what is measured, model and settings included, where ``out`` is given: finished checkpoints are found
            again under it.
        out: Folder for finished checkpoints, so that a killed run resumes, without loading them again.
        tell: Told how far it is.

    Returns:
        One row per checkpoint, measure, layer and head: ``revision``, ``step`` (NaN where there is no number),
        ``measure``, ``layer``, ``head``, ``score``; with a circuit also ``in_circuit`` and ``masked``, the score where
        the head is in the circuit and NaN elsewhere.

    Raises:
        HeadError: The circuit names a head that the model does not have.
        PlanError: No or twice the same revision, ``out`` without a name, or scores that are not [layer, head].
        PromptError: Checkpoints turn a text into different tokens.
    """
    import pandas as pd

    names = [str(revision) for revision in revisions]
    if not names or len(set(names)) < len(names):
        raise PlanError("revisions= must be at least one checkpoint, each named once")
    remember = forget
    if out is not None:
        if not name:
            raise PlanError("out= needs name=, which says what is measured, to find it again")
        given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        settings = {"name": name, "prompts": given, "circuit": circuit is not None}
        remember = Shards(Path(out), settings).remember
    parts, first = [], None
    for at, revision in enumerate(names):

        def compute(revision: str = revision) -> Arrays:
            return _checkpoint(load(revision), revision, measure, prompts, circuit)

        arrays = remember(_key(revision), compute)
        first = arrays["ids"] if first is None else first
        if not np.array_equal(first, arrays["ids"]):
            raise PromptError(
                f"checkpoint {revision!r} turns the prompts into other tokens than {names[0]!r} does, so their scores "
                "cannot be compared; pass token ids"
            )
        parts.append(_rows(revision, arrays))
        gc.collect()  # a model's modules refer to each other, so it goes only now
        tell(f"{at + 1} of {len(names)} checkpoints: {revision}")
    return pd.concat(parts, ignore_index=True)


def _checkpoint(
    model: Model, revision: str, measure: Measure, prompts: Prompt, find: Find | None
) -> Arrays:
    ids = model.tokens(prompts)
    n_heads = [layer.n_heads for layer in model.spec.layers]
    shape = (len(n_heads), max(n_heads))
    arrays = {"ids": ids.cpu().numpy(), "n_heads": np.array(n_heads)}
    measured = measure(model, ids)
    if not isinstance(measured, Mapping) or not measured:
        raise PlanError(
            f"measure must give scores [layer, head] by name, as {{'effect': …}}, not {measured!r:.60}"
        )
    for name, scores in measured.items():
        if isinstance(scores, Tensor):
            scores = scores.detach().float().cpu()
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != shape:
            raise PlanError(
                f"measure gave {name!r} of shape {list(values.shape)} at {revision!r}; it must be [layer, head], "
                f"{list(shape)}"
            )
        arrays[f"score {name}"] = values
    if find is not None:
        found = find(model, ids)
        inside = np.zeros(shape, dtype=bool)
        for layer, head in heads_of(found, model):
            inside[layer, head] = True
        arrays["circuit"] = inside
    return arrays


def _rows(revision: str, arrays: Arrays) -> pd.DataFrame:
    import pandas as pd

    layers = np.arange(len(arrays["n_heads"]))
    exists = np.arange(arrays["n_heads"].max()) < arrays["n_heads"][:, None]
    layer, head = np.nonzero(exists)
    number = _STEP.search(revision)
    parts = []
    for key, scores in arrays.items():
        if not key.startswith("score "):
            continue
        columns: dict[str, Any] = {
            "revision": revision,
            "step": float(number[1]) if number else np.nan,
            "measure": key.removeprefix("score "),
            "layer": layers[layer],
            "head": head,
            "score": scores[exists],
        }
        if "circuit" in arrays:
            columns["in_circuit"] = arrays["circuit"][exists]
            columns["masked"] = np.where(columns["in_circuit"], columns["score"], np.nan)
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _key(revision: str) -> str:
    """A file name of a revision's own, whatever characters it has."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", revision)[:60]
    return f"{readable}-{hashlib.sha256(revision.encode()).hexdigest()[:8]}"


__all__ = ["Find", "Measure", "over_checkpoints"]
