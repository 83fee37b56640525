"""Copying heads (Olsson et al. 2022, p. 60): a head's output raises the logits of the tokens it attends to.

On 25 distinct random tokens behind a BOS token: the head's output z·W_O goes straight to the unembedding, each
row's logits of the sample's own tokens are taken minus their mean and cut at 0 ("raise"), and

    score = mean over rows of Σ_k A[q, k] · raise_q(x_k) / Σ_t raise_q(t).

The BOS token is left out on both sides, values and weights, since a head that rests on it copies nothing. The
final norm is applied to the head's output alone, which only scales each row. Olsson et al. rescale a ratio of
0..0.5 to −1..1 and do not say how the norm is handled; the score here is the plain ratio, chance being 1 / 25.
The null is in closed form: the mean over all other tokens of the sample in place of the attended one.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.roles.base import Arrays, Look, Measurement, Probing, Role, register
from headlab.roles.scores import RoleInfo
from headlab.tasks import plain_tokens, random_tokens

#: Tokens of a sample.
N = 25


class Copying(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="copying",
        title="Copying (by output)",
        question="Does the head raise the logits of the tokens it attends to?",
        statistic="share of the raise of the sample's logits that goes to the attended tokens",
        null="the same share for the other tokens of the sample in place of the attended one",
        decision="score ≥ 0.08 and at least 0.04 above the null (twice chance), at q ≤ the false-discovery rate",
        reference="Olsson et al. 2022, p. 60; handling of the norm and of BOS is headlab's",
        min_score=0.08,
        min_effect=0.04,
        row_convention="the token's own row",
    )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        model = probing.model
        plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
        n = min(N, len(plain), probing.length(N + 1) - 1)
        drawn = random_tokens(plain, probing.n_prompts, n, probing.seed + 1)
        ids = torch.from_numpy(drawn)
        start = 0 if probing.bos is None else 1
        if probing.bos is not None:
            ids = torch.cat([torch.full((len(ids), 1), probing.bos), ids], 1)
        probing.tell("copying of random tokens")
        found = probing.part("copying", ids.numpy(), lambda: _run(probing, ids, start))
        values, null = found["values"], found["null"]
        queries = np.arange(start, ids.shape[1])
        looks = tuple(Look(ids[at].numpy(), queries, values[at]) for at in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no rows is NaN, as meant
            means = np.nanmean(values, -1), np.nanmean(null, -1)
        note = "not measurable: the head's output raises no token of the sample"
        silent = np.isnan(means[0]).all(0)
        notes = {(int(at), int(head)): note for at, head in np.argwhere(silent)}
        return Measurement(*means, looks, notes)


@torch.no_grad()
def _run(probing: Probing, ids: Int[Tensor, "prompt position"], start: int) -> Arrays:
    model = probing.model
    plan: list[keep.Keep] = [
        keep.tensors("pattern"),
        keep.statistics("segment_z", segments={"sample": (start, ids.shape[1])}),
    ]
    trace = model.trace(ids, keep=plan, logits="none")
    z = trace.statistic("segment_z", "sample")
    sample = ids[:, start:].to(z.device)
    values, null = [], []
    for layer in range(model.spec.n_layers):
        pattern = trace.tensor("pattern", layer)[..., start:, start:]
        w_o = model.weights.W_O(layer).to(z)
        result = torch.einsum("bhqd,hdm->bhqm", z[:, layer, : len(w_o), start:], w_o)
        score, chance = copying_shares(pattern, result, sample, model)
        values.append(score.cpu().numpy())
        null.append(chance.cpu().numpy())
    return {"values": np.stack(values, 1), "null": np.stack(null, 1)}


def copying_shares(
    pattern: Float[Tensor, "prompt head query key"],
    result: Float[Tensor, "prompt head query d_model"],
    ids: Int[Tensor, "prompt key"],
    model: Any,
) -> tuple[Float[Tensor, "prompt head query"], Float[Tensor, "prompt head query"]]:
    """Each row's share of the raise that goes to what it attends to, and the closed-form null.

    Rows that raise nothing, or attend to nothing of the sample, are NaN.
    """
    norm = model.weights.final_norm
    if norm is not None:
        # Scaled up so that the norm's ε does not bite; a norm's bias is the same for every head, so it is taken off.
        result = norm(result * 1e3 / result.norm(dim=-1, keepdim=True).clamp(min=1e-30)) - norm(
            torch.zeros_like(result[:1, :1, :1])
        )
    unembedding = model.weights.W_U[:, ids].to(result)  # [d_model, prompt, key]
    logits = torch.einsum("bhqm,mbk->bhqk", result, unembedding)
    raised = (logits - logits.mean(-1, keepdim=True)).clamp(min=0)
    share = raised / raised.sum(-1, keepdim=True)
    attention = pattern / pattern.sum(-1, keepdim=True)
    score = (attention * share).sum(-1)
    return score, (1 - score) / (ids.shape[1] - 1)


register(Copying())
