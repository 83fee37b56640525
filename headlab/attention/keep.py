"""Capture plans: what a trace should keep, so that nothing else is computed or stored.

keep = [hl.keep.rows(queries=[-1]), hl.keep.statistics("entropy"), hl.keep.tensors("z", layers=[3])]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from headlab.attention.heads import HeadsLike, parse_heads
from headlab.errors import HeadError, PlanError
from headlab.kernels import LINEAR, STATISTICS
from headlab.models.spec import ModelSpec

#: Largest number of tokens that an argument may name.
_MOST = 2**31 - 1
#: Statistics that weights times their gradients have too.
WEIGHTED = frozenset({*LINEAR, "first_mass", "segment_mass"})
#: Gradient of a loss with respect to z, by layer: [batch, position, head, d_value].
ZGradient: TypeAlias = "Mapping[int, Tensor]"
#: Positions of a sequence: a span, one span per prompt, or a bool mask over [key] or [batch, key].
SpanLike: TypeAlias = "tuple[int, int] | Sequence[tuple[int, int]] | Tensor"
#: Query positions, negative ones from the end; [batch, n] gives each prompt its own.
Queries: TypeAlias = "Sequence[int] | Tensor | Literal['generated'] | None"

#: Of the residual stream, a whole layer's: before and after its block, and what is added to it in between.
STREAM = ("resid_pre", "attn_out", "mlp_out", "resid_post")
#: Tensors a trace can keep.
TENSORS = ("q", "k", "v", "z", "result", "pattern", *STREAM)
#: Statistics a plan can name: the engines' own, and cases of ``feature``.
NAMES = (*(name for name in STATISTICS if name != "topk_index"), "first_mass", "segment_mass")


@dataclass(frozen=True)
class Selection:
    """Which layers and heads to keep; None means all."""

    layers: tuple[int, ...] | None = None
    heads: HeadsLike | None = None

    def resolve(self, spec: ModelSpec) -> dict[int, tuple[int, ...]]:
        """Chosen heads per chosen layer."""
        layers = range(spec.n_layers) if self.layers is None else self.layers
        for layer in layers:
            if not -spec.n_layers <= layer < spec.n_layers:
                raise PlanError(
                    f"layer {layer} does not exist: {spec.name} has layers 0–{spec.n_layers - 1}"
                )
        chosen = {
            layer % spec.n_layers: tuple(range(spec.layers[layer].n_heads)) for layer in layers
        }
        if self.heads is None:
            return chosen
        named: dict[int, list[int]] = {}
        for head in parse_heads(self.heads, spec):
            named.setdefault(head.layer, []).append(head.head)
        kept = {layer: tuple(heads) for layer, heads in named.items() if layer in chosen}
        if not kept:
            raise PlanError(f"heads {self.heads!r} lie in none of the layers {self.layers}")
        return kept


@dataclass(frozen=True)
class KeepRows:
    """Pattern rows of chosen queries; see :func:`rows`."""

    selection: Selection
    queries: Queries = None
    z_gradient: ZGradient | None = None


@dataclass(frozen=True)
class KeepStatistics:
    """Statistics of every row; see :func:`statistics`."""

    selection: Selection
    names: tuple[str, ...]
    queries: Queries = None
    n_first: int = 1
    window: int = 16
    bins: tuple[int, ...] = ()
    k: int = 8
    segments: Mapping[str, SpanLike] | None = None
    targets: Tensor | None = None
    x: Tensor | None = None
    block: int = 64
    z_gradient: ZGradient | None = None


@dataclass(frozen=True)
class KeepTensors:
    """Whole tensors; see :func:`tensors`."""

    selection: Selection
    names: tuple[str, ...]
    positions: tuple[int, ...] | None = None
    offload: Literal["cpu"] | Path | None = None


Keep: TypeAlias = KeepRows | KeepStatistics | KeepTensors


def rows(
    queries: Queries = None,
    *,
    layers: Sequence[int] | None = None,
    heads: HeadsLike | None = None,
    z_gradient: ZGradient | None = None,
) -> KeepRows:
    """Keep the pattern rows of chosen queries: O(queries · keys) memory.

    Args:
        queries: Query positions, the same for every prompt or [batch, n]; negative ones count from each prompt's
            end; ``"generated"`` keeps the rows that predict generated tokens; None keeps every row.
        layers: Layers to keep; all by default.
        heads: Heads to keep, as ``"18.6, 17.*"``; all by default.
        z_gradient: Gradient of a loss with respect to z, by layer, [batch, position, head, d_value]. With it, every
            weight is kept times its own gradient, p ∂loss/∂p.

    Raises:
        PlanError: ``z_gradient`` is of another form.
    """
    return KeepRows(_selection(layers, heads), queries, _gradients(z_gradient))


def statistics(
    *names: str,
    layers: Sequence[int] | None = None,
    heads: HeadsLike | None = None,
    queries: Queries = None,
    n_first: int = 1,
    window: int = 16,
    bins: Sequence[int] = (),
    k: int = 8,
    segments: Mapping[str, SpanLike] | None = None,
    targets: Tensor | Sequence[int] | None = None,
    x: Tensor | None = None,
    block: int = 64,
    z_gradient: ZGradient | None = None,
) -> KeepStatistics:
    """Keep statistics of every pattern row, computed inside the attention loop in O(n) memory.

    Args:
        names: Any of ``lse``, ``entropy`` (nats), ``max``, ``argmax``, ``topk``, ``first_mass``, ``local_mass``,
            ``mean_distance`` (tokens), ``segment_mass``, ``feature``, ``target_mass``, ``lag_mass``,
            ``received``, ``block_map`` and ``segment_z``; :mod:`headlab.kernels.statistics` defines each.
        layers: Layers to keep; all by default.
        heads: Heads to keep; all by default.
        queries: Only these query rows (for ``received``: only attention from them).
        n_first: Keys that ``first_mass`` counts, from the start of the sequence.
        window: ``local_mass`` counts keys fewer than this many tokens away.
        bins: Edges of ``lag_mass``: bin i holds lags ``bins[i] <= query − key < bins[i+1]``.
        k: Entries of ``topk``.
        segments: Named key segments for ``segment_mass`` and ``segment_z``: ``{"subject": (3, 5)}``, or one span
            per prompt, or a bool tensor [key] or [batch, key].
        targets: Key position per query for ``target_mass``, [query] or [batch, query]; −1 for none.
        x: Per-key feature for ``feature``, [key], [key, n] or [batch, key, n].
        block: Side of the squares of ``block_map``, in tokens.
        z_gradient: Gradient of a loss with respect to z, by layer, [batch, position, head, d_value]. With it, weights
            are taken times their own gradients, p ∂loss/∂p, in statistics that are sums of weights: ``first_mass``,
            ``segment_mass``, ``feature``, ``local_mass``, ``lag_mass``, ``target_mass``, ``received``, ``block_map``.

    Raises:
        PlanError: A name is unknown, what a statistic needs was not given, or it is no sum of weights.
    """
    whole = {"n_first": n_first, "window": window, "k": k, "block": block}
    for label, number in whole.items():
        if not is_whole(number) or number < 1:
            raise PlanError(f"{label}={number!r} must be a whole number of at least 1")
        if number > _MOST:
            raise PlanError(f"{label}={number!r} is larger than any text: at most {_MOST}")
    bins = _wholes("bins", bins) or ()
    if any(abs(edge) > _MOST for edge in bins):
        raise PlanError(f"bins={list(bins)} reach further than any text: at most {_MOST}")
    if segments is not None and not (isinstance(segments, Mapping) and segments):
        raise PlanError(f"segments={segments!r} must name spans, as {{'subject': (3, 5)}}")
    if not names:
        raise PlanError(f"name at least one statistic of {', '.join(NAMES)}")
    needs = {
        "segment_mass": ("segments", segments),
        "segment_z": ("segments", segments),
        "feature": ("x", x),
        "target_mass": ("targets", targets),
        "lag_mass": ("bins", bins if len(bins) > 1 else None),
    }
    for name in names:
        if name not in NAMES:
            raise PlanError(f"there is no statistic {name!r}; there are {', '.join(NAMES)}")
        argument, value = needs.get(name, ("", ()))
        if value is None:
            raise PlanError(f"statistic {name!r} needs {argument}=")
    if list(bins) != sorted(set(bins)):
        raise PlanError(f"bins={list(bins)} must rise")
    if z_gradient is not None and (other := set(names) - WEIGHTED):
        raise PlanError(
            f"{', '.join(sorted(other))} cannot be weighted by gradients; {', '.join(sorted(WEIGHTED))} can"
        )
    if targets is not None:
        targets = torch.as_tensor(targets)
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise PlanError(f"targets are key positions, whole numbers, not {targets.dtype}")
    return KeepStatistics(
        _selection(layers, heads),
        tuple(dict.fromkeys(names)),
        queries,
        n_first,
        window,
        bins,
        k,
        segments,
        None if targets is None else targets.long(),
        None if x is None else torch.as_tensor(x),
        block,
        _gradients(z_gradient),
    )


def tensors(
    *names: str,
    layers: Sequence[int] | None = None,
    heads: HeadsLike | None = None,
    positions: Sequence[int] | None = None,
    offload: Literal["cpu"] | str | Path | None = None,
) -> KeepTensors:
    """Keep whole tensors of chosen layers, heads and positions.

    Args:
        names: Any of ``q``, ``k``, ``v``, ``z``, ``result`` and ``pattern``, and of the residual stream, in whole
            layers, ``resid_pre``, ``attn_out``, ``mlp_out`` and ``resid_post``.
        layers: Layers to keep; all by default.
        heads: Query heads to keep; k and v come for the key/value heads these use.
        positions: Positions to keep (of queries for ``pattern``); negative ones count from each prompt's end.
        offload: ``"cpu"`` moves each tensor to main memory as soon as it is captured; a folder writes it to disk.

    Raises:
        PlanError: A name is unknown.
    """
    if not names:
        raise PlanError(f"name at least one tensor of {', '.join(TENSORS)}")
    for name in names:
        if name not in TENSORS:
            raise PlanError(f"there is no tensor {name!r}; there are {', '.join(TENSORS)}")
    place: Literal["cpu"] | Path | None = None
    if offload is not None:
        place = "cpu" if offload == "cpu" else Path(offload)
    return KeepTensors(
        _selection(layers, heads),
        tuple(dict.fromkeys(names)),
        _wholes("positions", positions),
        place,
    )


def _selection(layers: Sequence[int] | None, heads: HeadsLike | None) -> Selection:
    wanted = _wholes("layers", layers)
    if wanted == ():
        raise PlanError("layers=[] keeps nothing; leave it out to keep every layer")
    return Selection(wanted, heads)


def _gradients(given: ZGradient | None) -> ZGradient | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(x, Tensor) for x in given.values()):
        raise PlanError(
            "z_gradient= must hold a tensor per layer, {layer: [batch, position, head, d_value]}"
        )
    return {layer: x.detach() for layer, x in given.items()}


def is_whole(number: object) -> bool:
    """Whether something is a whole number; True and False are not."""
    return hasattr(number, "__index__") and not isinstance(number, bool | Tensor)


def _wholes(label: str, numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise PlanError(f"{label}={numbers!r} must be a list of whole numbers")
    listed = list(numbers.tolist() if isinstance(numbers, Tensor) else numbers)
    if not all(is_whole(number) for number in listed):
        raise PlanError(f"{label}={listed!r} must be whole numbers")
    return tuple(index(number) for number in listed)


def whole_layers(
    heads: Mapping[int, tuple[int, ...]], spec: ModelSpec, site: str
) -> tuple[int, ...]:
    """The layers that heads make up.

    Raises:
        HeadError: They leave out a head of a layer they name.
    """
    for layer, members in heads.items():
        if len(members) < spec.layers[layer].n_heads:
            raise HeadError(
                f"{site} belongs to a layer, not to a head: name all of layer {layer} as '{layer}.*'"
            )
    return tuple(heads)
