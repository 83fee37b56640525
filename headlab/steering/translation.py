"""Translation heads and language heads (after Lasnier et al. 2026, arXiv 2602.04613), by activation patching.

The paper, of which only the abstract and the repository's README were read, splits machine translation into two
subtasks that different heads do: saying the same thing (translation heads) and saying it in the target language
(language heads). Its formulas were not read; those here are ours, and figures need not agree.

Both are scored alike. z of one head at every position that predicts a token of the right translation is taken from the
run on the whole prompt and put into the run on a prompt with one thing changed; the effect is the rise of the
translation's log-probability, nats per token. For language heads the tag of the language is changed; for translation
heads the sentence.

Steering is :class:`~headlab.steering.head_vectors.HeadVectors`: z_h + α (mean over whole prompts − mean over changed
ones), at the last token of a prompt and at every generated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention import Edit, Head, HeadsLike, Where, apply, keep, parse_heads
from headlab.causal import Effects, Sweep, metrics
from headlab.causal.effects import effects_of
from headlab.errors import PlanError
from headlab.steering.head_vectors import HeadVectors

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.tasks import Translation

#: The two things a translation must get right.
Subtask = Literal["meaning", "language"]


def subtask_effects(
    model: Model,
    items: Sequence[Translation],
    subtask: Subtask,
    heads: HeadsLike = "*.*",
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Effects:
    """How much of a subtask each head restores where the prompt gets it wrong.

    Args:
        model: The model.
        items: Translations, from :func:`headlab.tasks.translations`.
        subtask: ``"meaning"``: the prompt has another sentence; ``"language"``: another language's tag.
        heads: Heads to try.
        seed: Seed of the intervals.
        tell: Told, in a few words, what is being done.

    Returns:
        Effects on the log-probability of the right translation, nats per token.

    Raises:
        HeadError: A head does not exist.
        PlanError: There are no items, or no such subtask.
    """
    seed_number(seed)
    changed = _changed(items, subtask)
    answers = [model.tokenizer(i.answer, add_special_tokens=False)["input_ids"] for i in items]
    clean, starts = _with_answers(model, [item.prompt for item in items], answers)
    corrupted, begun = _with_answers(model, changed, answers)
    chosen = parse_heads(heads, model.spec)
    longest = max(map(len, answers))
    values = _kept(model, clean, starts, longest, sorted({head.layer for head in chosen}))
    variants = [[_restored(head, values, begun, longest)] for head in chosen]
    told = -np.asarray(Sweep(model, clean, metrics.loss(start=starts)).clean)
    sweep = Sweep(model, corrupted, metrics.loss(start=begun), tell=tell)
    keys = [{"layer": head.layer, "head": head.head, "site": "z"} for head in chosen]
    about = {
        "measure": f"{subtask} restored (after Lasnier et al. 2026)",
        "metric": "log-probability of the answer, nats per token",
        "seed": seed,
    }
    found = -np.asarray(sweep.run(variants))
    return effects_of(keys, found, -np.asarray(sweep.clean), told, None, about, seed)


def subtask_vectors(
    model: Model,
    items: Sequence[Translation],
    subtask: Subtask,
    heads: HeadsLike,
    *,
    factor: float = 1.0,
) -> HeadVectors:
    """Steering vectors of a subtask: mean z over whole prompts less that over changed ones, at their last tokens.

    Raises:
        HeadError: A head does not exist.
        PlanError: There are no items, or no such subtask.
    """
    changed = _changed(items, subtask)
    prompts = [item.prompt for item in items]
    return HeadVectors.fit(model, prompts, changed, heads, factor=factor)


def _changed(items: Sequence[Translation], subtask: Subtask) -> list[str]:
    if subtask not in ("meaning", "language"):
        raise PlanError(f"subtask={subtask!r:.40} must be 'meaning' or 'language'")
    if not items:
        raise PlanError("a subtask needs translations; make some by headlab.tasks.translations")
    name = "other_sentence" if subtask == "meaning" else "other_language"
    return [getattr(item, name) for item in items]


def _with_answers(
    model: Model, prompts: Sequence[str], answers: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[int]]:
    """Prompts with their answers behind them, and where those begin."""
    rows = [model.tokens(prompt)[0].tolist() for prompt in prompts]
    whole = [[*row, *answer] for row, answer in zip(rows, answers, strict=True)]
    return whole, [len(row) for row in rows]


def _kept(
    model: Model,
    ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    longest: int,
    layers: list[int],
) -> dict[int, Tensor]:
    """z at the positions that predict the answers, per layer [prompt, answer token, head, d_value]."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    with model.plain():
        for row, start in zip(ids, starts, strict=True):
            places = list(range(start - 1, len(row) - 1))
            kept = keep.tensors("z", layers=layers, positions=places)
            trace = model.trace(list(row), keep=[kept], logits="none")
            for layer in layers:
                z = trace.tensor("z", layer)[0].cpu()
                beyond = z.new_zeros(longest - len(z), *z.shape[1:])
                found[layer].append(torch.cat([z, beyond]))
    return {layer: torch.stack(rows) for layer, rows in found.items()}


def _restored(head: Head, values: dict[int, Tensor], starts: Sequence[int], longest: int) -> Edit:
    """z of a head put in at the positions that predict the answer; those before keep what they have."""
    own = values[head.layer][:, :, [head.head]]
    first = torch.tensor(starts) - 1

    def put(z: Tensor, where: Where) -> Tensor:
        positions = where.positions
        at = positions - where.rows_of(first).to(positions.device)[:, None]
        value = where.rows_of(own).to(z)
        index = at.clamp(0, longest - 1)[:, :, None, None].expand(-1, -1, *value.shape[2:])
        return torch.where((at >= 0)[:, :, None, None], value.gather(1, index), z)

    # The positions are only named so that what comes before them is not computed again for each head.
    return apply((head,), put, "z", positions=range(-longest - 1, -1))
