"""Copying heads (Olsson et al. 2022, p. 60): a head's output raises the logits of the tokens it attends to.

On 25 distinct random tokens behind a BOS token: the head's output z·W_O goes straight to the unembedding, each
row's logits of the sample's own tokens are taken minus their mean and cut at 0 ("raise"), and

    score = mean over rows of Σ_k A[q, k] · raise_q(x_k) / Σ_t raise_q(t).

The BOS token is left out on both sides, values and weights, since a head that rests on it copies nothing. The
final norm is applied to the head's output alone, which only scales each row. Olsson et al. rescale a ratio of
0..0.5 to −1..1 and do not say how the norm is handled; the score here is the plain ratio, chance being 1 / 25.
The null is in closed form: the mean over all other tokens of the sample in place of the attended one. A record of
the user's gives the sample; tokens that come again in it are left out.

The detail ``ov_eigenvalue_copying`` reads the same off the weights (Elhage et al. 2021; see
:func:`headlab.parameters.eigenvalue_copying`): 1 where every direction of tokens raises itself, −1 where it lowers
itself.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.errors import UnsupportedError
from headlab.parameters import eigenvalue_copying
from headlab.parameters.copying import Embedding
from headlab.roles.base import Arrays, Detail, Look, Measurement, Probing, Role, RoleError, register
from headlab.roles.repeats import SECOND_COPY
from headlab.roles.scores import RoleInfo
from headlab.tasks import TOKENS_SCHEMA, RecordError, given_tokens, plain_tokens, random_tokens

#: Tokens of a sample.
N = 25
_LEAST = 8


class Copying(Role):
    """See the module's docstring.

    Args:
        embedding: How rows of W_E enter ``ov_eigenvalue_copying``: as they are, or scaled to one length, as a norm
            before the first layer does.
        fold_norm: Whether the final norm's weight, and a LayerNorm's centring, are folded into W_U there.
        centre: Whether each direction's mean logit over the vocabulary is taken off there, as softmax does.
    """

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
        sink_convention="the first token's values and weights are left out, the rest renormalised",
    )
    schema = TOKENS_SCHEMA
    behaviour = SECOND_COPY

    def __init__(
        self, embedding: Embedding = "raw", fold_norm: bool = True, centre: bool = False
    ) -> None:
        if embedding not in ("raw", "unit"):
            raise RoleError(f"embedding={embedding!r} must be 'raw' or 'unit'")
        self.embedding, self.fold_norm, self.centre = embedding, fold_norm, centre

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        batches = _samples(probing)
        if not batches or batches[0].shape[1] < 3:
            return Measurement.not_measurable(probing, "context or vocabulary hold no sample")
        start = int(probing.bos is not None)
        values, null, looks = [], [], []
        for at, ids in enumerate(batches):
            probing.tell(f"copying of given tokens, {at + 1} of {len(batches)}")
            name = "copying" if len(batches) == 1 else f"copying-{at:03d}"
            try:
                found = probing.part(name, ids.numpy(), partial(_run, probing, ids, start))
            except UnsupportedError as error:
                return Measurement.not_measurable(probing, str(error))
            rows = np.arange(start, ids.shape[1])
            looks += [
                Look(one.numpy(), rows, each)
                for one, each in zip(ids[:2], found["values"][:2], strict=True)
            ]
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", RuntimeWarning
                )  # a mean of no rows is NaN, as meant
                values.append(np.nanmean(found["values"], -1))
                null.append(np.nanmean(found["null"], -1))
        means = np.concatenate(values), np.concatenate(null)
        note = "not measurable: the head's output raises no token of the sample"
        notes = {(int(at), int(head)): note for at, head in np.argwhere(np.isnan(means[0]).all(0))}
        return Measurement(*means, tuple(looks[:2]), notes, self._details(probing))

    def _details(self, probing: Probing) -> dict[str, Detail]:
        probing.tell("eigenvalues of the OV circuits")
        options = np.array([self.embedding == "unit", self.fold_norm, self.centre])

        def compute() -> Arrays:
            return {
                "values": eigenvalue_copying(
                    probing.model, self.embedding, self.fold_norm, self.centre
                )
            }

        values = probing.part("copying-eigenvalues", options, compute)["values"]
        if np.isnan(values).all():
            return {}
        meaning = "Σ Re λ / Σ |λ| of the OV circuit from token to token, −1 … 1"
        return {"ov_eigenvalue_copying": Detail(values, meaning)}


def _samples(probing: Probing) -> list[Int[Tensor, "prompt position"]]:
    """Samples of distinct tokens behind a BOS token: one batch of random ones, or one batch per record."""
    model = probing.model
    start = int(probing.bos is not None)
    begin = torch.full((1, start), 0 if probing.bos is None else probing.bos)
    if probing.records is None:
        plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
        n = max(0, min(N, len(plain), probing.length(N + start) - start))
        drawn = torch.from_numpy(random_tokens(plain, probing.n_prompts, n, probing.seed + 1))
        return [torch.cat([begin.expand(len(drawn), -1), drawn], 1)]
    limit = model.spec.max_context
    most = None if limit is None else limit - start
    batches = []
    for at, x in enumerate(given_tokens(model.tokenizer, probing.records, _LEAST, most)):
        distinct = list(dict.fromkeys(x.tolist()))
        if len(distinct) < _LEAST:
            raise RecordError(
                f"record {at}: it has {len(distinct)} different tokens, but at least {_LEAST} are needed"
            )
        batches.append(torch.cat([begin, torch.tensor([distinct])], 1))
    return batches


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
    result = normed(result, model.weights.final_norm)
    unembedding = model.weights.W_U[:, ids].to(result)  # [d_model, prompt, key]
    logits = torch.einsum("bhqm,mbk->bhqk", result, unembedding)
    raised = (logits - logits.mean(-1, keepdim=True)).clamp(min=0)
    share = raised / raised.sum(-1, keepdim=True)
    attention = pattern / pattern.sum(-1, keepdim=True)
    score = (attention * share).sum(-1)
    return score, (1 - score) / (ids.shape[1] - 1)


def normed(result: Float[Tensor, "*row d_model"], norm: Any) -> Float[Tensor, "*row d_model"]:
    """Heads' outputs as the final norm alone would pass them on: up to their size, what they add to the logits.

    Scaled up so that the norm's ε does not bite; a norm's bias is the same for every head, so it is taken off.
    """
    if norm is None:
        return result
    length = result.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    scaled: Tensor = norm(result * 1e3 / length) - norm(torch.zeros_like(result[..., :1, :]))
    return scaled


register(Copying())
