"""Traces of prompts of any length: prefilled in chunks, written as they come, gone on with after a kill.

A chunk of C tokens of a prompt of N needs O(C · N) memory for the model's masks; keys and values stay in the model's
own cache. What is kept leaves memory as soon as its layer has run, for its place in the file that
:meth:`~headlab.attention.trace.Trace.load` opens.

Rows of a chunk are written where they belong, so writing them again after a kill changes nothing. Sums over queries
(``received``) grow from chunk to chunk: two copies take turns, one read and one written, and the number of finished
chunks in the journal says which one counts.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headlab.attention.collector import Collector
from headlab.attention.keep import Keep, is_whole
from headlab.attention.stream_layout import (
    Layout,
    Logits,
    place,
    query_axis,
    settings_of,
    streamable,
)
from headlab.attention.tensorfile import TensorFile
from headlab.attention.trace import Trace, about_trace, check_free
from headlab.attention.unfinished import KeyValues, Unfinished, working
from headlab.errors import PlanError, PromptError, UnsupportedError

if TYPE_CHECKING:
    from headlab.attention.session import Session
    from headlab.model import Model

#: Tokens of a chunk, where nothing else is asked for.
CHUNK = 2048


def why_not(model: Model) -> str | None:
    """Why a model's prompts cannot be streamed, as a clause; None where they can."""
    if not all(layer.causal for layer in model.spec.layers):
        return "not all of its layers are a decoder's"
    if cache_argument(model.module) is None:
        return "its forward pass takes no cache"
    # Any other kind of layer keeps a state that is not the keys and values it was given.
    if {type(layer) for layer in _new_cache(model).layers} - {
        DynamicLayer,
        DynamicSlidingWindowLayer,
    }:
        return "its cache holds more than keys and values"
    return None


def stream(
    model: Model,
    session: Session,
    ids: Tensor,
    plan: Sequence[Keep],
    out: Path,
    *,
    chunk: int,
    logits: Logits,
    fresh: bool,
    tell: Callable[[str], None],
) -> Trace:
    """Trace a prompt [1, position] chunk by chunk into a folder; see :meth:`headlab.model.Model.stream`."""
    reason = why_not(model)
    if reason is not None:
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) cannot be streamed: {reason}; run the prompt in one "
            "pass with model.trace (--chunk of its length)"
        )
    if len(ids) > 1:
        raise PromptError(f"a stream runs one prompt, not {len(ids)}; use model.trace for a batch")
    if not is_whole(chunk) or chunk < 1:
        raise PlanError(f"chunk={chunk!r} must be a whole number of at least 1")
    if logits not in ("all", "last", "none"):
        raise PlanError(f"logits={logits!r} must be 'all', 'last' or 'none'")
    plan = streamable(plan, ids.shape[1], chunk)
    with model.alone(), torch.no_grad():
        layout = Layout(model, session, ids, plan, logits)
        settings = settings_of(model, ids, plan, chunk, logits)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        if not fresh and _is_whole(out, digest):
            tell(f"{out} holds this trace already")
            return Trace.load(out)
        if not (fresh or Unfinished(out, settings).begun):
            check_free(out)
        with working(out, settings) as unfinished:
            if fresh:
                unfinished.clear()
            unfinished.read()
            run = _Run(model, session, ids, plan, chunk, logits, layout, unfinished, digest, tell)
            run.finish()
            unfinished.remove()
        return Trace.load(out)


class _Run:
    """The work itself, from wherever an earlier run has left it."""

    def __init__(
        self,
        model: Model,
        session: Session,
        ids: Tensor,
        plan: Sequence[Keep],
        chunk: int,
        logits: Logits,
        layout: Layout,
        unfinished: Unfinished,
        digest: str,
        tell: Callable[[str], None],
    ) -> None:
        self.model, self.session, self.plan = model, session, plan
        self.ids, self.n, self.chunk, self.logits = ids, ids.shape[1], chunk, logits
        self.layout, self.unfinished, self.digest, self.tell = layout, unfinished, digest, tell
        self.n_chunks = -(-self.n // chunk)
        self.lengths = torch.tensor([self.n], device=ids.device)
        self.whole: TensorFile
        self.spare: TensorFile

    def finish(self) -> None:
        """Run the chunks that are missing, and put the whole trace in its place."""
        unfinished, out = self.unfinished, self.unfinished.out
        unfinished.check(self.n_chunks)
        if unfinished.finished < self.n_chunks:
            self._open()
            self._run_chunks()
        about = unfinished.folder / "trace.json"
        if unfinished.trace.exists():
            about.write_text(json.dumps(self._about()), "utf-8")
            # A folder with one of the two files holds no trace, so never a mixed one.
            (out / "trace.json").unlink(missing_ok=True)
            unfinished.trace.replace(out / "trace.safetensors")
        about.replace(out / "trace.json")

    def _open(self) -> None:
        unfinished, about = self.unfinished, {"configuration": self.digest}
        if not unfinished.finished:
            unfinished.clear()
        elif not (unfinished.trace.exists() and unfinished.columns.exists()):
            raise unfinished.damaged("files are missing")
        try:
            self.whole = TensorFile(unfinished.trace, self.layout.entries, about)
            self.spare = TensorFile(unfinished.columns, self.layout.columns, about)
        except ValueError as error:
            raise unfinished.damaged(str(error)) from error
        tensors = self.whole.tensors
        tensors["ids"].copy_(self.ids)
        tensors["lengths"].copy_(self.lengths)
        for name, positions in self.layout.queries.items():
            tensors[f"queries/{name}"].copy_(positions)

    def _run_chunks(self) -> None:
        begun = self.unfinished.finished
        if begun:
            self.tell(f"going on from token {begun * self.chunk:,} of {self.n:,}")
        cache, new = self._cache()
        clock = _Clock(self.n, self.chunk)
        for index in range(begun, self.n_chunks):
            started = time.monotonic()
            new.clear()
            self._run_chunk(index, cache)
            self.whole.flush()
            self.spare.flush()
            if index < self.n_chunks - 1:  # nothing comes after the last
                self.unfinished.append(new)
            self.unfinished.note(index + 1)
            self.tell(clock.after(index, time.monotonic() - started))

    def _run_chunk(self, index: int, cache: DynamicCache) -> None:
        module, tensors = self.model.module, self.whole.tensors
        start, stop = index * self.chunk, min((index + 1) * self.chunk, self.n)
        argument = cache_argument(module)
        assert argument is not None
        options: dict[str, Any] = {argument: cache, "use_cache": True}
        if self.logits != "all" and "logits_to_keep" in _parameters(module):
            options["logits_to_keep"] = 1
        with self.session.running(self.lengths, _Writing(self, index), ids=self.ids):
            output = module(input_ids=self.ids[:, start:stop], **options)
        if "logits" not in tensors:
            return
        if self.logits == "all":
            tensors["logits"][:, start:stop].copy_(output.logits)
        elif stop == self.n:
            tensors["logits"].copy_(output.logits[:, -1:])

    def _cache(self) -> tuple[DynamicCache, KeyValues]:
        """The model's cache as finished chunks have left it, and where it notes what it is given."""
        cache, new, blocks = _new_cache(self.model), {}, self.model.blocks
        for layer, k, v in self.unfinished.stored():
            device = next(blocks.modules[blocks.of_layer(layer)].parameters()).device
            cache.update(k.to(device), v.to(device), layer)
        update = cache.update

        def noting(k: Tensor, v: Tensor, layer: int, *more: Any, **options: Any) -> Any:
            new[layer] = (k, v)
            return update(k, v, layer, *more, **options)

        cache.update = noting
        return cache, new

    def _about(self) -> dict[str, Any]:
        collector = self.layout.collector
        distinct, place_of = self.ids.unique(return_inverse=True)
        (texts,) = self.model.token_texts(distinct[None])
        about = about_trace(
            model=self.model.name,
            tokens=[[texts[at] for at in place_of[0].tolist()]],
            heads=collector.head_axes,
            labels=collector.labels,
            groups=collector.groups,
            statistics=list(collector.statistics),
            tensors=list(collector.tensors),
        )
        return about | {"configuration": self.digest}


class _Writing(Collector):
    """A collector of one chunk that writes what it captures to its place in the file."""

    def __init__(self, run: _Run, index: int) -> None:
        super().__init__(run.plan, run.model.spec, run.lengths)
        self._run, self._index = run, index
        # Copies take turns so that the last chunk writes its sums into the trace itself.
        copies = (run.whole.tensors, run.spare.tensors)
        self._sums, self._before = copies if (run.n_chunks - 1 - index) % 2 == 0 else copies[::-1]

    def put(self, name: str, layer: int, value: Tensor) -> None:
        """Write one layer's part of a kept thing."""
        value = value.detach().cpu()
        at, run = place(self, name, layer), self._run
        start = self._index * run.chunk
        if name == "received":
            before = self._before[at][..., : value.shape[2]] if self._index else 0
            self._sums[at][..., : value.shape[2]] = value + before
            return
        target, axis = run.whole.tensors[at], query_axis(self, name)
        if name == "block_map":
            squares = target.narrow(2, start // run.layout.block, value.shape[2])
            squares[..., : value.shape[3]] = value
            return
        if name == "rows":
            target = target[..., : value.shape[3]]
        wanted = run.layout.queries.get(name)
        if wanted is None:
            target.narrow(axis, start, value.shape[axis]).copy_(value)
            return
        stop = min(start + run.chunk, run.n)
        inside = ((wanted >= start) & (wanted < stop)).nonzero()[:, 0]
        if name in self.tensors:  # of tensors come all rows; of the others only those wanted
            value = value.index_select(axis, wanted[inside] - start)
        target.index_copy_(axis, inside, value)


class _Clock:
    """Says how far a stream has come, and how long it will still take: chunks take longer as the cache grows."""

    def __init__(self, n: int, chunk: int) -> None:
        self._n, self._chunk = n, chunk
        self._seconds: dict[int, float] = {}

    def after(self, index: int, seconds: float) -> str:
        """A line about a chunk that took so long."""
        self._seconds[index] = seconds
        done = min((index + 1) * self._chunk, self._n)
        text = f"{done:,} of {self._n:,} tokens, {(done - index * self._chunk) / seconds:,.0f} tokens/s"
        if done == self._n:
            return text
        minutes, rest = divmod(round(self._left(index + 1)), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
        return f"{text}, {left} left"

    def _left(self, first: int) -> float:
        last = -(-self._n // self._chunk)
        # The first chunk pays for what is made when first used.
        measured = list(self._seconds.items())[1 if len(self._seconds) > 1 else 0 :]
        at, seconds = np.array(measured).T
        slope = max(np.polyfit(at, seconds, 1)[0], 0.0) if len(measured) > 2 else 0.0
        mean = seconds.mean() + slope * ((first + last - 1) / 2 - at.mean())
        return float(mean * (last - first))


def _is_whole(out: Path, digest: str) -> bool:
    """Whether a folder holds the whole trace of this configuration."""
    try:
        about = json.loads((out / "trace.json").read_text("utf-8"))
        with safe_open(out / "trace.safetensors", framework="pt") as file:
            both = (about.get("configuration"), (file.metadata() or {}).get("configuration"))
    except (OSError, ValueError, AttributeError, SafetensorError):
        return False
    return both == (digest, digest)


def _new_cache(model: Model) -> DynamicCache:
    """An empty cache, as the model's own generation begins with."""
    return DynamicCache(config=model.module.config)


def _parameters(module: nn.Module) -> Any:
    return inspect.signature(module.forward).parameters


def cache_argument(module: nn.Module) -> str | None:
    """What a module calls its cache (it was renamed in transformers 5.24), or None where it has none."""
    names = ("cache", "past_key_values")
    return next((name for name in names if name in _parameters(module)), None)


__all__ = ["CHUNK", "cache_argument", "stream", "why_not"]
