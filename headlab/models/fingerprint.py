"""Short names for weights.

A fingerprint tells two sets of weights apart in reports and caches. It is not a security measure:
it reads samples, so that naming a 100 GB checkpoint takes milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 8


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Sixteen hex digits for a set of safetensors files, whatever folder they lie in.

    Hashes each file's name, size, its first 4 KiB (the header, which lists names, shapes and
    dtypes) and 64 evenly spaced 4 KiB samples of its values, because two fine-tunes of one model
    have the same header and size.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES_PER_FILE):
                file.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def module_fingerprint(module: nn.Module) -> str:
    """Sixteen hex digits for a live module: names, shapes and eight values of each tensor.

    Values are compared as float32, so the same weights held in another dtype differ only where
    rounding changed them. Tensors on the meta device count by name and shape.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}:{tuple(tensor.shape)}".encode())
        if tensor.is_meta or tensor.numel() == 0:
            continue
        flat = tensor.detach().reshape(-1)
        where = torch.linspace(0, flat.numel() - 1, _SAMPLES_PER_TENSOR, dtype=torch.float64)
        values = flat[where.long().to(flat.device)].to(torch.float32)
        digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def weights_sha256(module: nn.Module) -> str:
    """sha256 over every value of every tensor, in hex: any change of a weight changes it."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
