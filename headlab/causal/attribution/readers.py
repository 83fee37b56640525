"""Gradients at the residual stream as each head and MLP reads it.

The gradient at one reader, ∂metric / ∂in_v, counts what the metric owes to the stream *through v only*. It is the
gradient at v's own q, k or v (after position encoding), or at its MLP's output, pulled back through position encoding,
QK-norm, projection and the block's input norm by automatic differentiation, so that no family needs a formula of its
own. Readers of one layer and the path past the layer sum to the whole gradient at its input; :func:`stream_of` checks
that, and that writers sum to the stream, before anything is claimed for an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention.edits import Site
from headlab.causal.attribution.gradients import BySite, Recording, record, wide
from headlab.errors import UnsupportedError

if TYPE_CHECKING:
    from headlab.causal.metrics import BoundMetric
    from headlab.model import Model


@dataclass(frozen=True)
class Stream:
    """How a model's blocks read and write the residual stream.

    Attributes:
        parallel: Whether a block's MLP reads what its attention reads, and not what its attention adds.
    """

    parallel: bool


HeadSite: TypeAlias = Literal["q", "k", "v"]
#: What a head reads the stream through.
HEAD_SITES: tuple[HeadSite, ...] = ("q", "k", "v")
#: What the functions below need recorded.
READ_SITES: tuple[Site, ...] = ("resid_pre", *HEAD_SITES, "attn_out", "mlp_out")


def reading_sites(model: Model, layers: Sequence[int] | None = None) -> dict[Site, Sequence[int]]:
    """Sites to record for gradients at the readers of some layers (all by default) and of the logits."""
    last = model.spec.n_layers - 1
    every = range(last + 1) if layers is None else layers
    wanted: dict[Site, Sequence[int]] = {site: every for site in READ_SITES}
    return wanted | {"resid_post": [last]}


def head_input_gradients(
    recording: Recording, slopes: BySite, layer: int, site: HeadSite
) -> Iterator[Float[Tensor, "row position d_model"]]:
    """Gradient at the stream that a layer reads, through q, k or v of one head only; head by head.

    The graph of the recording must still be there.
    """
    stream, value = recording.values["resid_pre"][layer], recording.values[site][layer]
    slope = slopes[site][layer]
    for head in range(value.shape[2]):
        (found,) = torch.autograd.grad(
            value[:, :, head], stream, slope[:, :, head], retain_graph=True
        )
        yield found[:, :, 0].detach()


def mlp_input_gradient(
    recording: Recording, slopes: BySite, layer: int, stream: Stream
) -> Float[Tensor, "row position d_model"]:
    """Gradient at the stream that a layer's MLP reads, through the MLP only."""
    # Attention adds to the stream that the MLP reads, and reaches the MLP in no other way: the gradient at what it
    # adds is the gradient there. Where the block is parallel, the MLP reads the block's input.
    site = "resid_pre" if stream.parallel else "attn_out"
    (found,) = torch.autograd.grad(
        recording.values["mlp_out"][layer],
        recording.values[site][layer],
        slopes["mlp_out"][layer],
        retain_graph=True,
    )
    return found[:, :, 0].detach()


def stream_of(model: Model, ids: Int[Tensor, "row position"], metric: BoundMetric) -> Stream:
    """How the stream is read and written, checked on the model's first prompt.

    Raises:
        UnsupportedError: Heads do not add to the stream one by one, or the parts headlab knows are not all that
            write to it or read it.
    """
    spec, last = model.spec, model.spec.n_layers - 1
    if any(layer.stack != "decoder" for layer in spec.layers):
        raise UnsupportedError(
            f"{spec.name} ({spec.family}) is not a decoder-only model, so there are no edges between its heads: "
            "what they write does not reach later ones by a sum; use scores of heads (nodes) instead"
        )
    for layer in range(spec.n_layers):
        if model.blocks.attention_norm(layer) is not None:
            raise UnsupportedError(
                f"{spec.name} ({spec.family}) norms the output of attention before it enters the stream, so heads "
                "do not add to it one by one and there are no edges from single heads; use scores of heads (nodes) "
                "instead"
            )
    first = ids[:1, : int((ids[0] >= 0).sum())] if metric.needs == "last" else ids[:1]
    real = slice(0, int((ids[0] >= 0).sum()))
    sites = reading_sites(model) | {"z": range(spec.n_layers)}
    run = record(model, first, sites, metric.needs, grad=True)
    slopes = run.slopes(run.metric(metric, torch.zeros(1, dtype=torch.long)).sum(), keep_graph=True)
    parallel = {not _feeds(run, layer) for layer in range(spec.n_layers)}
    if len(parallel) > 1:
        raise UnsupportedError(
            f"edges of {spec.name} ({spec.family}) cannot be scored: only some of its blocks are parallel"
        )
    stream = Stream(parallel.pop())
    written = run.values["resid_pre"][0].detach()
    for layer in range(spec.n_layers):
        heads = head_results(model, layer, run.values["z"][layer].detach()).sum(0)
        bias = model.weights.b_O(layer)
        if bias is not None:
            heads = heads + bias * model.blocks.residual_multiplier
        added, mlp = (run.values[site][layer].detach() for site in ("attn_out", "mlp_out"))
        _agree(
            model,
            heads[:, real],
            added[:, real, 0],
            f"its heads of layer {layer} do not sum to what attention adds",
        )
        written = written + added + mlp
        after = (
            run.values["resid_post"][last] if layer == last else run.values["resid_pre"][layer + 1]
        )
        _agree(
            model,
            written[:, real],
            after.detach()[:, real],
            f"more than attention and MLP of layer {layer} writes to its stream",
        )
        read = slopes["resid_post"][last] if layer == last else slopes["resid_pre"][layer + 1]
        read = read[:, :, 0] + mlp_input_gradient(run, slopes, layer, stream)
        for site in HEAD_SITES:
            for part in head_input_gradients(run, slopes, layer, site):
                read = read + part
        _agree(
            model,
            read[:, real],
            slopes["resid_pre"][layer][:, real, 0],
            f"more than q, k, v and the MLP of layer {layer} reads its stream",
        )
    return stream


def head_results(
    model: Model, layer: int, z: Float[Tensor, "row position head d_value"]
) -> Float[Tensor, "head row position d_model"]:
    """What each head adds to the stream, the output bias left out: it belongs to no head."""
    out = model.weights.W_O(layer).to(z)
    return torch.einsum("bphd,hdm->hbpm", z, out) * model.blocks.residual_multiplier


def _feeds(run: Recording, layer: int) -> bool:
    added, mlp = run.values["attn_out"][layer], run.values["mlp_out"][layer]
    (found,) = torch.autograd.grad(mlp.sum(), added, retain_graph=True, allow_unused=True)
    return found is not None


def _agree(model: Model, ours: Tensor, theirs: Tensor, wrong: str) -> None:
    gap, size = wide(ours - theirs).norm(), wide(theirs).norm()
    # Most norms compute in float32 whatever the model's type.
    rounding = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    if not float(gap) <= rounding**0.5 * float(size) + 1e-12:
        raise UnsupportedError(
            f"edges of {model.name} ({model.spec.family}) cannot be scored: {wrong}; use scores of heads (nodes)"
        )
