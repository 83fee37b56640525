"""What a streamed trace holds, and where: known before the run, so that everything can be written in place."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import torch
import transformers
from torch import Tensor

import headlab
from headlab.attention.collector import Collector
from headlab.attention.keep import Keep, KeepRows, KeepStatistics, KeepTensors, Selection
from headlab.attention.positions import at_positions, per_key, resolve_positions
from headlab.attention.tensorfile import Entries
from headlab.errors import PlanError
from headlab.kernels.choice import VARIABLE
from headlab.models import weights_sha256
from headlab.models.spec import ModelSpec

if TYPE_CHECKING:
    from headlab.attention.session import Session
    from headlab.model import Model

Logits = Literal["all", "last", "none"]


def streamable(plan: Sequence[Keep], n: int, chunk: int) -> list[Keep]:
    """The plan for one prompt of n tokens, every query a position counted from its start.

    Raises:
        PlanError: It keeps what grows with the square of the prompt, or does not fit the prompt or the chunk.
    """
    lengths, last = torch.tensor([n]), torch.tensor([[n - 1]])
    made: list[Keep] = []
    for item in plan:
        if isinstance(item, KeepTensors):
            if "pattern" in item.names:
                raise _square("the pattern")
            made.append(replace(item, offload=None))  # everything goes to the disk
            continue
        if item.z_gradient is not None:
            raise PlanError(
                "z_gradient= comes of a backward pass over the whole prompt; keep what it weights with model.trace"
            )
        if item.queries is not None:
            generated = isinstance(item.queries, str) and item.queries == "generated"
            queries = [-1] if generated else item.queries
            item = replace(item, queries=resolve_positions(queries, lengths, "queries"))
        elif isinstance(item, KeepRows):
            raise _square("the rows of all queries")
        if isinstance(item, KeepStatistics):
            if item.x is not None:
                at_positions(per_key(item.x), last, "x")  # hours before the key that it lacks
            if "block_map" in item.names and chunk < n and chunk % item.block:
                raise PlanError(
                    f"chunk={chunk} must be a multiple of block_map's block of {item.block}"
                )
        made.append(item)
    return made


def _square(what: str) -> PlanError:
    return PlanError(
        f"{what} cannot be streamed: it grows with the square of the prompt; keep rows of chosen queries, or run the "
        "prompt in one pass with model.trace (--chunk of its length)"
    )


class Layout:
    """Names, shapes and types of everything a stream writes, measured by running the prompt's first token.

    Args:
        model: The model.
        session: Its session.
        ids: The prompt, [1, position].
        plan: What :func:`streamable` has made of the plan.
        logits: Which logits to keep.

    Attributes:
        entries: Shape and type of every tensor in the file of the trace.
        columns: Those that are sums over queries.
        queries: Positions [query] of things that are kept for some queries only.
        block: Side of the squares of ``block_map``.
        collector: Knows heads and labels of everything kept.
    """

    def __init__(
        self, model: Model, session: Session, ids: Tensor, plan: Sequence[Keep], logits: Logits
    ) -> None:
        n = ids.shape[1]
        self.queries = _queries(plan, n)
        self.block = 1
        for item in plan:
            if isinstance(item, KeepStatistics) and "block_map" in item.names:
                self.block = item.block
        self.collector = measured = _Measuring(
            [_at_first_token(item) for item in plan],
            model.spec,
            torch.ones(1, dtype=torch.long, device=ids.device),
        )
        with session.running(measured.lengths, measured, ids=ids):
            output = model.module(input_ids=ids[:, :1])
        entries = {"ids": ((1, n), torch.int64), "lengths": ((1,), torch.int64)}
        head = getattr(output, "logits", None)
        if logits != "none" and head is not None:
            entries["logits"] = ((1, n if logits == "all" else 1, head.shape[-1]), head.dtype)
        for name, positions in self.queries.items():
            entries[f"queries/{name}"] = ((1, len(positions)), torch.int64)
        for (name, layer), (shape, dtype) in measured.seen.items():
            entries[place(measured, name, layer)] = (self._grown(name, list(shape), n), dtype)
        self.entries: Entries = entries
        self.columns: Entries = {
            name: entry for name, entry in entries.items() if name.split("/")[1:2] == ["received"]
        }

    def _grown(self, name: str, shape: list[int], n: int) -> tuple[int, ...]:
        """The shape over the whole prompt of what has this shape over its first token."""
        if name == "block_map":
            shape[2:4] = [-(-n // self.block)] * 2
        elif name == "received":
            shape[2] = n
        else:
            wanted = self.queries.get(name)
            shape[query_axis(self.collector, name)] = n if wanted is None else len(wanted)
            if name == "rows":
                shape[3] = n
        return tuple(shape)


def place(collector: Collector, name: str, layer: int) -> str:
    """What a layer's part of a kept thing is called in the file of a trace."""
    if name == "rows":
        return f"rows/{layer}"
    return f"{'tensors' if name in collector.tensors else 'statistics'}/{name}/{layer}"


def query_axis(collector: Collector, name: str) -> int:
    """The axis of a kept thing along which a prompt's queries lie."""
    return 1 if name in collector.tensors else 2


def settings_of(
    model: Model, ids: Tensor, plan: Sequence[Keep], chunk: int, logits: Logits
) -> dict[str, str]:
    """Everything the numbers of a streamed trace depend on, by a name that a message can use."""
    kept = json.dumps([_described(item, model.spec) for item in plan], sort_keys=True)
    settings = {
        "model": model.name,
        # as they are now: they may have been changed since the model was loaded
        "weights": weights_sha256(model.module),
        "configuration": _sha256(model.module.config.to_json_string(use_diff=False).encode()),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "prompt": _sha256(ids.cpu().numpy().tobytes()),
        "keep": _sha256(kept.encode()),
        "chunk": str(chunk),
        "logits": logits,
        "engine": os.environ.get(VARIABLE, "auto"),
        "headlab": headlab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if model.edited:
        # Edits are functions, which no file can tell apart: a run under them is not gone on with.
        settings["edits"] = uuid4().hex
    return settings


class _Measuring(Collector):
    """A collector that only notes the shape and type of what it is given."""

    def __init__(self, plan: Sequence[Keep], spec: ModelSpec, lengths: Tensor) -> None:
        super().__init__(plan, spec, lengths)
        self.seen: dict[tuple[str, int], tuple[tuple[int, ...], torch.dtype]] = {}

    def put(self, name: str, layer: int, value: Tensor) -> None:
        """Note one layer's part of a kept thing."""
        self.seen[name, layer] = (tuple(value.shape), value.dtype)


def _at_first_token(item: Keep) -> Keep:
    if isinstance(item, KeepTensors) or item.queries is None:
        return item
    return replace(item, queries=[0])


def _queries(plan: Sequence[Keep], n: int) -> dict[str, Tensor]:
    """Positions [query] of what is kept for some of them only."""
    queries: dict[str, Tensor] = {}
    for item in plan:
        if isinstance(item, KeepTensors):
            if item.positions is not None:
                at = resolve_positions(item.positions, torch.tensor([n]), "positions")[0]
                queries |= dict.fromkeys(item.names, at)
        elif isinstance(item.queries, Tensor):  # as `streamable` has made them
            names = ("rows",) if isinstance(item, KeepRows) else item.names
            names += ("topk_index",) if "topk" in names else ()
            queries |= dict.fromkeys(names, item.queries[0])
    return queries


def _described(value: Any, spec: ModelSpec) -> Any:
    """A plan as text that is the same for the same plan."""
    if isinstance(value, Selection):
        return sorted(value.resolve(spec).items())
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), _sha256(content)]
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__, _described(parts, spec)]
    if isinstance(value, Mapping):
        return [[str(name), _described(part, spec)] for name, part in value.items()]
    if isinstance(value, list | tuple):
        return [_described(part, spec) for part in value]
    return repr(value)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
