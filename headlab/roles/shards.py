"""Finished parts of long work, one file each, so that a killed run resumes where it stopped.

A shard's folder is named after everything its numbers depend on, so a run with another model, seed or setting
never reads it. Files are written beside their place and moved there, so a shard is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headlab.errors import OutputError
from headlab.roles.base import Arrays


class Shards:
    """Stores arrays by name under a folder.

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
            raise _cannot_write(folder, error) from error

    def remember(self, key: str, compute: Callable[[], Arrays]) -> Arrays:
        """The stored arrays of this name, computed and stored first where there are none."""
        path = self.folder / f"{key}.npz"
        if path.exists():
            try:
                with np.load(path) as stored:  # allow_pickle stays off: nothing unpickles
                    self.resumed += 1
                    return dict(stored)
            except (OSError, ValueError, zipfile.BadZipFile):
                path.unlink(missing_ok=True)  # damaged from outside: compute it again
        arrays = compute()
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # names are not allow_pickle
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise _cannot_write(self.folder.parent, error) from error
        return arrays


def _cannot_write(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write to {folder}: {error.strerror or error}; what is finished is kept, so free the way and "
        "run the same command again to go on from there"
    )
