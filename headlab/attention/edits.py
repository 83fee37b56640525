"""Interventions: declarative edits of what heads compute, composable, and gone when their block ends.

    with model.edit(hl.ablate("L18H6, 17.3", kind="mean", reference=texts), hl.scale("18.*", by=0.5)):
        ...

Edits apply in the order given. A site is where an edit acts: ``q``, ``k``, ``v`` (after position encoding),
``bias`` (added to the scores), ``scores`` (before the softmax), ``pattern``, ``z`` (before W_O) or ``result`` (z·W_O,
per head, in the residual stream). Heads are query heads: an edit at k or v of one head leaves the other heads of its
group alone.

``bias`` starts at 0. What is the same for every query, such as more weight for some keys, belongs there rather than in
``scores``: it never holds a whole pattern and stays on the fast path, capture included.

Four more sites belong to a whole layer and are named as ``"3.*"``: ``resid_pre`` and ``resid_post``, the residual
stream before and after the layer's block, and ``attn_out`` and ``mlp_out``, what is added to it in between. In their
values the head axis has one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from headlab.attention.heads import Head, HeadsLike, parse_heads
from headlab.attention.keep import STREAM, is_whole, whole_layers
from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.attention.trace import Trace
    from headlab.model import Model

Site: TypeAlias = Literal[
    "q", "k", "v", "z", "result", "bias", "scores", "pattern", "resid_pre", "attn_out", "mlp_out", "resid_post"
]  # fmt: skip
HEAD_SITES = ("q", "k", "v", "z", "result")
VECTOR_SITES = HEAD_SITES + STREAM
ROW_SITES = ("scores", "pattern")
#: Every site, in the order in which a layer comes to them.
SITES = (
    "resid_pre",
    "q",
    "k",
    "v",
    "bias",
    "scores",
    "pattern",
    "z",
    "result",
    "attn_out",
    "mlp_out",
    "resid_post",
)


@dataclass(frozen=True)
class Where:
    """What an edit's operation is told about the values it rewrites.

    Attributes:
        layer: The layer.
        heads: Query heads along the head axis.
        positions: Position of each row in its sequence, [batch, position]; negative in left padding.
        prompts: Which of ``n_prompts`` prompts each row of the batch runs, [batch]; None where row i runs prompt i.
        n_prompts: Prompts that values given per prompt are of.
        first_key: At bias, scores and pattern, the place of the first key: above 0 where a sliding cache has dropped
            some.
        lengths: Tokens of each row's prompt, [batch]: positions from there on are padding, or generated. None where the
            module was run without headlab.
        keys: At bias, scores and pattern, the position of each key in its sequence, [batch, key]; negative in left
            padding.
        prompt: Token ids of the prompts being run, [batch, position], −1 beyond their ends; the same tensor at every
            layer and step of a run. None where only part of them is at hand, as inside a sweep.
    """

    layer: int
    heads: tuple[int, ...]
    positions: Tensor
    prompts: Tensor | None = None
    n_prompts: int | None = None
    first_key: int = 0
    lengths: Tensor | None = None
    keys: Tensor | None = None
    prompt: Tensor | None = None

    def rows_of(self, value: Tensor) -> Tensor:
        """A value given per prompt, as one row per row of the batch; other values as they are."""
        if self.prompts is None or value.dim() == 0 or value.shape[0] != self.n_prompts:
            return value
        return value[self.prompts.to(value.device)]


#: Rewrites values of some heads: [batch, position, head, width] at vector sites, [batch, head, query, key] at
#: scores (hidden keys are −inf) and pattern, [batch, head, 1 or query, key] at bias. It returns new values and leaves
#: those it is given alone.
Operation: TypeAlias = Callable[[Tensor, Where], Tensor]


@dataclass(frozen=True)
class Edit:
    """One intervention; build it with :func:`~headlab.attention.ablations.ablate`, :func:`scale`, :func:`add`,
    :func:`replace`, :func:`patch` or :func:`apply`.

    Attributes:
        heads: The heads it acts on.
        site: Where it acts.
        prepare: Turns model and heads into the operation, once, before the model runs.
        positions: Positions it acts on, negative ones from each prompt's end; None for all.
    """

    heads: HeadsLike
    site: Site
    prepare: Callable[[Model, tuple[Head, ...]], Operation]
    positions: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.site not in SITES:
            raise PlanError(f"there is no site {self.site!r}; there are {', '.join(SITES)}")


@dataclass(frozen=True)
class Batch:
    """The rows of a batch that an edit acts on, where the same prompts run several times side by side.

    Attributes:
        start: The first row.
        prompts: Which prompt each row from there on runs, [row].
        n_prompts: Prompts that values given per prompt are of.
    """

    start: int
    prompts: Tensor
    n_prompts: int


@dataclass(frozen=True)
class BoundEdit:
    """An edit made ready for one model, for all rows of a batch or some."""

    site: Site
    heads: dict[int, tuple[int, ...]]
    operation: Operation
    positions: tuple[int, ...] | None
    batch: Batch | None = None

    def on_vectors(self, x: Tensor, where: Where) -> Tensor:
        """The edited values of one layer, [batch, position, head, width]."""
        return self._on_rows_of_batch(self._on_vectors, x, where)

    def on_rows(self, x: Tensor, where: Where) -> Tensor:
        """The edited rows of one layer, [batch, head, query, key]."""
        return self._on_rows_of_batch(self._on_rows, x, where)

    def on_bias(self, x: Tensor, where: Where) -> Tensor:
        """The edited bias of one layer, [batch, head, 1 or query, key]."""
        return self._on_rows_of_batch(self._on_bias, x, where)

    def _on_rows_of_batch(
        self, edit: Callable[[Tensor, Where], Tensor], x: Tensor, where: Where
    ) -> Tensor:
        """``where`` names no heads yet: they are this edit's."""
        where = replace_fields(where, heads=self.heads[where.layer])
        if self.batch is None:
            return edit(x, where)
        rows = slice(self.batch.start, self.batch.start + len(self.batch.prompts))
        where = replace_fields(
            where,
            positions=where.positions[rows],
            prompts=self.batch.prompts,
            n_prompts=self.batch.n_prompts,
            lengths=None if where.lengths is None else where.lengths[rows],
            keys=None if where.keys is None else where.keys[rows],
            prompt=None if where.prompt is None else where.prompt[rows],
        )
        new = edit(x[rows], where)
        if len(new) == len(x):
            return new
        whole = torch.broadcast_shapes(x.shape[1:], new.shape[1:])  # a bias may get its own rows
        parts = (x[: rows.start], new, x[rows.stop :])
        return torch.cat([part.expand(-1, *whole) for part in parts])

    def _on_vectors(self, x: Tensor, where: Where) -> Tensor:
        index = torch.tensor(where.heads, device=x.device)
        old = x.index_select(2, index)  # a copy: x may lie in the cache, and an operation may write
        new = self.operation(old, where).to(x.dtype)
        at = self._acts(where)
        if at is not None:
            new = torch.where(at[:, :, None, None], new, old)
        return x.index_copy(2, index, new.expand_as(old))

    def _on_rows(self, x: Tensor, where: Where) -> Tensor:
        index = None
        if where.heads != tuple(range(x.shape[1])):
            index = torch.tensor(where.heads, device=x.device)
        old = x if index is None else x.index_select(1, index)
        hidden = old == -torch.inf if self.site == "scores" else None
        new = self.operation(old, where).to(x.dtype)
        if hidden is not None:  # whatever the operation does, a hidden key stays hidden
            new = new.expand_as(old).masked_fill(hidden, -torch.inf)
        at = self._acts(where)
        if at is not None:
            new = torch.where(at[:, None, :, None], new, old)
        new = new.expand_as(old)
        return new if index is None else x.index_copy(1, index, new)

    def _on_bias(self, x: Tensor, where: Where) -> Tensor:
        every = where.heads == tuple(range(x.shape[1]))
        index = torch.tensor(where.heads, device=x.device)
        old = x if every else x.index_select(1, index)
        new = self.operation(old, where).to(x.dtype)
        at = self._acts(where)
        if at is not None:
            new = torch.where(at[:, None, :, None], new, old)
        rows = new.shape[-2] if new.dim() > 1 else 1
        if rows not in (1, where.positions.shape[1]):
            raise PlanError(
                f"a bias must have one row for all queries or one for each of {where.positions.shape[1]}, not {rows}"
            )
        rows = max(rows, x.shape[2])
        new = new.expand(len(x), len(where.heads), rows, x.shape[3])
        return new if every else x.expand(-1, -1, rows, -1).index_copy(1, index, new)

    def _acts(self, where: Where) -> Tensor | None:
        """Which rows the edit acts on, [batch, position]; None for all."""
        if self.positions is None:
            return None
        positions, lengths = where.positions, where.lengths
        wanted = torch.tensor(self.positions, device=positions.device)[None]
        if bool((wanted < 0).any()):
            if lengths is None:
                raise PlanError(
                    "positions counted from the end need the prompt's length: run the model through "
                    "headlab's trace, logits or generate"
                )
            wanted = torch.where(wanted < 0, wanted + lengths.to(wanted.device)[:, None], wanted)
        return (positions[:, :, None] == wanted[:, None, :]).any(-1)


def bind(edit: Edit, model: Model) -> BoundEdit:
    """Check an edit against a model and make its operation ready."""
    if not isinstance(edit, Edit):
        raise PlanError(
            f"model.edit takes hl.ablate(…), hl.scale(…), hl.patch(…) and the like, not {edit!r}"
        )
    heads = parse_heads(edit.heads, model.spec)
    per_layer: dict[int, list[int]] = {}
    for head in heads:
        per_layer.setdefault(head.layer, []).append(head.head)
    operation = edit.prepare(model, heads)
    kept = {layer: tuple(members) for layer, members in per_layer.items()}
    if edit.site in STREAM:
        kept = {layer: (0,) for layer in whole_layers(kept, model.spec, edit.site)}
    return BoundEdit(edit.site, kept, operation, edit.positions)


# -- the edits -----------------------------------------------------------------------------------------------


def scale(
    heads: HeadsLike, site: Site = "z", by: float = 1.0, *, positions: Sequence[int] | None = None
) -> Edit:
    """Multiply what heads compute at a site; at scores, hidden keys stay hidden."""
    factor = _finite(by, "by")
    return Edit(heads, site, lambda *_: lambda x, where: x * factor.to(x), as_positions(positions))


def add(
    heads: HeadsLike,
    value: Tensor | float,
    site: Site = "z",
    *,
    positions: Sequence[int] | None = None,
) -> Edit:
    """Add a value, broadcast over [batch, position, head, width] or, at scores and pattern,
    [batch, head, query, key]; at bias one row may stand for all queries."""
    added = _finite(value, "value", site)
    return Edit(
        heads,
        site,
        lambda *_: lambda x, where: x + _spread(where.rows_of(added), x, where, site),
        as_positions(positions),
    )


def replace(
    heads: HeadsLike,
    value: Tensor | float,
    site: Site = "z",
    *,
    positions: Sequence[int] | None = None,
) -> Edit:
    """Put a value in place, broadcast as in :func:`add`; at scores, hidden keys stay hidden."""
    new = _finite(value, "value", site)
    return Edit(
        heads,
        site,
        lambda *_: lambda x, where: _spread(where.rows_of(new), x, where, site),
        as_positions(positions),
    )


def apply(
    heads: HeadsLike,
    operation: Operation,
    site: Site = "z",
    *,
    positions: Sequence[int] | None = None,
) -> Edit:
    """Rewrite values by a function of your own: ``operation(values, where) -> values``; see :data:`Operation`."""
    return Edit(heads, site, lambda *_: operation, as_positions(positions))


def patch(
    heads: HeadsLike, site: Site = "z", *, source: Trace, positions: Sequence[int] | None = None
) -> Edit:
    """Put in what the heads computed in another run, position by position.

    Args:
        heads: The heads to patch.
        site: Where; ``source`` must have kept this tensor: ``hl.keep.tensors(site)``.
        source: The trace of the other run, of one prompt or of as many as the run that is patched.
        positions: Positions to patch, negative ones from each prompt's end; by default all that the source has.

    Raises:
        PlanError: The source does not hold what is needed.
    """
    if not hasattr(source, "of_head"):
        raise PlanError(f"source= must be a trace, not {source!r:.60}")
    if site not in (*VECTOR_SITES, "pattern"):
        raise PlanError(f"a trace keeps no {site!r}, so it cannot be patched in; use hl.replace")

    def prepare(model: Model, bound: tuple[Head, ...]) -> Operation:
        values = values_of(source, site, bound)
        kept = source.query_positions.get(site)
        if kept is not None and site == "pattern":
            raise PlanError(
                "a pattern kept for some positions cannot be patched in; keep all of it"
            )

        def operation(x: Tensor, where: Where) -> Tensor:
            value = where.rows_of(values[where.layer]).to(x)
            if value.shape[0] not in (1, x.shape[0]):
                raise PlanError(
                    f"the source has {value.shape[0]} prompts, the patched run {x.shape[0]}"
                )
            if site == "pattern":
                return same_rows(value, x, where)
            return _by_position(value, None if kept is None else where.rows_of(kept), x, where)

        return operation

    return Edit(heads, site, prepare, as_positions(positions))


def as_positions(positions: Sequence[int] | None) -> tuple[int, ...] | None:
    """Positions as an edit keeps them; None stands for all.

    Raises:
        PlanError: They are not whole numbers.
    """
    if positions is None:
        return None
    listed = positions.tolist() if hasattr(positions, "tolist") else positions
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise PlanError(f"positions={positions!r} must be a list of whole numbers")
    found = tuple(listed)
    if not all(is_whole(position) for position in found):
        raise PlanError(f"positions={positions!r} must be whole numbers")
    return tuple(int(position) for position in found)


def _finite(value: Any, label: str, site: str = "") -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PlanError(f"{label}={value!r:.60} must be a number or a tensor") from error
    fine = tensor.isfinite()
    if site in ("bias", "scores"):
        fine = fine | (tensor == -torch.inf)  # −inf hides a key
    if not bool(fine.all()):
        raise PlanError(
            f"{label} holds NaN or infinity, which would spread through the whole model"
        )
    return tensor


def _spread(value: Tensor, x: Tensor, where: Where, site: str) -> Tensor:
    """The value in the shape of ``x``, or at bias in one that ``x`` can take."""
    shape = x.shape
    if site == "bias" and value.dim() > 1 and value.shape[-2] > 1:
        shape = torch.Size((*shape[:2], where.positions.shape[1], shape[3]))
    try:
        return value.to(x).expand(shape)
    except RuntimeError as error:
        raise PlanError(
            f"a value of shape {list(value.shape)} does not fit {list(shape)}, "
            "[batch, position, head, width] (or [batch, head, query, key] at bias, scores and pattern)"
        ) from error


def values_of(source: Trace, site: str, heads: tuple[Head, ...]) -> dict[int, Tensor]:
    """Values of the bound heads per layer, with the head axis in their order."""
    if site in STREAM:
        layers = sorted({head.layer for head in heads})
        return {layer: source.tensor(site, layer).unsqueeze(2) for layer in layers}
    values: dict[int, list[Tensor]] = {}
    for head in heads:
        value = source.of_head(site, head)
        axis = 1 if site == "pattern" else 2
        values.setdefault(head.layer, []).append(value.unsqueeze(axis))
    axis = 1 if site == "pattern" else 2
    return {layer: torch.cat(parts, axis) for layer, parts in values.items()}


def _by_position(value: Tensor, kept: Tensor | None, x: Tensor, where: Where) -> Tensor:
    """Rows of ``value`` at the positions being run; positions it does not have keep ``x``.

    ``kept`` names the positions of ``value``, where they are not simply all of them.
    """
    if kept is None:
        kept = torch.arange(value.shape[1], device=x.device)[None]
    match = where.positions[:, :, None] == kept.to(x.device)[:, None, :]  # [batch, run, kept]
    index = match.int().argmax(-1)[:, :, None, None].expand(x.shape[0], -1, *x.shape[2:])
    picked = value.expand(x.shape[0], -1, -1, -1).gather(1, index)
    # NaN: a position that a shorter prompt of the source's batch does not have.
    known = match.any(-1)[:, :, None, None] & ~picked.isnan()
    return torch.where(known, picked, x)


def same_rows(value: Tensor, x: Tensor, where: Where) -> Tensor:
    """Pattern rows of another run, as long as this one, in place of ``x``; rows it does not have (NaN) keep ``x``.

    Raises:
        PlanError: The runs differ in length.
    """
    n_query, n_key = value.shape[-2:]
    stop = where.first_key + x.shape[-1]
    # In a sweep, runs of shorter prompts stand beside a source that is as wide as the longest.
    fits = stop == n_key or (where.prompts is not None and stop < n_key)
    index = where.positions.clamp(0, n_query - 1)[:, None, :, None]
    shape = (x.shape[0], value.shape[1], x.shape[2], n_key)
    rows = value.expand(x.shape[0], -1, -1, -1).gather(2, index.expand(shape))
    beyond = bool((rows[..., stop:].nan_to_num() != 0).any())
    if not fits or beyond or int(where.positions.max()) >= n_query:
        n_run = max(x.shape[-2], int(where.positions.max()) + 1)
        raise PlanError(
            f"a pattern of {n_query} × {n_key} tokens cannot replace one of {n_run} × {stop}; use prompts of equal "
            "length"
        )
    rows = rows[..., where.first_key : stop]
    return torch.where(rows.isnan(), x, rows)
