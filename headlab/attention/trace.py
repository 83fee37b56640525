"""What a run left behind: rows, statistics and tensors under the names they were asked for by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headlab.attention.heads import Head
from headlab.attention.keep import STREAM
from headlab.errors import OutputError, PlanError

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = "headlab-trace-1"


@dataclass(frozen=True)
class Trace:
    """The captured part of one run; axes are batch first, and every position is a sequence's own.

    A batch of prompts of unequal length is aligned at its start: positions a shorter prompt does not have hold
    NaN (−1 in index statistics), and keys it does not have hold 0.

    Attributes:
        model: Name of the model.
        ids: Token ids, [batch, position]; −1 beyond a prompt's end.
        lengths: Tokens of each prompt, [batch].
        tokens: The tokens as text, per prompt.
        logits: Logits by position, [batch, position, vocab], of the last position only, [batch, 1, vocab], or
            None, as asked for.
        query_positions: Position of every kept query, [batch, query], of ``"rows"`` and of statistics that
            were kept for some queries only.
        heads: Heads along the head axis per layer, under ``"rows"`` and the names of statistics and tensors:
            query heads, or for k and v the key/value heads they use.
        labels: Names along the last axis of statistics that have one, such as segments.
    """

    model: str
    ids: Int[Tensor, "batch position"]
    lengths: Int[Tensor, " batch"]
    tokens: tuple[tuple[str, ...], ...]
    logits: Float[Tensor, "batch position vocab"] | None
    query_positions: dict[str, Tensor]
    heads: dict[str, dict[int, tuple[int, ...]]]
    labels: dict[str, tuple[str, ...]]
    _rows: dict[int, Tensor] = field(repr=False)
    _statistics: dict[str, dict[int, Tensor]] = field(repr=False)
    _tensors: dict[str, dict[int, Tensor]] = field(repr=False)
    #: Query heads per entry of k and v, per layer; 1 where an edit split the groups.
    _groups: dict[int, int] = field(repr=False)

    @property
    def n_positions(self) -> int:
        """Positions of the longest sequence."""
        return self.ids.shape[1]

    @property
    def row_positions(self) -> Int[Tensor, "batch row"]:
        """Position of every kept row's query."""
        every = torch.arange(self.n_positions, device=self.ids.device).expand(len(self.ids), -1)
        return self.query_positions.get("rows", every)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the kept statistics."""
        return tuple(self._statistics)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the kept tensors."""
        return tuple(self._tensors)

    @property
    def rows(self) -> Float[Tensor, "batch layer head query key"]:
        """Pattern rows of the kept queries; NaN for heads that were not kept.

        Raises:
            PlanError: No rows were kept.
        """
        if not self._rows:
            raise PlanError("this trace kept no rows; ask for them with hl.keep.rows(queries=…)")
        return self._stacked("rows", self._rows, 1)

    def layer_rows(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Pattern rows of one layer's kept heads and queries, without reading the others'.

        Raises:
            PlanError: No rows were kept for this layer.
        """
        if layer not in self._rows:
            raise PlanError(
                f"rows were kept for layers {sorted(self._rows)}, not for layer {layer}"
            )
        return self._rows[layer]

    def statistic(self, name: str, label: str | None = None, *, layer: int | None = None) -> Tensor:
        """A statistic by name, [batch, layer, head, query], with a last axis where it has one.

        Args:
            name: The statistic.
            label: One entry of its last axis by name, such as a segment.
            layer: Only this layer, [batch, head, query] of its kept heads, without reading the others.

        Raises:
            PlanError: It was not kept, or has no such label or layer.
        """
        if name not in self._statistics:
            raise PlanError(
                f"this trace kept no statistic {name!r}; it kept {', '.join(self._statistics) or 'none'}"
            )
        kept = self._statistics[name]
        if layer is not None and layer not in kept:
            raise PlanError(f"{name!r} was kept for layers {sorted(kept)}, not for layer {layer}")
        value = self._stacked(name, kept, 1) if layer is None else kept[layer]
        if label is None:
            return value
        labels = self.labels.get(name, ())
        if label not in labels:
            raise PlanError(f"{name!r} has no {label!r}; it has {', '.join(labels) or 'no labels'}")
        return value.select(-2 if name == "segment_z" else -1, labels.index(label))

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """A tensor by name: [batch, position, head, width], [batch, head, query, key] for ``pattern``, or
        [batch, position, d_model] for the residual stream.

        Args:
            name: ``q``, ``k``, ``v``, ``z``, ``result`` or ``pattern``; k and v have one entry per key/value head;
                ``resid_pre``, ``attn_out``, ``mlp_out`` or ``resid_post``.
            layer: The layer; without it, all kept layers are stacked on an axis after the batch.

        Raises:
            PlanError: It was not kept.
        """
        kept = self._tensors.get(name)
        if kept is None:
            raise PlanError(
                f"this trace kept no tensor {name!r}; it kept {', '.join(self._tensors) or 'none'}; "
                f"ask for it with hl.keep.tensors({name!r})"
            )
        if layer is not None and layer not in kept:
            raise PlanError(f"{name!r} was kept for layers {sorted(kept)}, not for layer {layer}")
        value = self._stacked(name, kept, 1) if layer is None else kept[layer]
        return value.squeeze(-2) if name in STREAM else value

    def of_head(self, name: str, head: Head) -> Tensor:
        """One head's part of a tensor: [batch, position, width], or [batch, query, key] for ``pattern``.

        Raises:
            PlanError: It was not kept for this head.
        """
        value = self.tensor(name, head.layer)
        heads = self.heads[name][head.layer]
        group = self._groups[head.layer]
        wanted = head.head
        if name in ("k", "v"):
            wanted //= group
        if wanted not in heads:
            raise PlanError(f"{name!r} was not kept for head {head}")
        return value.select(1 if name == "pattern" else 2, heads.index(wanted))

    def layers(self, name: str) -> tuple[int, ...]:
        """Layers along the layer axis of ``"rows"``, a statistic or a tensor."""
        return tuple(sorted(self.heads[name]))

    def _stacked(self, name: str, per_layer: dict[int, Tensor], axis: int) -> Tensor:
        layers = sorted(per_layer)
        kept = self.heads[name]
        if len({kept[layer] for layer in layers}) == 1:
            parts = [per_layer[layer] for layer in layers]
        else:
            every = sorted({head for layer in layers for head in kept[layer]})
            head_axis = 2 if name in ("q", "k", "v", "z", "result") else 1
            parts = [_spread(per_layer[at], kept[at], every, head_axis) for at in layers]
        if len({part.shape for part in parts}) > 1:
            raise PlanError(
                f"layers {layers} differ in the shape of {name!r}, so they cannot be stacked; "
                "keep layers of one shape or read them one by one"
            )
        return torch.stack(parts, axis)

    def head_axis(self, name: str) -> tuple[int, ...]:
        """Heads along the head axis of ``"rows"``, a statistic or a tensor: those kept in any layer."""
        return tuple(sorted({head for heads in self.heads[name].values() for head in heads}))

    def to_frame(self, what: str | None = None) -> pd.DataFrame:
        """A tidy table: one line per prompt, layer, head and query.

        Args:
            what: ``"rows"`` for pattern rows (one line per key), the name of one statistic, or None for every
                statistic with a query axis, and for rows where no statistic was kept.
        """
        from headlab.attention.frame import rows_frame, statistics_frame

        if what == "rows" or (what is None and not self._statistics):
            return rows_frame(self)
        return statistics_frame(self, self.statistics if what is None else (what,))

    def save(self, folder: str | Path) -> Path:
        """Write ``trace.safetensors`` and ``trace.json`` into a folder.

        Raises:
            OutputError: The folder cannot be written.
        """
        folder = Path(folder)
        tensors = {"ids": self.ids, "lengths": self.lengths}
        if self.logits is not None:
            tensors["logits"] = self.logits
        tensors |= {f"queries/{name}": value for name, value in self.query_positions.items()}
        tensors |= {f"rows/{layer}": value for layer, value in self._rows.items()}
        for kind, table in (("statistics", self._statistics), ("tensors", self._tensors)):
            for name, layers in table.items():
                tensors |= {f"{kind}/{name}/{layer}": value for layer, value in layers.items()}
        about = about_trace(
            model=self.model,
            tokens=self.tokens,
            heads=self.heads,
            labels=self.labels,
            groups=self._groups,
            statistics=list(self._statistics),
            tensors=list(self._tensors),
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ready = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
            for name, write in (
                ("trace.safetensors", lambda path: save_file(ready, path)),
                ("trace.json", lambda path: path.write_text(json.dumps(about), "utf-8")),
            ):
                partial = folder / f"{name}.partial"
                partial.touch()
                mode = partial.stat().st_mode  # safetensors would leave it to its owner alone
                write(partial)
                partial.chmod(mode)
                partial.replace(folder / name)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"cannot write the trace to {folder}: {error}") from error
        return folder

    @staticmethod
    def load(folder: str | Path) -> Trace:
        """Open what :meth:`save` or :meth:`headlab.model.Model.stream` wrote.

        The file is mapped into memory: values are read when they are first used, so a trace may be far larger than
        memory. Layers are read one by one with ``layer=``.

        Raises:
            OutputError: The folder holds no readable trace.
        """
        folder = Path(folder)
        try:
            about = json.loads((folder / "trace.json").read_text("utf-8"))
            if about["format"] != _FORMAT:
                raise OutputError(f"{folder} was written as {about['format']!r}, not {_FORMAT!r}")
            with safe_open(folder / "trace.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _rebuilt(about, tensors)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            SafetensorError,
        ) as error:
            if (folder / "trace.partial").exists() and not holds_trace(folder):
                raise OutputError(
                    f"{folder} holds an unfinished trace; run the command that began it once more to finish it"
                ) from error
            if not folder.exists():
                raise OutputError(f"there is no folder {folder}, and so no trace") from error
            raise OutputError(f"{folder} holds no readable trace: {error!r}") from error

    def __repr__(self) -> str:
        lines = [
            f"Trace of {self.model}: {len(self.lengths)} prompt(s) of "
            f"{', '.join(str(int(n)) for n in self.lengths[:8])}"
            f"{', …' if len(self.lengths) > 8 else ''} tokens"
        ]
        if self._rows:
            lines.append(f"  rows {_shapes(self._rows)} [batch, layer, head, query, key]")
        for name, kept in self._statistics.items():
            lines.append(f"  statistic {name!r} {_shapes(kept)}")
        for name, kept in self._tensors.items():
            lines.append(f"  tensor {name!r} {_shapes(kept)}")
        if self.logits is not None:
            lines.append(f"  logits {list(self.logits.shape)}")
        return "\n".join(lines)


def holds_trace(folder: Path) -> bool:
    """Whether a folder holds a finished trace."""
    return (folder / "trace.json").exists() and (folder / "trace.safetensors").exists()


def check_free(folder: Path) -> None:
    """Refuse to write over a finished trace.

    Raises:
        OutputError: The folder holds one.
    """
    if holds_trace(folder):
        raise OutputError(
            f"{folder} holds a finished trace of another prompt or with other settings: choose another folder, or "
            "replace it with --fresh (fresh=True)"
        )


def about_trace(
    *,
    model: str,
    tokens: Sequence[Sequence[str]],
    heads: Mapping[str, Mapping[int, tuple[int, ...]]],
    labels: Mapping[str, tuple[str, ...]],
    groups: Mapping[int, int],
    statistics: Sequence[str],
    tensors: Sequence[str],
) -> dict[str, Any]:
    """What ``trace.json`` says of the tensors in ``trace.safetensors``; see :class:`Trace`."""
    return {
        "format": _FORMAT,
        "model": model,
        "tokens": tokens,
        "heads": {name: list(kept.items()) for name, kept in heads.items()},
        "labels": labels,
        "groups": list(groups.items()),
        "statistics": statistics,
        "tensors": tensors,
    }


def _rebuilt(about: dict[str, Any], tensors: dict[str, Tensor]) -> Trace:
    rows: dict[int, Tensor] = {}
    queries: dict[str, Tensor] = {}
    tables: dict[str, dict[str, dict[int, Tensor]]] = {
        kind: {name: {} for name in about[kind]} for kind in ("statistics", "tensors")
    }
    for key, value in tensors.items():
        kind, *rest = key.split("/")
        if kind == "queries":
            queries[rest[0]] = value
        elif kind == "rows":
            rows[int(rest[0])] = value
        elif kind in tables:
            tables[kind][rest[0]][int(rest[1])] = value
    return Trace(
        model=about["model"],
        ids=tensors["ids"],
        lengths=tensors["lengths"],
        tokens=tuple(tuple(tokens) for tokens in about["tokens"]),
        logits=tensors.get("logits"),
        query_positions=queries,
        heads={
            name: {layer: tuple(heads) for layer, heads in kept}
            for name, kept in about["heads"].items()
        },
        labels={name: tuple(labels) for name, labels in about["labels"].items()},
        _rows=rows,
        _statistics=tables["statistics"],
        _tensors=tables["tensors"],
        _groups=dict(about["groups"]),
    )


def _shapes(per_layer: dict[int, Tensor]) -> str:
    shapes = list(dict.fromkeys(tuple(value.shape) for value in per_layer.values()))
    if len(shapes) == 1:
        batch, *rest = shapes[0]
        return str([batch, len(per_layer), *rest])
    return f"{' or '.join(str(list(shape)) for shape in shapes)} in {len(per_layer)} layers"


def _spread(value: Tensor, heads: tuple[int, ...], every: list[int], axis: int) -> Tensor:
    """Heads at their place among ``every``, with blanks for the others."""
    shape = list(value.shape)
    shape[axis] = len(every)
    blank = value.new_full(shape, torch.nan if value.is_floating_point() else -1)
    place = torch.tensor([every.index(head) for head in heads], device=value.device)
    return blank.index_copy(axis, place, value)
