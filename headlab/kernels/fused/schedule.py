"""Which tiles of the pattern a program visits: lists made from the rows' intervals before a kernel runs.

The second pass and the backward pass know the final log-sum-exp, so a program may visit its tiles in any order and
leave out any that contribute nothing: tiles no row sees, tiles without a counted query, without a key of a segment, or
outside a bin of lags. A list names a program's tiles, those that need a test per entry first and those that every row
sees whole after them. Lists take 2 bytes per pair of tiles: (N / 128)² · 2 bytes, 2 MiB at 128k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_BEYOND = 2**31 - 1

#: Pairs of tiles sorted at a time.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Cut:
    """How an axis is cut into tiles; kernels are compiled for it.

    Attributes:
        size: Entries a tile has room for: a power of two.
        width: Entries a tile holds, at most ``size``.
        span: Tokens that ``parts`` tiles hold together; the last of them may hold fewer.
        parts: Tiles per span.
        squares: Squares of ``block_map`` per tile.
    """

    size: int
    width: int
    span: int
    parts: int = 1
    squares: int = 1

    @property
    def side(self) -> int:
        """Tokens per square, where a tile holds several."""
        return self.width // self.squares

    def count(self, n: int) -> int:
        """Tiles of an axis of n entries."""
        return -(-n // self.span) * self.parts

    def ends(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """First entry of each tile, and the one after its last."""
        tile = torch.arange(self.count(n), dtype=torch.int32, device=device)
        span, part = tile // self.parts, tile % self.parts
        start = span * self.span + part * self.width
        stop = torch.minimum(start + self.width, (span + 1) * self.span).clamp(max=n)
        return start, stop.maximum(start)


def plain(size: int) -> Cut:
    """Tiles of one size."""
    return Cut(size, size, size)


def squares(side: int, largest: int) -> Cut:
    """Tiles that no square of ``block_map`` straddles: several squares each, or equal parts of one.

    Args:
        side: Side of a square, in tokens.
        largest: Largest size of a tile.
    """
    cuts = [_squares(side, size) for size in (128, 64, 32, 16) if size <= largest]
    return min(cuts, key=lambda cut: _price(cut, side))


def _squares(side: int, size: int) -> Cut:
    if side < size:
        together = size // side
        return Cut(size, together * side, together * side, squares=together)
    parts = -(-side // size)
    return Cut(size, -(-side // parts), side, parts)


def _price(cut: Cut, side: int) -> float:
    """What an entry costs: padding, a dearer start in a small tile, and the products that tell squares apart."""
    padding = cut.size * cut.parts / (cut.squares * side)
    return padding * (1 + 32 / cut.size) * (1.3 if cut.squares > 1 else 1.0)


@dataclass(frozen=True)
class Schedule:
    """The tiles each program visits.

    Attributes:
        tiles: Their indices: those to be tested, those seen whole, then those not visited.
        counts: How many there are of the first two kinds.
    """

    tiles: Int[Tensor, "#batch program tile"]
    counts: Int[Tensor, "#batch program 2"]

    def arguments(self) -> tuple[Any, ...]:
        """What kernels take: the lists, whether each sequence has its own, and their sizes."""
        batch, programs, tiles = self.tiles.shape
        return self.tiles, self.counts, int(batch > 1), programs, tiles


def schedule(
    overlap: Bool[Tensor, "#batch program tile"], whole: Bool[Tensor, "#batch program tile"]
) -> Schedule:
    """List tiles.

    Args:
        overlap: Tiles a program has to visit.
        whole: Those of them that need no test.
    """
    small = overlap.shape[-1] < 1 << 15
    kind = torch.where(overlap, whole.to(torch.uint8), 2)
    step = max(1, _CHUNK // max(1, kind.shape[0] * kind.shape[2]))
    lists = [part.sort(dim=-1, stable=True).indices for part in kind.split(step, 1)]
    tiles = torch.cat([part.to(torch.int16 if small else torch.int32) for part in lists], 1)
    counts = torch.stack([(kind == 0).sum(-1), (kind == 1).sum(-1)], -1)
    return Schedule(tiles, counts.int())


def seen(
    low: Int[Tensor, "*part query"],
    high: Int[Tensor, "*part query"],
    rows: Cut,
    columns: Cut,
    n_keys: int,
) -> tuple[Bool[Tensor, "*part row_tile column_tile"], Bool[Tensor, "*part row_tile column_tile"]]:
    """Pairs of tiles in which some row sees a column, and those whole tiles of columns that every sighted row sees.

    Args:
        low: First column each row sees.
        high: Column after the last; at most ``low`` in rows that do not count.
        rows: Tiles of the rows.
        columns: Tiles of the columns.
        n_keys: Columns.
    """
    n_rows = low.shape[-1]
    start, stop = rows.ends(n_rows, low.device)
    at = start[:, None] + torch.arange(rows.width, dtype=torch.int32, device=low.device)
    inside = at < stop[:, None]
    at = at.clamp(max=max(0, n_rows - 1)).long()
    low, high = low[..., at], high[..., at]
    sighted = inside & (low < high)
    first = low.where(sighted, _BEYOND).amin(-1)[..., None]
    last = high.where(sighted, 0).amax(-1)[..., None]
    latest = low.where(sighted, 0).amax(-1)[..., None]
    earliest = high.where(sighted, _BEYOND).amin(-1)[..., None]
    start, stop = columns.ends(n_keys, low.device)
    overlap = (first < stop) & (last > start)
    full = stop - start == columns.size
    return overlap, overlap & (latest <= start) & (earliest >= stop) & full


def seen_by(
    low: Int[Tensor, "#batch query"],
    high: Int[Tensor, "#batch query"],
    rows: Cut,
    columns: Cut,
    n_keys: int,
) -> Schedule:
    """The tiles of rows that see each tile of columns; those not full are tested too."""
    overlap, whole = seen(low, high, rows, columns, n_keys)
    start, stop = rows.ends(low.shape[-1], low.device)
    whole = whole & (stop - start == rows.size)[:, None]
    return schedule(overlap.transpose(-1, -2), whole.transpose(-1, -2))
