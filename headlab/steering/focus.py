"""Focus directions (Zhu et al. 2025): a vector per head, added to its queries, that draws it to relevant text.

Each head h has a direction q̂_h [d_head], learned by raising the attention A that rows of a response pay to the gold
document of their prompt: loss = −mean_{h, rows} Σ_{k ∈ gold} A[h, row, k], with (q + q̂_h)·k in place of q·k. It is
added after position encoding, times a factor, to the query of every position, of prompt and response.

Read in the authors' code (billzyx/focus_direction; the paper's text was not): init N(0, 0.01), AdamW at 1e-3, 10 epochs
of one example at a time, on what the model computes without directions, so that no head sees what others' directions
do; all heads are trained, and the 20 best contextual heads (:mod:`headlab.roles.contextual`) used, with factor 0.2. A
later version of the paper sets the factor by itself; that is not built. Ours learns from kept q and k, which is the
same computation. The code's rows are the response's own tokens; ``rows="predicting"`` takes those one earlier.

A direction on the key side, which the code learns too, does nothing: with k̂ added to every key, each score of a row
gains the same q·k̂, which cancels in the softmax. :func:`compare_sides` shows it. (It would not cancel under a soft cap
or a learned sink logit, which have a scale of their own.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.arguments import count, finite_number, seed_number
from headlab.attention import Edit, Head, HeadsLike, Where, add, apply, keep, parse_heads, read_head
from headlab.errors import HeadError, PlanError, PromptError
from headlab.models import LayerSpec
from headlab.steering.head_vectors import random_like
from headlab.steering.learned import Learned, head_names, shape_of
from headlab.tasks import DocumentPrompt

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt

#: The response's own tokens (the authors' code), or the rows that predict them.
ResponseRows = Literal["token", "predicting"]


@dataclass(frozen=True, eq=False)
class FocusDirections(Learned):
    """Directions added to the queries of heads.

    Attributes:
        directions: q̂ of every head that was trained, in the order of ``trained``, [head, d_head].
        trained: The heads that have a direction; ``heads``, which are steered, are some of them.
        losses: Mean training loss of each epoch: minus the mean mass on the gold document.
        factor: What directions are multiplied by; 0 changes nothing, too much blurs what a head looks for.
    """

    directions: Float[Tensor, "head d_head"]
    trained: str
    losses: tuple[float, ...] = ()
    factor: float = 0.2

    name: ClassVar[str] = "focus"
    sizes: ClassVar[dict[str, tuple[str, ...]]] = {"directions": ("trained", "d_head")}
    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (0.1, 0.2, 0.5, 1.0)

    @classmethod
    def fit(
        cls,
        model: Model,
        examples: Sequence[DocumentPrompt],
        heads: HeadsLike = "*.*",
        *,
        rows: ResponseRows = "token",
        epochs: int = 10,
        lr: float = 1e-3,
        factor: float = 0.2,
        seed: int = 0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Learn a direction for every head, each on its own.

        One forward pass per example; then q of the response's rows and k of every token stay in memory, for the layers
        of ``heads``.

        Args:
            model: The model, which stays as it is.
            examples: Prompts with a response, as ``headlab.tasks.document_prompt(…, response=…)`` makes them; the
                authors take the response that the model gives when shown the gold document alone.
            heads: The heads to train; the method then steers all of them, and :meth:`on` picks some.
            rows: Rows whose attention is raised.
            epochs: Passes over the examples, one step each.
            lr: Learning rate of AdamW. The authors' 1e-3 goes with thousands of steps: with few, directions stay
                short, and want a larger rate or factor.
            factor: Strength of the method returned; training knows none.
            seed: Seed of the initial directions and of the order of examples.
            tell: Told the loss of every epoch.

        Raises:
            HeadError: A head does not exist.
            PlanError: There are no examples, or the layers cannot be trained: no decoder, of several widths, with
                learned sink logits or a bias by distance.
            PromptError: An example has no response.
        """
        chosen = parse_heads(heads, model.spec)
        epochs, lr = count(epochs, "epochs"), finite_number(lr, "lr")
        if not examples:
            raise PlanError("focus directions need at least one example to learn from")
        _check_layers(model, chosen)
        batches = []
        for number, example in enumerate(examples):
            tell(f"example {number + 1} of {len(examples)}")
            batches.append(_kept(model, example, chosen, _rows_of(example, rows)))
        width = model.spec.layers[chosen[0].layer].d_head
        draw = torch.Generator().manual_seed(seed_number(seed))
        start = 0.01 * torch.randn(len(chosen), width, generator=draw)
        directions = start.to(batches[0][0].q).requires_grad_()
        adam = torch.optim.AdamW([directions], lr=lr)
        losses: list[float] = []
        for epoch in range(epochs):
            total = 0.0
            for at in torch.randperm(len(batches), generator=draw).tolist():
                masses = [part.mass(directions[part.at]) for part in batches[at]]
                loss = -torch.cat(masses).mean()
                (directions.grad,) = torch.autograd.grad(loss, directions)
                adam.step()
                total += float(loss.detach())
            losses.append(total / len(batches))
            tell(f"epoch {epoch + 1} of {epochs}: loss {losses[-1]:.4f}")
        names = head_names(chosen)
        learned = directions.detach().float().cpu()
        return cls(names, shape_of(model), learned, names, tuple(losses), factor)

    def edits(self, model: Model) -> Sequence[Edit]:
        """One addition to the queries.

        Raises:
            HeadError: A head does not exist.
            PlanError: A head was not trained, or the model has another shape.
        """
        heads = self.check_model(model)
        row_of = {head: at for at, head in enumerate(parse_heads(self.trained, model.spec))}
        unknown = [head for head in heads if head not in row_of]
        if unknown:
            raise PlanError(f"head {unknown[0]} has no focus direction; fit it too")
        scaled = self.factor * self.directions

        def push(q: Tensor, where: Where) -> Tensor:
            return q + scaled[[row_of[Head(where.layer, head)] for head in where.heads]].to(q)

        return (apply(heads, push, "q"),)

    def on(self, heads: HeadsLike) -> Self:
        """The same at other heads that were trained.

        Raises:
            HeadError: A head cannot be read.
            PlanError: A head was not trained.
        """
        known = {read_head(name) for name in self.trained.split(",")}
        if isinstance(heads, str) and "*" in heads:
            return self._with(heads=heads)
        listed: list[Head] = []
        for part in _parts(heads):
            listed.append(read_head(part))
            if listed[-1] not in known:
                raise PlanError(f"head {listed[-1]} has no focus direction; fit it too")
        return self._with(heads=head_names(tuple(sorted(set(listed)))))

    def randomised(self, seed: int) -> Self:
        """Random directions, each of its head's norm."""
        return self._with(directions=random_like(self.directions, seed))


def gold_mass(
    model: Model,
    examples: Sequence[DocumentPrompt],
    heads: HeadsLike = "*.*",
    *,
    rows: ResponseRows = "token",
) -> Float[np.ndarray, "example head"]:
    """Attention mass that the response's rows pay to the gold document, with whatever edits are in force.

    Heads come sorted, as :func:`headlab.parse_heads` gives them.

    Raises:
        HeadError: A head does not exist.
        PromptError: An example has no response.
    """
    chosen = parse_heads(heads, model.spec)
    found = np.empty((len(examples), len(chosen)))
    for at, example in enumerate(examples):
        asked = keep.statistics(
            "segment_mass",
            layers=sorted({head.layer for head in chosen}),
            queries=_rows_of(example, rows),
            segments={"gold": example.documents[example.gold]},
        )
        trace = model.trace(torch.tensor([example.ids]), keep=asked, logits="none")
        mass = trace.statistic("segment_mass", "gold")[0].double().cpu().numpy()
        layers = trace.layers("segment_mass")
        for place, head in enumerate(chosen):
            found[at, place] = mass[layers.index(head.layer), head.head].mean()
    return found


def compare_sides(
    model: Model, prompt: Prompt, heads: HeadsLike, direction: Float[Tensor, " d_head"]
) -> dict[Literal["key", "query"], float]:
    """Largest change of a logit when one direction is added to every key of some heads, and to every query.

    The first is rounding error, whatever the direction, unless the model has soft caps or learned sink logits.

    Raises:
        HeadError: A head does not exist.
        PlanError: The direction does not fit the heads.
    """

    def change(site: Literal["k", "q"]) -> float:
        with model.edit(add(heads, direction, site)):
            return float((model.logits(prompt) - plain).nan_to_num().abs().max())

    plain = model.logits(prompt)
    return {"key": change("k"), "query": change("q")}


@dataclass(frozen=True)
class _Kept:
    """What one layer computed of one example, as its heads' directions need it.

    Attributes:
        at: Rows of the table of directions that belong to these heads.
        q: [head, row, d_head].
        k: [head, key, d_head].
        seen: Which keys a row sees, [row, key].
        gold: Positions of the gold document.
        layer: Scale and soft cap.
    """

    at: slice
    q: Float[Tensor, "head row d_head"]
    k: Float[Tensor, "head key d_head"]
    seen: Bool[Tensor, "row key"]
    gold: slice
    layer: LayerSpec

    def mass(self, directions: Float[Tensor, "head d_head"]) -> Float[Tensor, "head row"]:
        """Mass on the gold document with directions added to the queries."""
        scores = self.layer.scaling * (self.q + directions[:, None]) @ self.k.mT
        if self.layer.softcap is not None:
            scores = self.layer.softcap * torch.tanh(scores / self.layer.softcap)
        pattern = scores.masked_fill(~self.seen, -torch.inf).softmax(-1)
        return pattern[..., self.gold].sum(-1)


def _kept(
    model: Model, example: DocumentPrompt, heads: tuple[Head, ...], rows: list[int]
) -> list[_Kept]:
    layers = sorted({head.layer for head in heads})
    ids = torch.tensor([example.ids[: rows[-1] + 1]])
    plan = [keep.tensors("q", layers=layers, positions=rows), keep.tensors("k", layers=layers)]
    with model.plain():
        trace = model.trace(ids, keep=plan, logits="none")
    lag = torch.tensor(rows)[:, None] - torch.arange(ids.shape[1])
    found, done = [], 0
    for layer in layers:
        spec, members = model.spec.layers[layer], [head for head in heads if head.layer == layer]
        q = torch.stack([trace.of_head("q", head)[0] for head in members])
        k = torch.stack([trace.of_head("k", head)[0] for head in members])
        seen = lag >= 0 if spec.window is None else (lag >= 0) & (lag < spec.window)
        exact = torch.promote_types(q.dtype, torch.float32)
        at = slice(done, done + len(members))
        gold = slice(*example.documents[example.gold])
        found.append(_Kept(at, q.to(exact), k.to(exact), seen.to(q.device), gold, spec))
        done = at.stop
    return found


def _rows_of(example: DocumentPrompt, rows: ResponseRows) -> list[int]:
    if rows not in ("token", "predicting"):
        raise PlanError(f"rows={rows!r:.40} must be 'token' or 'predicting'")
    if not example.response:
        raise PromptError(
            "an example has no response; make it by document_prompt(tokenizer, question, response=…)"
        )
    shift = 1 if rows == "predicting" else 0
    return list(range(example.start - shift, len(example.ids) - shift))


def _check_layers(model: Model, heads: tuple[Head, ...]) -> None:
    layers = [model.spec.layers[head.layer] for head in heads]
    if any(layer.stack != "decoder" for layer in layers):
        raise PlanError(f"focus directions are learned in decoders, and {model.name} is none")
    if len({layer.d_head for layer in layers}) > 1:
        raise PlanError("the heads' queries differ in width; take heads of one width")
    if model.spec.positions == "relative_bias" or any(layer.sinks for layer in layers):
        raise PlanError(
            f"the attention of {model.name} has learned sink logits or a bias by distance, with which no focus "
            "directions can be learned"
        )


def _parts(heads: HeadsLike) -> Sequence[str | tuple[int, int]]:
    if isinstance(heads, str):
        return [part for part in heads.split(",") if part.strip()]
    if isinstance(heads, tuple) and len(heads) == 2 and not isinstance(heads[0], str | tuple):
        return [heads]
    try:
        return [part for part in heads for part in _parts(part)]
    except TypeError as error:
        raise HeadError(f"{heads!r:.60} does not name heads") from error
