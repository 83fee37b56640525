"""Direct logit attribution: what each part of a model adds to a logit, or a logit difference, by the direct path.

The residual stream at the end is a sum, x = embedding + Σ heads + Σ attention biases + Σ MLPs, and with the final norm
held at the scale it had in the run (:mod:`headlab.models.stream_norm`) logits are linear in it. So a part r adds

    DLA(r) = ⟨linear(r), w⟩ · logit scale,    w = mean of W_U over the answers − mean over the foils,

and all parts together, with the biases of the final norm and the unembedding, add up to the logit difference before
any soft cap. Where a norm stands between attention and stream (Gemma 2 and 3, OLMo 2, GLM-4) it is held still too. For
a head, r = z·W_O without b_O, which is a term of its own; :func:`~headlab.causal.by_source` splits it by source token.

Terms show direct paths only: MLPs and later heads read what a head writes and pass it on. Use patching for total
effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import is_integer, whole_number
from headlab.attention import keep
from headlab.attention.positions import resolve_positions
from headlab.attention.trace import Trace
from headlab.causal.answers import token_ids
from headlab.errors import PlanError, UnsupportedError
from headlab.models.stream_norm import FrozenNorm, frozen
from headlab.prompts import Prompt, lengths_of
from headlab.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Site, layer and head of a term; −1 for none.
Term: TypeAlias = tuple[str, int, int]
#: Allowed gap between the terms' sum and the model's logits, as a share of 1 + Σ |terms|: rounding of the model's own
#: stream. Many norms compute in float32 in a float64 model.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Bytes that the captured tensors of one batch may take.
_BUDGET = 1 << 28


@dataclass(frozen=True)
class DirectAttribution:
    """A logit, or logit difference, of each prompt as a sum of terms.

    Attributes:
        terms: What each term is: ``(site, layer, head)``, with site ``"embedding"`` (what enters the first block),
            ``"head"``, ``"attention_bias"``, ``"mlp"``, ``"final_norm_bias"`` or ``"unembedding_bias"``; −1 for no
            layer or no head.
        values: Each term, in logits.
        total: The logit difference before any soft cap; the terms sum to it.
    """

    terms: tuple[Term, ...]
    values: Float[np.ndarray, "term prompt"]
    total: Float[np.ndarray, " prompt"]

    def of(self, site: str) -> Float[np.ndarray, "term prompt"]:
        """The terms of one site, in the order of layers and heads."""
        return self.values[[at for at, term in enumerate(self.terms) if term[0] == site]]

    @cached_property
    def heads(self) -> Float[np.ndarray, "prompt layer head"]:
        """The heads' terms; NaN where a layer has fewer heads."""
        places = [(at, term) for at, term in enumerate(self.terms) if term[0] == "head"]
        layers = 1 + max(layer for _, (_, layer, _) in places)
        heads = 1 + max(head for _, (_, _, head) in places)
        found = np.full((self.values.shape[1], layers, heads), np.nan)
        for at, (_, layer, head) in places:
            found[:, layer, head] = self.values[at]
        return found

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per term: site, layer, head, value (mean over prompts) with its 95 % bootstrap interval, n."""
        import pandas as pd

        frame = pd.DataFrame(self.terms, columns=["site", "layer", "head"])
        frame["value"] = self.values.mean(1)
        frame["ci_low"], frame["ci_high"] = bootstrap_interval(self.values.T, seed=0)
        frame["n"] = len(self.total)
        return frame

    def top(self, n: int = 10) -> pd.DataFrame:
        """The largest terms, whichever sign.

        Raises:
            PlanError: n is not a whole number of at least 0.
        """
        n = whole_number(n, "n")
        order = self.frame["value"].abs().sort_values(ascending=False, kind="stable").index
        return self.frame.loc[order[:n]].reset_index(drop=True)

    def __repr__(self) -> str:
        means = self.values.mean(1)
        largest = []
        for at in np.argsort(-np.abs(means), kind="stable")[:5]:
            site, layer, head = self.terms[at]
            name = f"L{layer}H{head}" if head >= 0 else f"L{layer} {site}" if layer >= 0 else site
            largest.append(f"{name} {means[at]:.3g}")
        return (
            f"DirectAttribution of {len(self.total)} prompt(s): total {self.total.mean():.3g} = sum of "
            f"{len(self.terms)} terms (logits, means over prompts)\n  largest: {', '.join(largest)}"
        )


def direct_logit_attribution(
    model: Model,
    prompts: Prompt,
    answers: Any,
    foils: Any = None,
    position: int | Sequence[int] = -1,
    *,
    centred: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> DirectAttribution:
    """Split a logit, or a logit difference, over everything that writes into the residual stream.

    Args:
        model: A decoder-only model.
        prompts: The prompts.
        answers: Tokens whose logit is split, as ids or strings: one for all prompts, one per prompt or several per
            prompt, over which the mean is taken.
        foils: Tokens whose logit is taken off, likewise; None for none.
        position: Position that predicts, one for all prompts or one per prompt; negative ones count from the end.
        centred: Without foils, take off the mean logit over the vocabulary.
        tell: Told how far it is.

    Raises:
        PlanError: A token is none, or a position does not exist.
        UnsupportedError: The stream of this model is no sum of what attention and MLPs give, a weight cannot be read,
            or the terms do not add up to the model's own logits.
    """
    found = []
    for read in read_outs(
        model, prefixes(model, prompts, position), answers, foils, centred=centred
    ):
        found.append(attribution(read))
        tell(f"direct logit attribution: {sum(len(part.total) for part in found)} prompts done")
    return DirectAttribution(
        found[0].terms,
        np.concatenate([part.values for part in found], 1),
        np.concatenate([part.total for part in found]),
    )


# -- the parts that the split by source shares -------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadOut:
    """One run of a batch, and how the end of each prompt's stream is read out.

    Attributes:
        model: The model.
        trace: The run.
        direction: What a vector of the final stream is multiplied with to give its share of the logit difference.
        norm_bias: What the bias of the final norm adds to it.
        unembedding_bias: What b_U adds to it.
        total: The logit difference before any soft cap, by the model's own final norm.
    """

    model: Model
    trace: Trace
    direction: Float[Tensor, "prompt d_model"]
    norm_bias: Float[Tensor, " prompt"]
    unembedding_bias: Float[Tensor, " prompt"]
    total: Float[Tensor, " prompt"]

    def last(self, name: str, layer: int) -> Float[Tensor, "prompt *head d"]:
        """A captured tensor at each prompt's last position."""
        return at_end(self.trace, name, layer).to(self.direction)

    def into_stream(self, layer: int) -> tuple[Float[Tensor, "prompt d_model"], FrozenNorm | None]:
        """:attr:`direction` for what a layer's output projection gives, and the norm behind that, or None."""
        blocks, weights = self.model.blocks, self.model.weights
        direction = self.direction * blocks.residual_multiplier
        norm = blocks.attention_norm(layer)
        if norm is None:
            return direction, None
        out = torch.einsum("bhd,hdm->bm", self.last("z", layer), weights.W_O(layer).to(direction))
        bias = weights.b_O(layer)
        out = out if bias is None else out + bias.to(out)
        held = frozen(norm, out, f"the norm after attention of layer {layer}")
        return held.pull(direction), held


def prefixes(model: Model, prompts: Prompt, position: int | Sequence[int]) -> list[list[int]]:
    """Each prompt up to the position that predicts: a decoder's later tokens change nothing before them."""
    if any(facts.stack != "decoder" for facts in model.spec.layers):
        raise UnsupportedError(
            f"direct logit attribution needs a decoder-only model, where the stream is a sum; {model.name} "
            f"({model.spec.family}) is none"
        )
    ids = model.tokens(prompts)
    lengths = lengths_of(ids)
    if is_integer(position):
        given: list[Any] = [position]
    elif isinstance(position, Iterable) and not isinstance(position, str):
        given = [[at] for at in position]
    else:
        raise PlanError(f"position={position!r:.60} must be a whole number, or one for each prompt")
    ends = resolve_positions(given, lengths, "position")[:, 0]
    return [row[: end + 1].tolist() for row, end in zip(ids, ends.tolist(), strict=True)]


def read_outs(
    model: Model,
    prompts: list[list[int]],
    answers: Any,
    foils: Any = None,
    *,
    centred: bool = False,
    sources: bool = False,
) -> Iterator[ReadOut]:
    """Run prompts in batches that fit the memory budget, keeping values and the last pattern rows for ``sources``."""
    if foils is not None and centred:
        raise PlanError("centred=True takes off the mean logit; with foils= leave it out")
    right = token_ids(model, answers, len(prompts), "answers")
    wrong: list[list[int]] = [[]] * len(prompts)
    if foils is not None:
        wrong = token_ids(model, foils, len(prompts), "foils")
    plan: list[keep.Keep] = [
        keep.tensors("z", "mlp_out", *(["v"] if sources else [])),
        keep.tensors("resid_pre", layers=[0]),
        keep.tensors("resid_post", layers=[model.spec.n_layers - 1]),
    ]
    if sources:
        plan.append(keep.rows(queries=[-1]))
    width = sum(
        facts.d_value * (facts.n_heads + facts.n_kv_heads * sources) + model.spec.d_model
        for facts in model.spec.layers
    )
    per_token = width * torch.finfo(model.dtype).bits // 8
    at_once = max(1, _BUDGET // (per_token * max(map(len, prompts))))
    for start in range(0, len(prompts), at_once):
        part = slice(start, start + at_once)
        trace = model.trace(prompts[part], keep=plan, logits="last")
        yield _read_out(model, trace, right[part], wrong[part], centred)


@torch.no_grad()
def attribution(read: ReadOut) -> DirectAttribution:
    """The terms of one batch, checked against its logits."""
    model, weights = read.model, read.model.weights
    parts: list[tuple[Term, Tensor]] = [
        (("embedding", -1, -1), _dot(read.last("resid_pre", 0), read.direction))
    ]
    for layer in range(model.spec.n_layers):
        direction, held = read.into_stream(layer)
        z, w_o = read.last("z", layer), weights.W_O(layer).to(direction)
        heads = torch.einsum("bhd,hdm,bm->hb", z, w_o, direction)
        parts += [(("head", layer, head), value) for head, value in enumerate(heads)]
        bias = weights.b_O(layer)
        added = torch.zeros_like(read.total)
        if bias is not None:
            added = added + direction @ bias.to(direction)
        if held is not None:
            scaled = read.direction * model.blocks.residual_multiplier
            added = added + scaled @ held.bias
        if bias is not None or (held is not None and bool(held.bias.any())):
            parts.append((("attention_bias", layer, -1), added))
        parts.append((("mlp", layer, -1), _dot(read.last("mlp_out", layer), read.direction)))
    parts += [
        (("final_norm_bias", -1, -1), read.norm_bias),
        (("unembedding_bias", -1, -1), read.unembedding_bias),
    ]
    values = torch.stack([value for _, value in parts])
    agree(
        values.sum(0),
        read.total,
        values.abs().sum(0),
        model,
        "the terms of its residual stream do not add up to its logits",
    )
    terms = tuple(term for term, _ in parts)
    return DirectAttribution(terms, values.cpu().numpy(), read.total.cpu().numpy())


def agree(found: Tensor, wanted: Tensor, size: Tensor, model: Model, what: str) -> None:
    """Refuse numbers that differ by more than rounding.

    Raises:
        UnsupportedError: They do.
    """
    gap = (found - wanted).abs() / (1 + size)
    if not bool((gap <= TOLERANCE[model.dtype]).all()):
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) cannot be split so: {what} (off by {float(gap.max()):.1g} of "
            "their size)"
        )


def at_end(trace: Trace, name: str, layer: int) -> Float[Tensor, "prompt *head d"]:
    """A captured tensor at each prompt's last position."""
    value = trace.tensor(name, layer)
    rows = torch.arange(len(value), device=value.device)
    return value[rows, trace.lengths.to(value.device) - 1]


@torch.no_grad()
def _read_out(
    model: Model,
    trace: Trace,
    right: Sequence[Sequence[int]],
    wrong: Sequence[Sequence[int]],
    centred: bool,
) -> ReadOut:
    weights = model.weights
    kind = torch.promote_types(model.dtype, torch.float32)
    x = at_end(trace, "resid_post", model.spec.n_layers - 1).to(kind)
    norm = frozen(weights.final_norm, x, "the final norm")
    w_u, b_u, scale = weights.W_U, weights.b_U, weights.logit_scale
    b_u = w_u.new_zeros(w_u.shape[1]) if b_u is None else b_u
    rest = (w_u.mean(1, dtype=kind), b_u.mean(dtype=kind)) if centred else None
    w, b = [], []
    for at, (ours, theirs) in enumerate(zip(right, wrong, strict=True)):
        both = [*ours, *theirs]
        columns, biases = w_u[:, both].to(x), b_u[both].to(x)
        _check_logits(model, trace, at, both, scale * (norm.apply(x)[at] @ columns + biases))
        shares = [1 / len(ours)] * len(ours) + [-1 / len(theirs) for _ in theirs]
        share = torch.tensor(shares, dtype=kind, device=x.device)
        w.append(columns @ share - (rest[0] if rest else 0))
        b.append(biases @ share - (rest[1] if rest else 0))
    towards, biases = scale * torch.stack(w), scale * torch.stack(b)
    norm_bias = towards @ norm.bias
    total = _dot(norm.apply(x), towards) + biases
    return ReadOut(model, trace, norm.pull(towards), norm_bias, biases, total)


def _check_logits(model: Model, trace: Trace, prompt: int, ids: list[int], found: Tensor) -> None:
    cap = model.weights.logit_softcap
    if cap is not None:
        found = cap * torch.tanh(found / cap)
    assert trace.logits is not None  # asked for
    at = int(trace.lengths[prompt]) - 1 if trace.logits.shape[1] > 1 else 0
    logits = trace.logits[prompt, at, ids].to(found)
    what = "its final norm, unembedding, scale and soft cap as headlab reads them do not give its logits"
    agree(found, logits, logits.abs(), model, what)


def _dot(x: Float[Tensor, "prompt d"], y: Float[Tensor, "prompt d"]) -> Float[Tensor, " prompt"]:
    return (x * y).sum(-1)
