"""A safetensors file laid out in full before its content is known, and written in place through a memory map."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

#: What each type is called in a safetensors header.
_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
#: Shape and type of each tensor, by name.
Entries = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_ZEROS = bytes(1 << 20)


class TensorFile:
    """Tensors of known shapes in a file, all zero at first; writing to one writes to the file.

    The system keeps in memory what it has room for, so tensors far larger than that can be filled.

    Args:
        path: The file; it is made where there is none.
        entries: Shape and type of each tensor.
        about: Text by name for the header.

    Raises:
        OSError: There is no room, or the file cannot be written.
        ValueError: There is a file, but its header is another one.
    """

    def __init__(self, path: Path, entries: Entries, about: Mapping[str, str]) -> None:
        header, offsets = _header(entries, about)
        size = len(header) + sum(_bytes(entry) for entry in entries.values())
        if not path.exists():
            _reserve(path, header, size)
        with path.open("rb") as file:
            if file.read(len(header)) != header or path.stat().st_size != size:
                raise ValueError(f"{path.name} is not as it was laid out")
        # copy-free: numpy maps what torch then reads and writes as its own types
        self._map = np.memmap(path, np.uint8, "r+")
        content = torch.from_numpy(self._map)[len(header) :]
        self.tensors: dict[str, Tensor] = {
            name: content[offsets[name] : offsets[name] + _bytes(entry)]
            .view(entry[1])
            .view(entry[0])
            for name, entry in entries.items()
        }

    def flush(self) -> None:
        """Have the system write to the disk what it still holds in memory."""
        self._map.flush()


def _header(entries: Entries, about: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header, and where in the content behind it each tensor begins."""
    offsets, at = {}, 0
    header: dict[str, object] = {"__metadata__": dict(about)}
    # Wide types first: every tensor then begins at a multiple of its own width.
    for name in sorted(entries, key=lambda name: -entries[name][1].itemsize):
        shape, dtype = entries[name]
        stop = at + _bytes(entries[name])
        header[name] = {
            "dtype": _TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, stop],
        }
        offsets[name], at = at, stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _bytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = entry
    return prod(shape) * dtype.itemsize


def _reserve(path: Path, header: bytes, size: int) -> None:
    """A file of zeros behind a header, its room on the disk taken: a map of a sparse file would end the process
    when the disk is full."""
    partial = path.with_suffix(".reserving")
    with partial.open("wb") as file:
        file.write(header)
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            for start in range(len(header), size, len(_ZEROS)):
                file.write(_ZEROS[: size - start])
    partial.replace(path)
