"""Activations and gradients of a metric at heads, with embeddings on a straight path between two prompts if wanted.

Everything is recorded through ordinary edits that give back what they are given, so the tensors recorded are those
the run goes on with, edits of the user in force included. An edit at k and v splits grouped keys and values: there is
one k and one v per query head, and a gradient at them belongs to that head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headlab.arguments import whole_number
from headlab.attention import edits as editing
from headlab.attention.edits import Edit, Site, Where
from headlab.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from headlab.causal.metrics import BoundMetric
    from headlab.model import Model

#: Tensors by site and layer: [row, position, head, width]; at sites of the stream the head axis has one entry.
BySite: TypeAlias = "dict[str, dict[int, Tensor]]"
#: Where along a straight path gradients are taken, m points of it.
Points: TypeAlias = Literal["midpoint", "left", "right"]
#: Tokens run at once with gradients recorded; a default that a few gigabytes of memory hold for small models.
TOKENS_AT_ONCE = 1024


@dataclass(frozen=True)
class Recording:
    """What one run computed.

    Attributes:
        logits: Logits of the last position, [row, 1, vocab], or of all, [row, position, vocab]; None where not asked.
        values: What was recorded.
    """

    logits: Float[Tensor, "row position vocab"] | None
    values: BySite

    def metric(self, metric: BoundMetric, rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """A metric of the run's rows, where ``rows`` names the prompt of each.

        Raises:
            PlanError: It is not finite.
        """
        assert self.logits is not None
        return metric.checked(self.logits, rows)

    def slopes(self, total: Tensor, *, keep_graph: bool = False) -> BySite:
        """Gradient of a number at everything recorded; 0 at what it does not depend on.

        Raises:
            PlanError: The number has no gradient at all: a metric that detaches.
        """
        if not total.requires_grad:
            raise PlanError(
                "the metric has no gradient, so nothing can be attributed to it; compute it from the logits with "
                "differentiable operations only, without detach(), item() or numpy"
            )
        sites = [site for site in self.values if site not in editing.ROW_SITES]
        places = [(site, layer) for site in sites for layer in self.values[site]]
        inner = [self.values[site][layer] for site, layer in places]
        found = torch.autograd.grad(
            total, inner, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
        )
        slopes: BySite = {site: {} for site in sites}
        for (site, layer), slope in zip(places, found, strict=True):
            slopes[site][layer] = slope.detach()
        return slopes


def record(
    model: Model,
    ids: Int[Tensor, "row position"],
    sites: Sequence[Site] | Mapping[Site, Sequence[int]],
    logits: Literal["last", "all", "none"] = "none",
    *,
    edits: Sequence[Edit] = (),
    embeddings: Float[Tensor, "row position d"] | None = None,
    grad: bool = False,
) -> Recording:
    """Run prompts and record sites.

    Args:
        model: The model.
        ids: Token ids, padded with −1 on the right.
        sites: Sites to record in every layer, or the layers of each.
        logits: Which logits to keep.
        edits: Edits in force before anything is recorded.
        embeddings: What the tokens are embedded as, instead of their own embeddings.
        grad: Whether to keep the graph; it starts at the first thing recorded. Scores and patterns are recorded
            [row, head, query, key] and without it.

    Raises:
        PlanError: The model was loaded in inference mode, so that there are no gradients.
        UnsupportedError: Logits are asked of a model without a language-model head.
    """
    chosen = sites if isinstance(sites, Mapping) else {site: None for site in sites}
    values: BySite = {site: {} for site in chosen}
    recorders = []
    for site, layers in chosen.items():
        heads = "*.*" if layers is None else ", ".join(f"{layer}.*" for layer in layers)
        by_row = site in editing.ROW_SITES
        recorder = _row_recorder(values[site]) if by_row else _recorder(values[site], grad)
        if heads:
            recorders.append(editing.apply(heads, recorder, site))
    with (
        frozen(model.module),
        model.edit(*edits, *recorders),
        embeddings_replaced(model, embeddings),
    ):
        run = model.trace(ids, logits=logits, grad=grad)
    return Recording(None if logits == "none" else given(model, run.logits), values)


def given(model: Model, logits: Tensor | None) -> Tensor:
    """The logits of a run.

    Raises:
        UnsupportedError: There are none, since the model has no language-model head.
    """
    if logits is None:
        raise UnsupportedError(
            f"{model.name} has no language-model head, so it gives no logits to measure"
        )
    return logits


@contextmanager
def enabled() -> Iterator[None]:
    """Gradients, even where the caller has turned them off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _recorder(values: dict[int, Tensor], grad: bool) -> Callable[[Tensor, Where], Tensor]:
    def operation(x: Tensor, where: Where) -> Tensor:
        value = x.clone() if x.requires_grad or not grad else x.detach().requires_grad_()
        values[where.layer] = value
        return value

    return operation


def _row_recorder(values: dict[int, Tensor]) -> Callable[[Tensor, Where], Tensor]:
    """Rows of scores and patterns come in blocks of queries."""

    def operation(x: Tensor, where: Where) -> Tensor:
        before = [values[where.layer]] if where.layer in values else []
        values[where.layer] = torch.cat([*before, x.detach()], 2)
        return x

    return operation


def differentiable(metric: BoundMetric) -> BoundMetric:
    """The metric itself.

    Raises:
        PlanError: It has no gradient.
    """
    if not metric.differentiable:
        raise PlanError(
            f"metric {metric.name} has no gradient, so nothing can be attributed to it; use logit_difference, "
            "log_probability or loss, or exact patching"
        )
    return metric


def measured(
    model: Model, metric: BoundMetric, ids: Int[Tensor, "prompt position"], tokens_at_once: int
) -> tuple[Float[Tensor, " prompt"], Float[Tensor, "prompt position vocab"] | None]:
    """The metric of each prompt's run, and all logits where it needs a reference and has none yet."""
    values, kept = [], []
    for rows in chunks(len(ids), ids.shape[1], tokens_at_once):
        logits = given(model, model.trace(chosen(ids, rows), logits=metric.needs).logits)
        if metric.needs_reference and metric.reference is None:
            kept.append((rows, logits))
        else:
            values.append(torch.from_numpy(metric.measure(logits, rows)))
    return torch.cat(values or [torch.empty(0)]), metric.gathered(kept) if kept else None


def referred(
    model: Model,
    metric: BoundMetric,
    clean: Int[Tensor, "prompt position"],
    corrupted: Int[Tensor, "prompt position"],
    tokens_at_once: int,
) -> tuple[BoundMetric, Float[Tensor, "2 prompt"]]:
    """The metric, ready to compare with the clean run, and its values in the clean and the corrupted run."""
    values, logits = measured(model, metric, clean, tokens_at_once)
    if logits is not None:
        metric = metric.with_reference(logits)
        values, _ = measured(model, metric, clean, tokens_at_once)
    others, _ = measured(model, metric, corrupted, tokens_at_once)
    return metric, torch.stack([values, others])


# -- along a path ----------------------------------------------------------------------------------------------------


def shares(steps: int, points: Points) -> tuple[float, ...]:
    """Where the gradients of integrated gradients are taken, as shares of the way from corrupted to clean.

    Args:
        steps: How many, m.
        points: ``"midpoint"``: (k − ½)/m for k = 1 … m; ``"right"``: k/m for k = 1 … m; ``"left"``: k/m for
            k = 0 … m − 1. The error of the first falls as 1/m², of the others as 1/m.

    Raises:
        PlanError: There are no such points.
    """
    steps = whole_number(steps, "steps", 1)
    shift = {"left": 0.0, "midpoint": 0.5, "right": 1.0}
    if points not in shift:
        raise PlanError(f"points={points!r} must be 'midpoint', 'left' or 'right'")
    return tuple((k + shift[points]) / steps for k in range(steps))


def between(
    first: Float[Tensor, "prompt ..."], last: Float[Tensor, "prompt ..."], at: Sequence[float]
) -> Float[Tensor, "row ..."]:
    """Values at shares of the way from first to last; rows are all prompts at the first share, then at the next."""
    share = torch.tensor(at, device=first.device, dtype=first.dtype)
    share = share.view(-1, *[1] * first.dim())
    return (first + share * (last - first)).flatten(0, 1)


@contextmanager
def embeddings_replaced(
    model: Model, embeddings: Float[Tensor, "row position d"] | None
) -> Iterator[None]:
    """While the block lasts, token ids are embedded as these vectors, whatever they are; None changes nothing."""
    if embeddings is None:
        yield
        return

    def hook(module: Any, arguments: Any, output: Tensor) -> Tensor:
        return embeddings.to(output)

    handle = model.module.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def embeddings_of(
    model: Model, ids: Int[Tensor, "row position"]
) -> Float[Tensor, "row position d"]:
    """What the embedding gives for token ids."""
    with torch.no_grad():
        found: Tensor = model.module.get_input_embeddings()(ids.clamp(min=0))
    return found


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """No gradients for parameters while the block lasts: nothing here asks for them, and they cost memory."""
    if any(parameter.is_inference() for parameter in module.parameters()):
        raise PlanError(
            "the model was loaded under torch.inference_mode, so its weights allow no gradients; load it outside"
        )
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def chunks(n_prompts: int, tokens_per_prompt: int, tokens_at_once: int) -> Iterator[Tensor]:
    """Prompts that run together, by number, so that at most so many tokens run at once (or one prompt does)."""
    size = max(1, whole_number(tokens_at_once, "tokens_at_once", 1) // max(tokens_per_prompt, 1))
    for start in range(0, n_prompts, size):
        yield torch.arange(start, min(start + size, n_prompts))


def chosen(ids: Int[Tensor, "prompt position"], prompts: Tensor) -> Int[Tensor, "prompt position"]:
    """Some of the prompts, no wider than the longest of them."""
    some = ids[prompts.to(ids.device)]
    return some[:, : int((some >= 0).sum(1).max())]


def wide(x: Tensor) -> Tensor:
    """At least float32: sums of many products lose too much in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_slopes(
    model: Model,
    clean: Int[Tensor, "prompt position"],
    corrupted: Int[Tensor, "prompt position"],
    metric: Callable[[Tensor, Tensor], Tensor],
    sites: Sequence[Site],
    at: Sequence[float],
    needs: Literal["last", "all"] = "last",
    rows: Tensor | None = None,
) -> BySite:
    """Mean gradient at sites while the embeddings move from the corrupted to the clean prompts.

    Args:
        model: The model.
        clean: Token ids, padded with −1.
        corrupted: Token ids of the same lengths.
        metric: Gives one number per row from logits [row, position, vocab] and the prompt of each row.
        sites: Where.
        at: Shares of the way; all run as one batch.
        needs: Which logits the metric takes.
        rows: Which prompts these are among those the metric was bound to; the first ones by default.

    Returns:
        [prompt, position, head, width] by site and layer.
    """
    first, last = embeddings_of(model, corrupted), embeddings_of(model, clean)
    path = between(first, last, at)
    ids = clean.repeat(len(at), 1)
    run = record(model, ids, sites, needs, embeddings=path, grad=True)
    assert run.logits is not None
    prompts = torch.arange(len(clean)) if rows is None else rows
    values = metric(run.logits, prompts.repeat(len(at)).to(ids.device))
    return {
        site: {layer: wide(x).unflatten(0, (len(at), -1)).mean(0) for layer, x in layers.items()}
        for site, layers in run.slopes(values.sum()).items()
    }
