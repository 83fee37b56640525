"""How heads attend on repeated random tokens: one measurement that induction and duplicate-token heads share.

Prompts are [BOS, x, x] with x of 50 distinct random tokens, and their controls [BOS, x, y]: the same
positions hold tokens that never occurred, so whatever a head owes to position alone it keeps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Int
from torch import Tensor

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Look, Measurement, Probing
from headlab.tasks import RepeatedTokens, plain_tokens, repeated_tokens

if TYPE_CHECKING:
    from headlab.model import Model

#: Tokens of x.
N = 50
_BATCH = 10


def repeated(probing: Probing) -> RepeatedTokens:
    """The probe's prompts.

    Raises:
        PromptError: The model's vocabulary or context is too small.
    """
    model = probing.model
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    n = min(N, (probing.length(2 * N + 1) - 1) // 2, len(plain) // 2)
    if n < 8:
        raise PromptError(
            f"{model.name} cannot hold 8 distinct tokens twice, so repeats cannot be probed"
        )
    return repeated_tokens(plain, probing.n_prompts, n, probing.seed, probing.bos)


def measure_repeats(probing: Probing, kind: Literal["induction", "duplicate"]) -> Measurement:
    """Mean attention on the targets of the second copy, and the same on the controls.

    A duplicate-token head attends to the earlier occurrence of the token, n tokens back; an induction head to the
    token after it, n − 1 tokens back.
    """
    prompts = repeated(probing)
    values: dict[str, list[np.ndarray]] = {name: [] for name in ("repeated", "control")}
    for name, parts in values.items():
        ids = getattr(prompts, name)
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            probing.tell(f"{name} prompts {start + 1}–{start + len(batch)} of {len(ids)}")
            part = probing.part(
                f"repeats-{name}-{start:03d}",
                batch.numpy(),
                partial(target_masses, probing.model, batch, prompts),
            )
            parts.append(part[kind])
    rows, control = (np.concatenate(parts) for parts in values.values())
    queries = prompts.second_copy.numpy()
    looks = tuple(
        Look(ids.numpy(), queries, mass)
        for ids, mass in zip(prompts.repeated[:2], rows[:2], strict=True)
    )
    means, null = rows.mean(-1, dtype=np.float64), control.mean(-1, dtype=np.float64)
    distance = prompts.n - (kind == "induction")
    notes = {}
    # A visible key never gets exactly nothing from every row of every head: such a layer cannot see the target,
    # be it for a sliding window or for attention in chunks.
    blind = (rows == 0).all((0, 2, 3)) & (control == 0).all((0, 2, 3))
    for at in np.flatnonzero(blind):
        means[:, at] = null[:, at] = np.nan
        for head in range(means.shape[2]):
            notes[int(at), head] = f"out of window: the target lies {distance} tokens back"
    return Measurement(means, null, looks, notes)


def target_masses(
    model: Model, ids: Int[Tensor, "prompt position"], prompts: RepeatedTokens
) -> Arrays:
    """Attention of the second half's rows to both kinds of target, each [prompt, layer, head, query]."""
    n = prompts.n
    plan = keep.statistics("lag_mass", bins=(n - 1, n, n + 1), queries=prompts.second_copy.tolist())
    mass = model.trace(ids, keep=plan, logits="none").statistic("lag_mass").float().cpu().numpy()
    return {"induction": mass[..., 0], "duplicate": mass[..., 1]}
