"""How heads attend on repeated random tokens: one measurement that induction and duplicate-token heads share.

Prompts are [BOS, x, x] with x of 50 distinct random tokens, and their controls [BOS, x, y]: the same
positions hold tokens that never occurred, so whatever a head owes to position alone it keeps.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Look, Measurement, Probing
from headlab.tasks import RepeatedTokens, plain_tokens, repeated_tokens

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
        raise PromptError(f"{model.name} cannot hold 8 distinct tokens twice, so repeats cannot be probed")
    return repeated_tokens(plain, probing.n_prompts, n, probing.seed, probing.bos)


def target_positions(
    prompts: RepeatedTokens, kind: Literal["induction", "duplicate"]
) -> torch.Tensor:
    """Per position, the key an ideal head attends to; −1 where there is none.

    A duplicate-token head attends to the earlier occurrence of the token, n tokens back; an induction head to
    the token after it, n − 1 tokens back.
    """
    targets = torch.full((prompts.repeated.shape[1],), -1)
    queries = prompts.second_copy
    targets[queries] = queries - prompts.n + (kind == "induction")
    return targets


def measure_targets(probing: Probing, kind: Literal["induction", "duplicate"]) -> Measurement:
    """Mean attention on the targets, and the same on the controls."""
    prompts = repeated(probing)
    targets = target_positions(prompts, kind)
    values, null = [], []
    for name, ids, into in (("repeated", prompts.repeated, values), ("control", prompts.control, null)):
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            probing.tell(f"{kind} targets, {name} prompts {start + 1}–{start + len(batch)}")
            key = f"{kind}-{name}-{prompts.n}-{start:03d}"
            part = probing.remember(key, lambda batch=batch: _run(probing, batch, targets))
            into.append(part["mass"])
    rows, control = np.concatenate(values), np.concatenate(null)
    queries = prompts.second_copy.numpy()
    looks = tuple(Look(prompts.repeated[at].numpy(), queries, rows[at]) for at in range(2))
    found = rows.mean(-1, dtype=np.float64), control.mean(-1, dtype=np.float64)
    distance = prompts.n - (kind == "induction")
    notes = {}
    for at, layer in enumerate(probing.model.spec.layers):
        if layer.window is not None and layer.window <= distance:
            found[0][:, at] = found[1][:, at] = np.nan
            for head in range(layer.n_heads):
                notes[at, head] = f"out of window: the target lies {distance} tokens back"
    return Measurement(*found, looks, notes)


def _run(probing: Probing, ids: torch.Tensor, targets: torch.Tensor) -> Arrays:
    trace = probing.model.trace(
        ids, keep=keep.statistics("target_mass", targets=targets), logits="none"
    )
    mass = trace.statistic("target_mass")[..., targets >= 0]
    return {"mass": mass.float().cpu().numpy()}
