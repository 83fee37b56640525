"""Joining what a collector gathered over the steps of a run, with every axis in positions of the sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headlab.attention.collector import Collector
from headlab.attention.positions import resolve_positions
from headlab.errors import PlanError


@dataclass(frozen=True)
class Captured:
    """Rows, statistics and tensors per layer, and the positions of those kept for some queries only.

    Positions that a shorter sequence of the batch does not have hold NaN (−1 in index statistics, 0 along key
    axes).
    """

    rows: dict[int, Tensor]
    statistics: dict[str, dict[int, Tensor]]
    tensors: dict[str, dict[int, Tensor]]
    query_positions: dict[str, Tensor]


def assemble(collector: Collector, lengths: Tensor) -> Captured:
    """Join a collector's parts.

    Args:
        collector: What gathered them.
        lengths: Tokens of each sequence that were run, generated ones included.

    Raises:
        PlanError: A statistic cannot be joined over steps.
    """
    return _Assembly(collector, lengths).captured()


class _Assembly:
    def __init__(self, collector: Collector, lengths: Tensor) -> None:
        self.collector = collector
        self.lengths = lengths
        self.positions = {
            name: torch.cat(parts, 1) for name, parts in collector.query_positions.items()
        }

    def captured(self) -> Captured:
        rows = {}
        if self.collector.rows is not None:
            for layer, parts in self.collector.rows.parts.items():
                rows[layer] = self._rows(layer, parts)
        statistics = {
            name: {
                layer: self._statistic(name, layer, parts) for layer, parts in kept.parts.items()
            }
            for name, kept in self.collector.statistics.items()
        }
        tensors = {
            name: {layer: self._tensor(name, layer, parts) for layer, parts in kept.parts.items()}
            for name, kept in self.collector.tensors.items()
        }
        return Captured(rows, statistics, tensors, self.positions)

    def _rows(self, layer: int, parts: list[Tensor]) -> Tensor:
        if "rows" not in self.positions:  # every query
            return self._blank(self._pattern(layer, parts, every=True), 2, self._ends(layer))
        return self._blank_unrun("rows", layer, self._pattern(layer, parts, every=False))

    def _statistic(self, name: str, layer: int, parts: list[Tensor]) -> Tensor:
        if name == "block_map":
            if len(parts) > 1 or self.collector.left is not None:
                raise PlanError(
                    "block_map is for one forward pass; it cannot grow while generating"
                )
            return parts[0]
        if name == "received":
            return self._received(layer, parts)
        joined = torch.cat(parts, 2)
        if name in self.positions:
            return self._blank_unrun(name, layer, joined)
        return self._blank(self._moved(joined, 2, _blank_of(joined)), 2, self._ends(layer))

    def _received(self, layer: int, parts: list[Tensor]) -> Tensor:
        width = max(part.shape[2] for part in parts)
        total = torch.zeros_like(parts[0][..., :1])
        start = self.collector.query_lengths(layer).to(total.device)
        ends = self._ends(layer).to(total.device)
        for step, part in enumerate(parts):
            # The first step runs the prompt, each later one a token: of a sequence that has ended, a filler.
            run = (step == 0) | (start + step - 1 < ends)
            total = (
                total
                + torch.nn.functional.pad(part, (0, width - part.shape[2])) * run[:, None, None]
            )
        return self._moved(total, 2, 0.0)

    def _tensor(self, name: str, layer: int, parts: list[Tensor]) -> Tensor:
        axis, ends = 1, self._ends(layer, keys=name in ("k", "v"))
        if name == "pattern":
            axis, joined = 2, self._pattern(layer, parts, every=True)
        else:
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            joined = self._moved(joined, 1, torch.nan)
        joined = self._blank(joined, axis, ends)
        wanted = self.collector.tensor_positions(name)
        if wanted is None:
            return joined
        prompts = self.collector.query_lengths(layer, keys=name in ("k", "v"))
        index = resolve_positions(wanted, prompts, "positions").to(joined.device)
        self.positions[name] = index
        shape, picked = list(joined.shape), [1] * joined.dim()
        picked[0], picked[axis] = index.shape
        shape[axis] = index.shape[1]
        return joined.gather(axis, index.view(picked).expand(shape))

    def _pattern(self, layer: int, parts: list[Tensor], every: bool) -> Tensor:
        """Rows of all steps over keys in positions, and with ``every`` their queries in positions too."""
        width = self.collector.widths[layer]
        grown = [_widened(part, width) for part in parts]
        joined = grown[0] if len(grown) == 1 else torch.cat(grown, 2)
        joined = self._moved(joined, 3, 0.0)
        return self._moved(joined, 2, torch.nan) if every else joined

    def _ends(self, layer: int, keys: bool = False) -> Tensor:
        """Where each sequence ends, in a layer's queries or keys."""
        if self.collector.encoder_side(layer, keys):
            return self.collector.query_lengths(layer, keys)
        return self.lengths

    def _moved(self, x: Tensor, axis: int, fill: float) -> Tensor:
        """Each sequence at the front of the axis, where left padding had pushed it back."""
        left = self.collector.left
        if left is None:
            return x
        n = x.shape[axis]
        index = torch.arange(n, device=x.device) + left.to(x.device)[:, None]
        shape = _along(x, axis)
        moved = x.gather(axis, index.clamp(max=n - 1).view(shape).expand_as(x))
        return moved.masked_fill((index >= n).view(shape), fill)

    @staticmethod
    def _blank(x: Tensor, axis: int, ends: Tensor) -> Tensor:
        """Blanks where the sequences have ended."""
        n = x.shape[axis]
        beyond = torch.arange(n, device=x.device) >= ends.to(x.device)[:, None]
        if not bool(beyond.any()):
            return x
        return x.masked_fill(beyond.view(_along(x, axis)), _blank_of(x))

    def _blank_unrun(self, name: str, layer: int, x: Tensor) -> Tensor:
        """Blanks queries beyond a sequence's end; only those of generated tokens can lie there."""
        beyond = self.positions[name].to(x.device) >= self._ends(layer).to(x.device)[:, None]
        if not bool(beyond.any()):
            return x
        return x.masked_fill(beyond.view(_along(x, 2)), _blank_of(x))


def _widened(rows: Tensor, width: int) -> Tensor:
    """Rows over ``width`` keys; the same tensor where they are that wide, since padding always copies."""
    missing = width - rows.shape[3]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def _along(x: Tensor, axis: int) -> list[int]:
    return [x.shape[0] if at == 0 else x.shape[axis] if at == axis else 1 for at in range(x.dim())]


def _blank_of(x: Tensor) -> float:
    return torch.nan if x.is_floating_point() else -1
