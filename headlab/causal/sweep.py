"""The engine of causal sweeps: the same prompts under many sets of edits, without computing anything twice.

What an edit cannot change is taken from the clean run. Below the first edited layer that is the residual stream: its
blocks are passed over. Before the first edited position it is everything, in a model whose every layer is causal: of
those positions only the keys and values are needed, and they come from a cache. Prompts of equal length run side by
side under several sets of edits at once, so there is no padding. Results equal those of single whole runs up to
rounding.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import headlab
from headlab.attention.edits import Batch, BoundEdit, Edit
from headlab.attention.keep import is_whole
from headlab.causal.metrics import BoundMetric, Metric, as_metric
from headlab.causal.passing_over import outputs_of_blocks, passed_over
from headlab.causal.prompt_groups import by_length
from headlab.errors import PlanError, UnsupportedError
from headlab.models import weights_sha256
from headlab.prompts import Prompt, lengths_of
from headlab.shards import Arrays, Remember, Shards, forget

if TYPE_CHECKING:
    from headlab.model import Model

#: Tokens of a forward pass: more are slower on a CPU, where they no longer fit its caches.
_CPU_TOKENS, _GPU_TOKENS = 512, 1 << 16
#: Share of the free memory that one forward pass may take.
_SHARE = 0.25
#: Variants that begin at different blocks share a forward pass while they fill less than 1/_FEW of one.
_FEW = 8
#: Cached tokens that may stand beside each token that runs.
_CACHED = 6
#: A cache of the first positions is worth its copying from 1/_WORTH of a prompt on.
_WORTH = 8


@dataclass(frozen=True)
class _Variant:
    """A set of edits, and where it begins."""

    at: int
    edits: tuple[BoundEdit, ...]
    block: int
    position: int


@dataclass(frozen=True)
class _Clean:
    """What is kept of a group's clean run: the output of every block, and the metric's logits."""

    outputs: tuple[Any, ...]
    logits: Tensor


class Sweep:
    """Runs prompts under sets of edits and measures them.

    Args:
        model: The model; edits in force when the sweep is made are part of its clean run, and must be in force when it
            runs.
        prompts: The prompts.
        metric: What to measure, a :class:`~headlab.causal.metrics.Metric` or a function of (logits, prompts).
        out: Folder for finished parts, so that a killed sweep resumes; None keeps nothing. It takes metrics of
            headlab's only, since others of one name cannot be told apart, and no edits in force.
        about: What the edits depend on besides their labels, where ``out`` is given; fit for JSON.
        measured_on: Prompts whose tokens the metric asks for, where they are not the ones that run: the clean ones of
            a corrupted run.
        against: The sweep from whose clean run KL divergence is measured; this one's own by default.
        tell: Told, in a few words, how far it is.
        tokens_at_once: Tokens of one forward pass; by default what the memory and the processor are good for.

    Raises:
        PromptError: A prompt cannot be used.
        PlanError: The metric does not fit the prompts.
        UnsupportedError: The model has no language-model head, or has an encoder and a decoder.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompt,
        metric: Metric | Callable[[Tensor, Tensor], Tensor],
        *,
        out: str | Path | None = None,
        about: Mapping[str, Any] | None = None,
        measured_on: Prompt | None = None,
        against: Sweep | None = None,
        tell: Callable[[str], None] = lambda text: None,
        tokens_at_once: int | None = None,
    ) -> None:
        if model.module.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{model.name} has an encoder and a decoder; sweeps are for models of one stack"
            )
        self.model = model
        self.ids = model.tokens(prompts)
        self.lengths = lengths_of(self.ids)
        if tokens_at_once is not None and (not is_whole(tokens_at_once) or tokens_at_once < 1):
            raise PlanError(
                f"tokens_at_once={tokens_at_once!r} must be a whole number of at least 1"
            )
        given = as_metric(metric)
        asked = self.ids if measured_on is None else model.tokens(measured_on)
        self.metric: BoundMetric = given.bind(model, asked)
        self._under = model.edits
        self._against = against
        self._tell = tell
        self._tokens = tokens_at_once or _tokens_at_once(model, self.metric.needs == "last")
        self._causal = all(layer.causal for layer in model.spec.layers)
        self._sure = False
        self._prefix: tuple[Tensor, Any] | None = None
        self._remember: Remember = forget
        if out is not None:
            if (
                not given.binder.__module__.startswith("headlab.")
                or "function" in self.metric.about
            ):
                raise PlanError(
                    f"metric {given.name} is not headlab's, so it cannot be told from another of that name and a sweep "
                    "of it cannot resume; use one of hl.metrics, or leave out out="
                )
            if model.edited:
                raise PlanError(
                    "a sweep that can resume needs a model without edits in force; leave out out="
                )
            self._remember = Shards(Path(out), self._configuration(about or {})).remember

    @cached_property
    def clean(self) -> Float[np.ndarray, " prompt"]:
        """The metric of the unedited runs."""
        with self._alone():
            if self.metric.needs_reference:
                source = self if self._against is None else self._against
                self.metric = self.metric.with_reference(source.logits)
            values = np.empty(len(self.ids))
            for group in self._groups():
                values[group.numpy()] = self.metric.measure(self._plain(group), group)
            return values

    @property
    def logits(self) -> Float[Tensor, "prompt position vocab"]:
        """Logits of the unedited runs that the metric needs, 0 beyond a prompt's end."""
        return self.metric.gathered((group, self._plain(group)) for group in self._groups())

    def run(
        self, variants: Sequence[Sequence[Edit] | Edit], labels: Sequence[str] | None = None
    ) -> Float[np.ndarray, "variant prompt"]:
        """The metric of every prompt under every set of edits.

        Args:
            variants: Sets of edits, or single ones: ordinary ``hl.ablate``, ``hl.patch`` and so on. Values they are
                given per prompt are of the sweep's prompts, in order.
            labels: A name for each, all different: finished parts are stored under them.

        Raises:
            HeadError: An edit names a head that does not exist.
            PlanError: An edit cannot be carried out, labels are not all different, or the metric is not finite.
        """
        names = [str(at) for at in range(len(variants))] if labels is None else list(labels)
        if len(set(names)) != len(variants):
            raise PlanError("labels= must give every variant a name of its own")
        if not isinstance(variants, Sequence):
            raise PlanError(f"a sweep runs a list of sets of edits, not {variants!r:.60}")
        sets = [(one,) if isinstance(one, Edit) else tuple(one) for one in variants]
        bound = [self._bound(at, edits) for at, edits in enumerate(sets)]
        bound.sort(key=lambda variant: (variant.position, variant.block, variant.at))
        values, done = np.tile(self.clean, (len(variants), 1)), 0
        with self._alone():
            for group in self._groups():
                source: list[_Clean] = []  # made when a part is not at hand
                for chunk in self._chunks(bound, group):
                    found = self._parts(chunk, group, source, names)
                    values[np.ix_([variant.at for variant in chunk], group.tolist())] = found
                    done += len(chunk) * len(group)
                    self._tell(f"{done} of {len(bound) * len(self.ids)} runs")
        return values

    # -- parts -----------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread may touch the model, nor may its edits have changed: kept clean runs were made under them."""
        if self.model.edits != self._under:
            raise PlanError(
                "the edits in force are not those that were when this sweep was made; make a sweep where it is run"
            )
        with self.model.alone():
            yield

    @property
    def _last(self) -> bool:
        return self.metric.needs == "last"

    def _groups(self) -> Iterator[Tensor]:
        return by_length(self.ids, self._tokens)

    def _plain(self, group: Tensor) -> Tensor:
        """Logits of an unedited run."""
        return self._logits(
            self.model.forward(self._group_ids(group), last=self._last, use_cache=False)
        )

    def _group_ids(self, group: Tensor) -> Tensor:
        return self.ids[group.to(self.ids.device), : int(self.lengths[group[0]])]

    def _bound(self, at: int, edits: Sequence[Edit]) -> _Variant:
        bound = self.model.bind(edits)
        layers = [layer for edit in bound for layer in edit.heads]
        blocks = self.model.blocks
        first = min((blocks.of_layer(layer) for layer in layers), default=len(blocks.modules))
        return _Variant(at, bound, first, self._first_position(bound))

    def _first_position(self, edits: Sequence[BoundEdit]) -> int:
        """Positions before this one stay as they are, in every prompt."""
        if not self._causal:
            return 0
        shortest = int(self.lengths.min())
        first = shortest - 1
        for edit in edits:
            for position in (0,) if edit.positions is None else edit.positions:
                first = min(first, position if position >= 0 else max(0, shortest + position))
        return first if first * _WORTH >= int(self.lengths.max()) else 0

    def _chunks(self, variants: Sequence[_Variant], group: Tensor) -> Iterator[list[_Variant]]:
        """Variants that run side by side: they begin at one position and, unless they are few, at one block."""
        length, n_blocks = int(self.lengths[group[0]]), len(self.model.blocks.modules)
        for position, begun in groupby(variants, key=lambda variant: variant.position):
            tokens = (length - position) * len(group)
            pending: list[_Variant] = []
            for block, same in groupby(begun, key=lambda variant: variant.block):
                if not pending:
                    # Each variant needs a copy of the cache, of the blocks that run.
                    cached = position * len(group) * (n_blocks - block) / n_blocks
                    most = min(
                        self._tokens // tokens, int(_CACHED * self._tokens // max(cached, 1))
                    )
                pending += same
                if len(pending) * tokens * _FEW >= self._tokens or len(pending) >= most:
                    yield from _evenly(pending, max(1, most))
                    pending = []
            if pending:
                yield from _evenly(pending, max(1, most))

    def _parts(
        self,
        chunk: Sequence[_Variant],
        group: Tensor,
        source: list[_Clean],
        names: Sequence[str],
    ) -> Float[np.ndarray, "variant prompt"]:
        """The metric of a chunk; each variant is a part of its own, whatever runs beside it."""

        @cache
        def run() -> Float[np.ndarray, "variant prompt"]:
            return self._run_chunk(chunk, group, source)

        found = []
        for row, variant in enumerate(chunk):
            key = self._key(group, names[variant.at])
            found.append(self._remember(key, partial(_row, run, row))["values"])
        return np.stack(found)

    def _run_chunk(
        self, chunk: Sequence[_Variant], group: Tensor, source: list[_Clean]
    ) -> Float[np.ndarray, "variant prompt"]:
        ids = self._group_ids(group)
        block, position = chunk[0].block, chunk[0].position
        if not source:
            source.append(self._clean_run(ids))
        clean = source[0]
        if block == len(self.model.blocks.modules):  # nothing is edited
            return np.tile(self.metric.measure(clean.logits, group), (len(chunk), 1))
        times = len(chunk)
        edits = [
            replace(edit, batch=Batch(at * len(group), group.to(ids.device), len(self.ids)))
            for at, variant in enumerate(chunk)
            for edit in variant.edits
        ]
        cached: dict[str, Any] = {"use_cache": False}
        if position:
            cached = self._cached(ids, position, block, times)
        with passed_over(self.model, block, clean.outputs, times, position):
            output = self.model.forward(
                ids[:, position:].repeat(times, 1),
                edits,
                length=ids.shape[1],
                last=self._last,
                **cached,
            )
        logits = self._logits(output)
        if self._last or not position:
            return self.metric.measure(logits, group.repeat(times)).reshape(times, -1)
        # Where every position counts, those before are the clean run's; put together one variant at a time, for memory.
        before = clean.logits[:, :position]
        return np.stack(
            [
                self.metric.measure(torch.cat([before, part], 1), group)
                for part in logits.split(len(group))
            ]
        )

    def _clean_run(self, ids: Tensor) -> _Clean:
        """A clean run that keeps every block's output."""
        n_blocks = len(self.model.blocks.modules)
        with outputs_of_blocks(self.model) as outputs:
            logits = self._logits(self.model.forward(ids, last=self._last, use_cache=False))
        clean = _Clean(tuple(outputs[at] for at in range(n_blocks)), logits)
        if not self._sure:
            with passed_over(self.model, n_blocks // 2, clean.outputs, 1, 0):
                again = self._logits(self.model.forward(ids, last=self._last, use_cache=False))
            if not torch.allclose(again, logits, rtol=1e-3, atol=1e-4):
                raise UnsupportedError(
                    f"blocks of {self.model.name} ({self.model.spec.family}) pass on more than the residual stream, "
                    "so a sweep cannot begin in the middle of it"
                )
            self._sure = True
        return clean

    def _cached(self, ids: Tensor, position: int, block: int, times: int) -> dict[str, Any]:
        """Arguments that give the module its keys and values of the first positions, for every row of a chunk."""
        first = ids[:, :position]
        if self._prefix is None or not torch.equal(self._prefix[0], first):
            # Edits in force count positions from the end of the whole prompt.
            output = self.model.forward(first, length=ids.shape[1], last=True, use_cache=True)
            self._prefix = (first, getattr(output, "cache", None) or output.past_key_values)
        # A layer's tensors are replaced when it grows, not written to, so copies may share them.
        cached = copy.copy(self._prefix[1])
        cached.layers = [copy.copy(layer) for layer in cached.layers]
        rows = torch.arange(len(ids), device=ids.device).repeat(times)
        for layer in cached.layers[block:]:  # blocks before are passed over
            layer.batch_select_indices(rows)
        return {_cache_argument(self.model): cached, "use_cache": True}

    def _logits(self, output: Any) -> Tensor:
        logits = getattr(output, "logits", None)
        if logits is None:
            raise UnsupportedError(
                f"{self.model.name} has no language-model head, so it gives no logits to measure"
            )
        return logits[:, -1:] if self._last else logits

    def _key(self, group: Tensor, name: str) -> str:
        text = json.dumps([group.tolist(), name])
        return f"runs-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def _configuration(self, about: Mapping[str, Any]) -> dict[str, Any]:
        return {
            # Of the weights as they are now: a live model may have been changed since it was loaded.
            "weights": weights_sha256(self.model.module),
            "config": self.model.module.config.to_dict(),
            "dtype": str(self.model.dtype),
            "device": self.model.device.type,
            "prompts": self.ids.tolist(),
            "measured_on": self.metric.prompts.tolist(),
            "metric": self.metric.about,
            "about": dict(about),
            "headlab": headlab.__version__,
        }


def _row(run: Callable[[], np.ndarray], row: int) -> Arrays:
    return {"values": run()[row]}


def _evenly(variants: Sequence[_Variant], at_once: int) -> Iterator[list[_Variant]]:
    """The variants in as few parts as can be, none much smaller than the others."""
    parts = -(-len(variants) // at_once)
    for part in np.array_split(np.arange(len(variants)), parts):
        yield [variants[at] for at in part]


def _cache_argument(model: Model) -> str:
    """What the module calls its cache: it was renamed in transformers 5.24."""
    parameters = inspect.signature(model.module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _tokens_at_once(model: Model, last: bool) -> int:
    """Tokens of one forward pass: what is useful, within a share of the free memory."""
    config = model.module.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * model.spec.d_model
    numbers = 6 * model.spec.d_model + 4 * inner + (0 if last else 4 * model.spec.n_vocab)
    if model.device.type == "cuda":
        free, useful = torch.cuda.mem_get_info(model.device)[0], _GPU_TOKENS
    else:
        free, useful = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _CPU_TOKENS
    each = numbers * max(4, model.dtype.itemsize)
    return max(1, min(useful, int(_SHARE * free / each)))
