"""Carrying out a capture plan: turns positions into rows and columns of each attention call, and back.

A plan speaks of positions in a sequence. An attention call has rows and columns, shifted by left padding and,
while generating, by what the cache already holds. The collector is the one place that knows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from headlab.attention.blocks import whole_blocks
from headlab.attention.keep import (
    STREAM,
    Keep,
    KeepRows,
    KeepStatistics,
    KeepTensors,
    ZGradient,
    whole_layers,
)
from headlab.attention.positions import (
    at_positions,
    is_flat,
    membership,
    per_key,
    resolve_positions,
)
from headlab.attention.seam import Call
from headlab.errors import OutputError, PlanError
from headlab.kernels import COLUMN_STATISTICS, AttentionInputs, Request, RowEdit, attend
from headlab.kernels.dense import attend_rows, row_statistics
from headlab.models.spec import ModelSpec

#: Statistics whose values are key positions.
_INDEX = frozenset({"argmax", "topk_index"})
#: Cases of the engines' ``feature``.
_FEATURES = ("first_mass", "segment_mass", "feature")


@dataclass
class Kept:
    """One kept thing: a part per forward step and layer, joined by :mod:`headlab.attention.assembly`.

    Attributes:
        heads: Query heads asked for, per layer.
        axis: Heads along the head axis, per layer, where it differs: key/value heads, for k and v.
        parts: Tensors per layer, one per forward step.
        labels: Names along a last axis, such as segments.
    """

    heads: dict[int, tuple[int, ...]]
    axis: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[int, list[Tensor]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()


@dataclass
class _Group:
    """Statistics that one pass over the attention call can give together."""

    heads: dict[int, tuple[int, ...]]
    items: dict[str, KeepStatistics]
    queries: object
    z_gradient: ZGradient | None

    @property
    def names(self) -> set[str]:
        return set(self.items)


class Collector:
    """Captures what a plan names while a model runs.

    Args:
        plan: What to keep.
        spec: The model.
        lengths: Real tokens of each prompt; of its decoder's side, in an encoder-decoder model.
        encoder_lengths: Real tokens of each prompt's encoder side, in an encoder-decoder model.

    Raises:
        PlanError: The plan names something twice, or a position beyond a prompt's end.
    """

    def __init__(
        self,
        plan: Sequence[Keep],
        spec: ModelSpec,
        lengths: Tensor,
        encoder_lengths: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.lengths = lengths
        self.encoder_lengths = encoder_lengths
        self.rows: Kept | None = None
        self.query_positions: dict[str, list[Tensor]] = {}
        self.statistics: dict[str, Kept] = {}
        self.tensors: dict[str, Kept] = {}
        self.groups = {
            at: layer.n_heads // layer.n_kv_heads for at, layer in enumerate(spec.layers)
        }
        self._groups: list[_Group] = []
        self._rows_item: KeepRows | None = None
        self._tensor_items: dict[str, KeepTensors] = {}
        self.widths: dict[int, int] = {}
        self.left: Tensor | None = None
        for item in plan:
            if isinstance(item, KeepRows):
                self._add_rows(item)
            elif isinstance(item, KeepStatistics):
                self._add_statistics(item)
            elif isinstance(item, KeepTensors):
                self._add_tensors(item)
            else:
                raise PlanError(
                    f"keep= takes hl.keep.rows, hl.keep.statistics or hl.keep.tensors, not {item!r}"
                )

    def _add_rows(self, item: KeepRows) -> None:
        if self._rows_item is not None:
            raise PlanError("hl.keep.rows is given twice; name all queries in one")
        self._rows_item = item
        self.rows = Kept(item.selection.resolve(self.spec))

    def _add_statistics(self, item: KeepStatistics) -> None:
        heads = item.selection.resolve(self.spec)
        for name in item.names:
            if name in self.statistics:
                raise PlanError(f"statistic {name!r} is asked for twice")
            labels = tuple(item.segments or ()) if name.startswith("segment_") else ()
            if name == "lag_mass":
                labels = tuple(f"{a}..{b - 1}" for a, b in pairwise(item.bins))
            self.statistics[name] = Kept(heads, labels=labels)
            if name == "topk":
                self.statistics["topk_index"] = Kept(heads)
        for group in self._groups:
            apart = (group.queries, item.queries, group.z_gradient, item.z_gradient)
            if group.heads == heads and all(x is None for x in apart):
                group.items |= {name: item for name in item.names}
                return
        items = {name: item for name in item.names}
        self._groups.append(_Group(heads, items, item.queries, item.z_gradient))

    def _add_tensors(self, item: KeepTensors) -> None:
        heads = item.selection.resolve(self.spec)
        for name in item.names:
            if name in self.tensors:
                raise PlanError(f"tensor {name!r} is asked for twice")
            self._tensor_items[name] = item
            of_layers = name in STREAM
            self.tensors[name] = Kept(
                dict.fromkeys(whole_layers(heads, self.spec, name), (0,)) if of_layers else heads
            )

    @property
    def head_axes(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Heads along the head axis of everything kept, per layer."""
        heads = {name: kept.heads for name, kept in self.statistics.items()}
        heads |= {name: kept.heads | kept.axis for name, kept in self.tensors.items()}
        return heads if self.rows is None else heads | {"rows": self.rows.heads}

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Names along the last axis of statistics that have one."""
        return {name: kept.labels for name, kept in self.statistics.items() if kept.labels}

    # -- while the model runs --------------------------------------------------------------------------------

    def put(self, name: str, layer: int, value: Tensor) -> None:
        """Take one step's part of one layer of a kept thing: ``"rows"``, a statistic or a tensor."""
        kept = self.rows if name == "rows" else self.statistics.get(name) or self.tensors[name]
        assert kept is not None
        kept.parts.setdefault(layer, []).append(value)

    def attend(
        self,
        call: Call,
        inputs: AttentionInputs,
        edit_scores: RowEdit | None,
        edit_pattern: RowEdit | None,
    ) -> Tensor | None:
        """Capture rows and statistics of one call.

        Returns:
            z [batch, query, head, d_value] when the engine had to compute it anyway, else None.
        """
        layer = call.layer
        self.widths[layer] = max(self.widths.get(layer, 0), inputs.key_start + inputs.n_keys)
        if inputs.left is not None:
            self.left = inputs.left
        base = Request(z=False, edit_scores=edit_scores, edit_pattern=edit_pattern)
        self._take_rows(call, inputs, base)
        self._take_pattern(call, inputs, base)
        z = None
        for group in self._groups:
            if layer not in group.heads:
                continue
            if "block_map" in group.names:
                call, inputs, base = whole_blocks(
                    call, inputs, base, group.items["block_map"].block
                )
            if group.queries is not None:
                self._some_rows(group, call, inputs, base)
                continue
            n_heads = inputs.q.shape[1]
            every = group.heads[layer] == tuple(range(n_heads)) and group.z_gradient is None
            request = self._request(group, call, inputs, base, z=every and z is None)
            result = attend(inputs, request)
            if result.z is not None:
                z = result.z.transpose(1, 2)
            self._store(group, call, result.statistics)
        return z

    def _take_rows(self, call: Call, inputs: AttentionInputs, base: Request) -> None:
        if self.rows is None or call.layer not in self.rows.heads:
            return
        assert self._rows_item is not None
        index = self._row_index(self._rows_item.queries, call, inputs)
        if index.shape[1] == 0:
            return
        heads = self.rows.heads[call.layer]
        upstream = _upstream(self._rows_item.z_gradient, call, inputs)
        request = _request(base, heads=heads, z_gradient=upstream)
        pattern = attend_rows(inputs, request, index).pattern
        self.put("rows", call.layer, self._wide(pattern, inputs))
        if call.layer == min(self.rows.heads):
            self._note_queries("rows", call, index)

    def _take_pattern(self, call: Call, inputs: AttentionInputs, base: Request) -> None:
        kept = self.tensors.get("pattern")
        if kept is None or call.layer not in kept.heads:
            return
        every = torch.arange(inputs.n_queries, device=inputs.q.device).expand(inputs.q.shape[0], -1)
        request = _request(base, heads=kept.heads[call.layer])
        pattern = self._wide(attend_rows(inputs, request, every).pattern, inputs)
        self.put("pattern", call.layer, self._placed("pattern", call.layer, pattern))

    def _wide(self, rows: Tensor, inputs: AttentionInputs) -> Tensor:
        """Rows over every key since the start, where a sliding cache has dropped the first ones."""
        return torch.nn.functional.pad(rows, (inputs.key_start, 0)) if inputs.key_start else rows

    def _some_rows(self, group: _Group, call: Call, inputs: AttentionInputs, base: Request) -> None:
        index = self._row_index(group.queries, call, inputs)
        if group.names & COLUMN_STATISTICS:
            counted = torch.zeros(inputs.q.shape[0], inputs.n_queries, dtype=torch.bool)
            counted = counted.to(index.device).scatter(1, index, True)
            request = _request(self._request(group, call, inputs, base, z=False), counted=counted)
            only = tuple(name for name in request.statistics if name in COLUMN_STATISTICS)
            result = attend(inputs, _request(request, statistics=only))
            self._store(group, call, result.statistics)
        if index.shape[1]:
            request = self._request(group, call, inputs, base, z=False)
            self._store(group, call, row_statistics(attend_rows(inputs, request, index)))
            if call.layer == min(group.heads):
                for name in group.names | ({"topk_index"} if "topk" in group.names else set()):
                    self._note_queries(name, call, index)

    def _note_queries(self, name: str, call: Call, index: Tensor) -> None:
        if self._rows_item is not None and name == "rows" and self._rows_item.queries is None:
            return  # every query: the axis is the position itself
        positions = call.query_positions.gather(1, index)
        self.query_positions.setdefault(name, []).append(positions)

    def _request(
        self, group: _Group, call: Call, inputs: AttentionInputs, base: Request, z: bool
    ) -> Request:
        items, names = group.items, group.names
        engine_names = names - set(_FEATURES) | ({"feature"} if names & set(_FEATURES) else set())
        engine_names |= {"topk_index"} if "topk" in names else set()
        segments = items.get("segment_z")
        lag = items.get("lag_mass")
        local, topk, block = items.get("local_mass"), items.get("topk"), items.get("block_map")
        return _request(
            base,
            heads=group.heads[call.layer],
            z=z,
            statistics=tuple(sorted(engine_names)),
            features=self._features(group, call),
            local_window=local.window if local else 1,
            lag_edges=lag.bins if lag else (),
            k=topk.k if topk else 1,
            targets=self._targets(items.get("target_mass"), call, inputs),
            counted=self._real_queries(call),
            block=block.block if block else 64,
            segments=None if segments is None else self._members(segments, call),
            z_gradient=_upstream(group.z_gradient, call, inputs),
        )

    def _real_queries(self, call: Call) -> Tensor | None:
        """Which query rows are no padding, or None when all are real."""
        if call.inputs.left is not None:
            return call.query_positions >= 0
        lengths = self.query_lengths(call.layer)
        if call.inputs.query_start or bool((lengths == lengths.max()).all()):
            return None
        return call.query_positions < lengths.to(call.inputs.q.device)[:, None]

    def _features(self, group: _Group, call: Call) -> Tensor | None:
        positions = call.key_positions
        columns = []
        for name in _FEATURES:
            item = group.items.get(name)
            if item is None:
                continue
            if name == "first_mass":
                columns.append(((positions >= 0) & (positions < item.n_first))[..., None])
            elif name == "segment_mass":
                columns.append(self._members(item, call))
            else:
                assert item.x is not None
                columns.append(at_positions(per_key(item.x), positions, "x"))
        if not columns:
            return None
        dtype = torch.promote_types(call.inputs.q.dtype, torch.float32)
        return torch.cat([column.to(dtype) for column in columns], -1)

    def _members(self, item: KeepStatistics, call: Call) -> Tensor:
        """Which key columns belong to which segment, [batch, key, segment]."""
        assert item.segments is not None
        positions = call.key_positions
        return torch.stack(
            [membership(name, span, positions) for name, span in item.segments.items()], -1
        )

    def _targets(
        self, item: KeepStatistics | None, call: Call, inputs: AttentionInputs
    ) -> Tensor | None:
        if item is None:
            return None
        assert item.targets is not None
        positions = call.query_positions
        targets = item.targets.to(positions.device)
        targets = (
            targets.expand(positions.shape[0], -1)
            if targets.dim() == 2
            else (targets.expand(positions.shape[0], *targets.shape))
        )
        known = (positions >= 0) & (positions < targets.shape[1])
        target = targets.gather(1, positions.clamp(0, targets.shape[1] - 1))
        left = 0 if inputs.left is None else inputs.left[:, None]
        column = target + left - inputs.key_start
        inside = known & (target >= 0) & (column >= 0) & (column < inputs.n_keys)
        return torch.where(inside, column, -1)

    def _row_index(self, queries: object, call: Call, inputs: AttentionInputs) -> Tensor:
        """Rows of this call, [batch, n], that a plan's query positions name."""
        n, device, batch = inputs.n_queries, inputs.q.device, inputs.q.shape[0]
        if queries is None:
            return torch.arange(n, device=device).expand(batch, -1)
        left = torch.zeros(batch, dtype=torch.long, device=device)
        left = left if inputs.left is None else inputs.left.to(device)
        lengths = self.query_lengths(call.layer).to(device)
        if isinstance(queries, str) and queries == "generated":
            last = lengths - 1 + left - inputs.query_start  # the last row of the prompt
            if bool((last < 0).all()):  # decoding: each row predicts a generated token
                return torch.arange(n, device=device).expand(batch, -1)
            index = last[:, None]
        else:
            index = resolve_positions(queries, lengths, "queries") + left[:, None]
            index = index - inputs.query_start
        # Of a prompt run in several steps, each step has some of the rows; of a batch, all in the first.
        return index[:, ((index >= 0) & (index < n)).all(0)]

    def encoder_side(self, layer: int, keys: bool = False) -> bool:
        """Whether a layer's queries (or keys) are the encoder's tokens in an encoder-decoder model."""
        stack = self.spec.layers[layer].stack
        return self.encoder_lengths is not None and (
            stack == "encoder" or (keys and stack == "cross")
        )

    def query_lengths(self, layer: int, keys: bool = False) -> Tensor:
        """Prompt lengths that positions of a layer's queries (or keys) count in."""
        if self.encoder_side(layer, keys):
            assert self.encoder_lengths is not None
            return self.encoder_lengths
        return self.lengths

    def tensor_positions(self, name: str) -> tuple[int, ...] | None:
        """Positions a kept tensor is wanted at; None for all."""
        return self._tensor_items[name].positions

    def _store(self, group: _Group, call: Call, values: dict[str, Tensor]) -> None:
        start = 0
        feature = values.pop("feature", None)
        for name in _FEATURES:
            if feature is not None and name in group.items:
                item = group.items[name]
                width = {"first_mass": 1, "segment_mass": len(item.segments or ())}.get(
                    name, feature.shape[-1] - start
                )
                part = feature[..., start : start + width]
                single = name == "first_mass" or (name == "feature" and is_flat(item.x))
                values[name] = part[..., 0] if single else part
                start += width
        inputs = call.inputs
        for name, value in values.items():
            if name in _INDEX:
                left = 0 if inputs.left is None else inputs.left.view(-1, *[1] * (value.dim() - 1))
                value = torch.where(value >= 0, value + inputs.key_start - left, -1)
            if name in COLUMN_STATISTICS and inputs.key_start:
                width = 1 if name == "received" else group.items[name].block
                value = torch.nn.functional.pad(value, (inputs.key_start // width, 0))
            self.put(name, call.layer, value)

    def take(
        self, name: str, layer: int, value: Tensor, inputs: AttentionInputs | None = None
    ) -> None:
        """Keep q, k, v, z, result or the stream of one call, [batch, position, head, width]."""
        kept = self.tensors.get(name)
        if kept is None or layer not in kept.heads:
            return
        heads = list(kept.heads[layer])
        if name in ("k", "v"):
            group = self.spec.layers[layer].n_heads // value.shape[2]
            heads = sorted({head // group for head in heads})
            kept.axis[layer] = tuple(heads)
            self.groups[layer] = group  # 1 where an edit has split the groups
            if inputs is not None and inputs.query_start:
                if self.spec.layers[layer].stack == "cross":
                    return  # the encoder's, kept at the first step
                value = value[
                    :, value.shape[1] - inputs.n_queries :
                ]  # the others were kept when new
        if heads != list(range(value.shape[2])):
            value = value[:, :, heads]
        self.put(name, layer, self._placed(name, layer, value))

    def _placed(self, name: str, layer: int, value: Tensor) -> Tensor:
        """The value where the plan wants it."""
        place = self._tensor_items[name].offload
        if place == "cpu":
            return value.detach().to("cpu")
        if isinstance(place, Path):
            step = len(self.tensors[name].parts.get(layer, ()))
            return _mapped(place, name, layer, step, value)
        return value if value.requires_grad else value.clone()

    def wants(self, name: str, layer: int) -> bool:
        """Whether the plan keeps this tensor of this layer."""
        return name in self.tensors and layer in self.tensors[name].heads


def _upstream(gradients: ZGradient | None, call: Call, inputs: AttentionInputs) -> Tensor | None:
    """The gradient at this call's z, [batch, head, query, d_value]."""
    if gradients is None:
        return None
    if call.layer not in gradients:
        raise PlanError(f"z_gradient= has no layer {call.layer}, of which statistics are kept")
    batch, heads, queries, _ = inputs.q.shape
    shape = (batch, queries, heads, inputs.v.shape[3])
    found = gradients[call.layer]
    if found.shape != shape:
        raise PlanError(
            f"z_gradient= of layer {call.layer} is {list(found.shape)}, but z is {list(shape)} "
            "[batch, position, head, d_value]"
        )
    return found.to(inputs.q.device).transpose(1, 2)


def _request(base: Request, **changes: object) -> Request:
    return replace(base, **changes)  # type: ignore[arg-type]  # checked by the dataclass's users


def _mapped(folder: Path, name: str, layer: int, step: int, value: Tensor) -> Tensor:
    """The value in a file that is mapped into memory: the system pages it in and out."""
    path = folder / f"{name}.layer{layer:03d}.step{step:05d}.bin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(
            missing_ok=True
        )  # never write through a mapping that an earlier trace still holds
        mapped = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype)
    except (OSError, RuntimeError) as error:
        raise OutputError(f"cannot write captured tensors to {folder}: {error}") from error
    return mapped.view(value.shape).copy_(value.detach())
