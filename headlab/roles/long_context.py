"""Heads that need the long context, and whether local keys alone can tell (QAdA; Donhauser et al. 2025).

The keys of a row are split into local ones I, the first four and a recent window, and the bulk B between. With scores
s_i = scaling·q·k_i,

    A_loc = Σ_{i∈I} exp(s_i),    A_bulk = Σ_{i∈B} exp(s_i),    bulk share = A_bulk / (A_loc + A_bulk)

and a row is *local* where A_loc / (A_loc + A_bulk) > τ. The measured share comes from the pattern. The predicted one
takes A_loc as it is and the bulk from its second moments alone, as if its scores were Gaussian:

    log A_bulk ≈ log |B| + scaling·qᵀμ + ½ scaling²·qᵀΣq,    μ, Σ: mean and covariance of the bulk's keys after RoPE

**Only the abstract of the paper could be checked; these formulas and the value of τ are not verified.** Under a soft
cap c the expectation of exp(c·tanh(s/c)) replaces the closed form; a learned sink logit takes part in neither sum.
RoPE makes keys at different distances differ in kind, and a needle is an outlier that two moments miss.

Score: mean bulk share of the last rows of a text. Null: the same rows, with the text's own bulk exchanged for that of
another text, at the same positions; first tokens and recent window stay. Against even attention nearly every head
would look local, for the bulk holds most keys; and a head that spreads thinly over whatever lies far back, or looks at
a fixed distance, gives a foreign bulk as much as its own. Those do not need the long context, and score their null.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.attention import attention_chunks, keep
from headlab.roles.base import Arrays, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.prose_behaviours import FAR_CONTEXT
from headlab.roles.prose_rows import readable, text_ids, text_schema, visible
from headlab.roles.scores import RoleInfo

#: Tokens of a text.
LENGTH = 512
#: First tokens that count as local.
SINKS = 4
#: Recent tokens that count as local; up to ROWS more, since the bulk ends at one place for all rows of a text.
RECENT = 64
#: Last rows of a text that are read.
ROWS = 32
#: A row is local above this share of A_loc. Ours: the paper's value is not verified.
TAU = 0.6
_SHORTEST = SINKS + RECENT + ROWS + 64
#: A layer is measured when its last row sees at least this share of the bulk.
_LEAST = 0.25
_BATCH = 4
_QUADRATURE = 32


class LongContext(Role):
    """See the module's docstring.

    Args:
        length: Tokens of a text.
        recent: Recent tokens that count as local.
        tau: A row is local above this share of A_loc.
    """

    info = RoleInfo(
        name="long_context",
        title="Long context",
        question="Does the head need what the far context says, or do its first and recent keys suffice?",
        statistic="share of attention on the bulk of the text, A_bulk / (A_loc + A_bulk), in its last rows",
        null="the same rows after the bulk was exchanged for another text's, at the same positions",
        decision="score ≥ 0.2 and at least 0.05 above the null, at q ≤ the false-discovery rate",
        reference="Donhauser et al. 2025, Unveiling simplicities of attention (QAdA; formulas not verified), "
        "with a null of headlab's own",
        min_score=0.2,
        min_effect=0.05,
        row_convention="the token's own row",
        sink_convention=f"the first {SINKS} tokens count as local keys; a learned sink logit counts as no key",
    )
    schema = text_schema(LENGTH)
    behaviour = FAR_CONTEXT

    def __init__(self, length: int = LENGTH, recent: int = RECENT, tau: float = TAU) -> None:
        self.length, self.recent, self.tau = length, recent, tau

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        length = probing.length(self.length)
        bulk = range(SINKS, length - ROWS - self.recent)
        if why := self._unfit(probing, length):
            return Measurement.not_measurable(probing, why)
        own = text_ids(probing, length)
        if len(own) < 2:
            return Measurement.not_measurable(probing, "the null needs the bulk of another text")
        foreign = own.clone()
        foreign[:, bulk.start : bulk.stop] = own.roll(1, 0)[:, bulk.start : bulk.stop]
        found = {}
        for kind, ids in (("own", own), ("foreign", foreign)):
            parts = []
            for start in range(0, len(ids), _BATCH):
                batch = ids[start : start + _BATCH]
                last = start + len(batch)
                probing.tell(f"texts with their {kind} bulk, {start + 1}–{last} of {len(ids)}")
                run = partial(_run, probing, batch, bulk, kind == "own")
                name = f"bulk-{bulk.start}-{bulk.stop}-{kind}-{start:03d}"
                parts.append(probing.part(name, batch.numpy(), run))
            found[kind] = {
                name: np.concatenate([part[name] for part in parts]) for name in parts[0]
            }
        return self._judged(probing, own.numpy(), found["own"], found["foreign"]["share"], bulk)

    def _unfit(self, probing: Probing, length: int) -> str:
        if any(not layer.causal for layer in probing.model.spec.layers):
            return "recent keys are defined for models that read from left to right"
        if length < _SHORTEST - RECENT + self.recent:
            return f"a text of {length} tokens, all the context holds, is too short"
        return readable(probing)

    def _judged(
        self, probing: Probing, ids: np.ndarray, own: Arrays, foreign: np.ndarray, bulk: range
    ) -> Measurement:
        share, predicted = (own[name].astype(np.float64) for name in ("share", "predicted"))
        foreign = foreign.astype(np.float64)
        blind = _seen(probing, bulk, ids.shape[1]).mean(1) < _LEAST
        for rows in (share, predicted, foreign):
            rows[:, blind] = np.nan
        note = "out of window: the window holds less than a quarter of the bulk"
        heads = range(probing.model.spec.n_heads)
        notes = {(int(layer), head): note for layer in np.flatnonzero(blind) for head in heads}
        queries = np.arange(ids.shape[1] - ROWS, ids.shape[1])
        looks = tuple(Look(*shown) for shown in zip(ids[:2], [queries] * 2, share[:2], strict=True))
        local = 1 - self.tau
        agree = np.where(np.isnan(share), np.nan, (share < local) == (predicted < local))
        details = {
            "predicted_share": Detail(
                predicted.mean((0, 3)),
                "bulk share predicted from local keys and the bulk's second moments",
            ),
            "prediction_error": Detail(
                np.abs(predicted - share).mean((0, 3)),
                "mean |predicted − measured| bulk share over rows",
            ),
            "local_rows": Detail(
                np.where(np.isnan(share), np.nan, share < local).mean((0, 3)),
                f"share of rows that are local: A_loc / (A_loc + A_bulk) > {self.tau}",
            ),
            "agreement": Detail(
                agree.mean((0, 3)),
                f"share of rows that prediction and pattern class alike at τ = {self.tau}",
            ),
        }
        if not blind.all():
            alike = correlation(predicted.mean((0, 3)), share.mean((0, 3)))
            notes[-1, -1] = (
                f"predicted and measured bulk share correlate at {alike:.2f} over heads; "
                f"{np.nanmean(agree):.0%} of rows are classed alike"
            )
        return Measurement(share.mean(-1), foreign.mean(-1), looks, notes, details)


def log_bulk(
    q: Float[Tensor, "*heads query d_head"],
    k: Float[Tensor, "*heads key d_head"],
    scaling: float,
    softcap: float | None = None,
) -> Float[Tensor, "*heads query"]:
    """log A_bulk from the second moments of the bulk's keys, in nats; see the module's docstring.

    Args:
        q: Queries after RoPE.
        k: Keys of the bulk after RoPE.
        scaling: Factor on q·k.
        softcap: Soft cap of the scores.
    """
    mean = k.mean(-2, keepdim=True)
    centred = k - mean
    covariance = centred.transpose(-1, -2) @ centred / k.shape[-2]
    level = scaling * (q @ mean.transpose(-1, -2))[..., 0]
    spread = scaling**2 * ((q @ covariance) * q).sum(-1)
    return np.log(k.shape[-2]) + log_mean_exp(level, spread, softcap)


def log_mean_exp(
    level: Float[Tensor, "*rows"], variance: Float[Tensor, "*rows"], softcap: float | None
) -> Float[Tensor, "*rows"]:
    """log E exp(s) of a Gaussian s, or log E exp(c·tanh(s/c)) under a soft cap c, by Gauss-Hermite quadrature."""
    if softcap is None:
        return level + variance / 2
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE)
    at = torch.from_numpy(nodes).to(level)
    log_weights = torch.from_numpy(np.log(weights / weights.sum())).to(level)
    scores = level[..., None] + variance.clamp(min=0).sqrt()[..., None] * at
    return torch.logsumexp(softcap * torch.tanh(scores / softcap) + log_weights, -1)


def correlation(a: Float[np.ndarray, "layer head"], b: Float[np.ndarray, "layer head"]) -> float:
    """Pearson correlation over the heads that both have; NaN where it is not defined."""
    known = ~np.isnan(a) & ~np.isnan(b)
    if known.sum() < 3 or a[known].std() == 0 or b[known].std() == 0:
        return float("nan")
    return float(np.corrcoef(a[known], b[known])[0, 1])


def _seen(probing: Probing, bulk: range, length: int) -> Bool[np.ndarray, "layer bulk"]:
    """Which keys of the bulk the last row of each layer sees."""
    layers = zip(probing.model.spec.layers, attention_chunks(probing.model), strict=True)
    return np.stack(
        [
            visible(layer.causal, layer.window, chunk, length)[-1, bulk.start : bulk.stop]
            for layer, chunk in layers
        ]
    )


def _run(probing: Probing, ids: Tensor, bulk: range, predict: bool) -> Arrays:
    """Bulk share of the last rows, and what local keys predict of it, each [prompt, layer, head, row]."""
    model, length = probing.model, ids.shape[1]
    queries = list(range(length - ROWS, length))
    segments = {
        "local": torch.tensor([at not in bulk for at in range(length)]),
        "bulk": torch.tensor([at in bulk for at in range(length)]),
    }
    plan: list[keep.Keep] = [
        keep.statistics("segment_mass", "lse", queries=queries, segments=segments)
    ]
    if predict:
        plan.append(keep.tensors("q", positions=queries))
        plan.append(keep.tensors("k", positions=list(bulk)))
    trace = model.trace(ids, keep=plan, logits="none")
    local, far = (trace.statistic("segment_mass", name).float() for name in segments)
    found = {"share": (far / (local + far)).cpu().numpy()}
    if predict:
        log_local = local.log() + trace.statistic("lse").float()
        found["predicted"] = np.full(found["share"].shape, np.nan, np.float32)
        seen = torch.from_numpy(_seen(probing, bulk, length))
        for at, layer in enumerate(model.spec.layers):
            if not seen[at].any():
                continue
            q = trace.tensor("q", at).float().transpose(1, 2)
            k = trace.tensor("k", at).float().transpose(1, 2)[:, :, seen[at]]
            grouped = q.unflatten(1, (k.shape[1], -1)).flatten(
                2, 3
            )  # [prompt, kv, member · row, d]
            log_far = log_bulk(grouped, k, layer.scaling, layer.softcap)
            log_far = log_far.unflatten(2, (-1, ROWS)).flatten(1, 2)
            predicted = torch.sigmoid(log_far - log_local[:, at, : q.shape[1]])
            found["predicted"][:, at, : q.shape[1]] = predicted.cpu().numpy()
    return found


register(LongContext())
