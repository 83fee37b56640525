"""Finished parts of long work, one file each, so that a killed run resumes where it stopped.

A shard's folder is named after everything its numbers depend on, so a run with another model, seed or setting
never reads it. Files are written beside their place and moved there, so a shard is whole or absent.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from headlab.errors import OutputError, PlanError

#: What a part gives.
Arrays = Mapping[str, np.ndarray]

#: ``remember(key, compute)`` returns stored arrays, or computes and stores them.
Remember = Callable[[str, Callable[[], Arrays]], Arrays]


def forget(key: str, compute: Callable[[], Arrays]) -> Arrays:
    """A :data:`Remember` that keeps nothing."""
    return compute()


_DIGEST = hashlib.sha256().digest_size


class Shards:
    """Stores arrays by name under a folder, each behind a digest of its content.

    Args:
        folder: Where shards of every configuration live.
        configuration: Everything the numbers depend on.
        fresh: Whether to drop what an earlier run of the same configuration left.

    Raises:
        OutputError: The folder cannot be written.
    """

    def __init__(self, folder: Path, configuration: Mapping[str, Any], fresh: bool = False) -> None:
        text = json.dumps(configuration, sort_keys=True, default=str)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.resumed = 0
        try:
            if fresh:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "configuration.json").write_text(text, "utf-8")
        except OSError as error:
            raise OutputError(f"cannot write to {folder}: {error.strerror or error}") from error

    def remember(self, key: str, compute: Callable[[], Arrays]) -> Arrays:
        """The stored arrays of this name, computed and stored first where there are none."""
        path = self.folder / f"{key}.npz"
        stored = _read(path)
        if stored is not None:
            self.resumed += 1
            return stored
        arrays = compute()
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                content = io.BytesIO()
                np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # only arrays are named
                file.write(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise cannot_write(self.folder.parent, error) from error
        return arrays


def write_text(path: str | Path, text: str) -> Path:
    """Write a file whole or not at all, making its folder where needed.

    Raises:
        OutputError: It cannot be written; an earlier file is then untouched.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    return path


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read and taken apart into one sentence.

    Args:
        path: The file.
        what: What it should hold, such as ``"effects"``.

    Raises:
        OutputError: Something went wrong inside.
    """
    try:
        yield
    except PlanError as error:
        raise OutputError(f"{path} holds no readable {what}: {error}") from error
    except RecursionError as error:
        raise OutputError(f"{path} holds no readable {what}: it is nested too deep") from error
    except (
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise OutputError(f"{path} holds no readable {what}: {error!r:.200}") from error


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """A shard's arrays, or None where there is no whole shard; nothing is parsed before its digest fits."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, arrays = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(arrays).digest() != digest:
        return None
    with np.load(io.BytesIO(arrays)) as stored:  # allow_pickle stays off: nothing unpickles
        return dict(stored)


def cannot_write(folder: Path, error: OSError) -> OutputError:
    """The error for a folder that long work can no longer write to."""
    return OutputError(
        f"cannot write to {folder}: {error.strerror or error}; what is finished is kept, so free the way and "
        "run the same command again to go on from there"
    )
