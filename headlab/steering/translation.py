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
from jaxtyping import Float
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
    chosen = parse_heads(heads, model.spec)
    values, plain, told = [], [], []
    for at, item in enumerate(items):
        answer = model.tokenizer(item.answer, add_special_tokens=False)["input_ids"]
        clean, start = _with_answer(model, item.prompt, answer)
        corrupted, begun = _with_answer(model, changed[at], answer)
        z = _kept(model, clean, start, sorted({head.layer for head in chosen}))
        tell(f"translation {at + 1} of {len(items)}")
        # One by one, so that nothing before the answer is computed again for each head.
        sweep = Sweep(model, [corrupted], metrics.loss(start=begun))
        values.append(sweep.run([_restored(head, z[head.layer], begun) for head in chosen]))
        plain.append(sweep.clean)
        told.append(Sweep(model, [clean], metrics.loss(start=start)).clean)
    found, baseline, whole = -np.hstack(values), -np.hstack(plain), -np.hstack(told)
    keys = [{"layer": head.layer, "head": head.head, "site": "z"} for head in chosen]
    about = {
        "measure": f"{subtask} restored (after Lasnier et al. 2026)",
        "metric": "log-probability of the answer, nats per token",
        "seed": seed,
    }
    return effects_of(keys, found, baseline, whole, None, about, seed)


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


def _with_answer(model: Model, prompt: str, answer: Sequence[int]) -> tuple[list[int], int]:
    """A prompt with its answer behind it, and where that begins."""
    ids = model.tokens(prompt)[0].tolist()
    return [*ids, *answer], len(ids)


def _kept(
    model: Model, ids: Sequence[int], start: int, layers: list[int]
) -> dict[int, Float[Tensor, "1 position head d_value"]]:
    """z at the positions that predict the answer, by layer."""
    places = list(range(start - 1, len(ids) - 1))
    with model.plain():
        kept = keep.tensors("z", layers=layers, positions=places)
        trace = model.trace(list(ids), keep=[kept], logits="none")
    return {layer: trace.tensor("z", layer) for layer in layers}


def _restored(head: Head, z: Float[Tensor, "1 position head d_value"], start: int) -> Edit:
    """z of a head put in at the positions that predict the answer."""
    own, n = z[:, :, [head.head]], z.shape[1]

    def put(x: Tensor, where: Where) -> Tensor:
        at = (where.positions - (start - 1)).clamp(0, n - 1)
        return own[0].to(x)[at]

    return apply((head,), put, "z", positions=range(start - 1, start - 1 + n))
