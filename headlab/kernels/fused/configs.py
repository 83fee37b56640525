"""What a launch of the forward kernel is compiled for, and the shipped table of tile sizes.

Tile sizes are looked up, never tuned at run time: the first call of a session costs one compilation and no trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Program:
    """Everything the forward kernel is compiled for; one constexpr argument of it.

    Statistics of one number a row are named by their slot in the output, −1 where they are not asked for.

    Attributes:
        bm, bn: Rows and keys of a tile.
        d, dv: Head size of keys and values; ``bd`` and ``bdv`` are the powers of two that hold them.
        z: Whether to mix the values.
        lse, entropy, maximum, local, distance: Slots of statistics.
        argmax: Whether to keep the key of the largest weight.
        k: Entries of the top-k; 0 for none.
        features: Columns of features, padded; 0 for none.
        raw: Whether q·k is compared as it comes, and scaled in the exponent's multiply-add.
        two_sided: Whether keys after a query may be visible.
        pack: Heads of a group that share a tile.
        splits: Programs that share the keys of a tile.
        tma: Whether keys and values are loaded by tensor descriptors.
        softcap, mask, bias, sinks: What the call has.
        upcast, interpret, precision: How products are computed.
    """

    bm: int
    bn: int
    d: int
    bd: int
    dv: int
    bdv: int
    z: bool = True
    lse: int = 0
    entropy: int = -1
    maximum: int = -1
    local: int = -1
    distance: int = -1
    argmax: bool = False
    k: int = 0
    features: int = 0
    raw: bool = True
    two_sided: bool = False
    pack: int = 1
    splits: int = 1
    tma: bool = False
    softcap: bool = False
    mask: bool = False
    bias: bool = False
    sinks: bool = False
    upcast: bool = False
    interpret: bool = False
    precision: str = "tf32"

    @property
    def kept(self) -> int:
        """Entries of the top-k, as a power of two."""
        return 1 << max(0, self.k - 1).bit_length()

    @property
    def z_sums(self) -> int:
        """Columns of the sums of values; 1 where there are none, as a tile cannot have 0."""
        return self.bdv if self.z else 1

    @property
    def x_sums(self) -> int:
        """Columns of the sums of features; 1 where there are none."""
        return max(1, self.features)


@dataclass(frozen=True)
class Tiles:
    """Rows and keys of a tile, warps of a program, stages of the pipeline that loads keys and values."""

    bm: int
    bn: int
    warps: int
    stages: int


#: Ampere and Ada. Every entry fits the 99 KiB of shared memory that sm_86 and sm_89 have.
_SM_80 = {
    "plain": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)},
    "rows": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(32, 32, 4, 2)},
    "features": {64: Tiles(128, 32, 8, 3), 128: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 4, 2)},
    "topk": {64: Tiles(128, 32, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 4, 2)},
    "deep": {64: Tiles(64, 32, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 32, 4, 2)},
}

#: Tiles by architecture, kind of request and padded width of 16-bit heads.
#:
#: Compiled ahead of time with Triton 3.9, bfloat16: registers of a thread, and instructions per score in a FULL tile
#: whose maxima have settled, for heads of 64 | 128 | 256 where measured. Nothing listed spills.
#:
#: ============================  ====================================  ====================================
#: request                       sm_90                                 sm_80
#: ============================  ====================================  ====================================
#: plain                         189, 6.9 | 219, 7.2 | 225, 10.8       183, 10.5 | 236, 14.5 | 236
#: all rows                      243, 13.2 | 255, 13.7 | 250, 22.0     255, 14.7 | 247, 22.3 | 255, 61
#: 16 features                   - | 225, 14.8 | 244, 22.9             - | - | 255, 53
#: all rows and 16 features      - | 255, 19.6 | -                     - | 255, 25.6 | -
#: top-8 without insertions      - | 220, 10.3 | -                     - | 233, 18.5 | 239, 45
#: rows, 16 features and top-8   - | 255, 20.0 | 255, 29.1             - | 255, 26.6 | -
#: top-64 without insertions     - | 254, 10.8 | 255, 19.2             - | 246 | -
#: ============================  ====================================  ====================================
_TABLE: dict[str, dict[str, dict[int, Tiles]]] = {
    "sm_90": {
        "plain": {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 128, 8, 2), 256: Tiles(128, 64, 8, 2)},
        "rows": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 2)},
        "features": {
            64: Tiles(128, 64, 8, 3),
            128: Tiles(128, 64, 8, 3),
            256: Tiles(128, 32, 8, 2),
        },
        "topk": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(128, 32, 8, 2)},
        "deep": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(128, 32, 8, 2)},
    },
    "sm_89": _SM_80,
    "sm_80": _SM_80,
}

#: Tiles where the interpreter runs: as many edges as possible at the price of few steps.
_INTERPRETED = Tiles(32, 32, 4, 1)


def tiles_for(device: torch.device, kind: str, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for a launch.

    Args:
        device: Where it runs.
        kind: ``plain``, ``rows``, ``features``, ``topk`` or ``deep`` (more than 16 entries).
        width: Larger padded head size, of keys or values.
        dtype: Type of queries, keys and values.
    """
    if device.type != "cuda":
        return _INTERPRETED
    return shipped(_architecture(device), kind, width, dtype)


def shipped(architecture: str, kind: str, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles of the table for an architecture such as ``sm_90``; float32 has tiles of its own."""
    row = _TABLE[architecture][kind]
    fits = min(size for size in row if size >= width)
    if dtype != torch.float32:
        return row[fits]
    if fits == 256:
        return Tiles(16, 16, 4, 1)
    return (
        Tiles(64, 32, 4, 2) if architecture == "sm_90" and kind == "plain" else Tiles(32, 32, 4, 1)
    )


def with_mask(tiles: Tiles, width: int) -> Tiles:
    """Tiles for a call with a mask or a bias, whose own tiles the table leaves neither memory nor registers for.

    Args:
        tiles: What the table says.
        width: Larger padded head size, of keys or values.
    """
    bm = min(tiles.bm, 64 if width <= 128 else 32)
    return Tiles(bm, min(tiles.bn, 32), 8 if bm == 64 else 4, 1)


def splits_for(device: torch.device, programs: int, n_keys: int, bn: int) -> int:
    """Programs that share the keys of a tile, so that about two programs run on every multiprocessor."""
    if device.type != "cuda":
        return 1
    wanted = 2 * _processors(device) // max(1, programs)
    return max(1, min(wanted, n_keys // (4 * bn), 64))


def has_tma(device: torch.device) -> bool:
    """Whether the device loads tiles by tensor descriptors."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _architecture(device: torch.device) -> str:
    """The entry of the table for a device: its own, or the one whose shared memory it certainly has."""
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 9:
        return "sm_90" if major in (9, 10) else "sm_89"
    return "sm_80" if (major, minor) in ((8, 0), (8, 7)) else "sm_89"


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


#: Tiles of the second pass and of the backward pass. With 128 wide bfloat16, ahead of time (Triton 3.9);
#: instructions are those of the loop over tiles that need no test:
#:
#: | kernel, what for        | GPU   | registers | spills (bytes) | shared memory | instructions per score |
#: |-------------------------|-------|-----------|----------------|---------------|------------------------|
#: | columns, received       | sm_90 | 178       | 0              | 83 kB         | 5.6                    |
#: |                         | sm_80 | 168       | 0              | 67 kB         | 8.0                    |
#: | masses, lag_mass        | sm_90 | 92        | 0              | 99 kB         | 4.7                    |
#: |                         | sm_80 | 168       | 0              | 67 kB         | 7.7                    |
#: | values, segment_z       | sm_90 | 202       | 0              | 165 kB        | 4.9                    |
#: |                         | sm_80 | 198       | 0              | 98 kB         | 11.7                   |
#: | backward_keys, dk dv    | sm_90 | 255       | 32             | 132 kB        | 12.9                   |
#: |                         | sm_80 | 218       | 0              | 75 kB         | 25.9                   |
#: | backward_queries, dq    | sm_90 | 163       | 0              | 131 kB        | 10.4                   |
#: |                         | sm_80 | 255       | 0              | 98 kB         | 16.2                   |
_SECOND: dict[str, dict[str, dict[int, Tiles]]] = {
    "sm_90": {
        "columns": {128: Tiles(64, 128, 4, 3), 256: Tiles(64, 64, 4, 2)},
        "masses": {128: Tiles(128, 128, 8, 2), 256: Tiles(64, 64, 4, 2)},
        "values": {128: Tiles(128, 128, 8, 2), 256: Tiles(64, 64, 8, 2)},
        "backward_keys": {128: Tiles(64, 128, 8, 2), 256: Tiles(32, 64, 8, 1)},
        "backward_queries": {128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
    },
    "sm_89": {
        "columns": {128: Tiles(64, 128, 4, 2), 256: Tiles(64, 64, 8, 1)},
        "masses": {128: Tiles(128, 128, 8, 2), 256: Tiles(64, 32, 8, 2)},
        "values": {128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
        "backward_keys": {128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 1)},
        "backward_queries": {128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 1)},
    },
    "sm_80": {
        "columns": {128: Tiles(64, 128, 4, 3), 256: Tiles(64, 64, 8, 2)},
        "masses": {128: Tiles(128, 128, 8, 2), 256: Tiles(64, 64, 8, 2)},
        "values": {128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)},
        "backward_keys": {128: Tiles(64, 64, 8, 2), 256: Tiles(32, 64, 8, 1)},
        "backward_queries": {128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    },
}

#: The same for float32, of any kernel: its products take three times the registers, and its tiles twice the memory.
_SECOND_FLOAT32 = {128: Tiles(32, 32, 8, 2), 256: Tiles(16, 16, 4, 1)}


def second_tiles_for(device: torch.device, kernel: str, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for a launch of the second pass or of the backward pass.

    Args:
        device: Where it runs.
        kernel: ``columns``, ``masses``, ``values``, ``backward_keys`` or ``backward_queries``.
        width: Larger padded head size, of keys or values.
        dtype: Type of queries, keys and values.
    """
    if device.type != "cuda":
        return _INTERPRETED
    return shipped_second(_architecture(device), kernel, width, dtype)


def shipped_second(architecture: str, kernel: str, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles of the table of the second pass for an architecture such as ``sm_90``."""
    row = _SECOND_FLOAT32 if dtype == torch.float32 else _SECOND[architecture][kernel]
    return row[min(size for size in row if size >= width)]
