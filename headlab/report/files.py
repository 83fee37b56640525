"""Writing results so that a killed or failing run never leaves a broken file behind.

Everything is first written, complete and synced, under a temporary name in the folder it belongs
to; only when all of it is on disk are the names swapped. A full disk is thus met before any earlier
file is touched.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from headlab.errors import OutputError


def write_file(path: str | Path, content: str | bytes) -> Path:
    """Write one file atomically, making its folder where needed.

    Raises:
        OutputError: The folder or file cannot be written; an earlier file is then untouched.
    """
    path = Path(path)
    return write_files(path.parent, {path.name: content})[path.name]


def write_files(folder: str | Path, contents: Mapping[str, str | bytes]) -> dict[str, Path]:
    """Write several files of one folder, each atomically, in the order given.

    Returns:
        Path of each file by its name.

    Raises:
        OutputError: The folder or a file cannot be written; earlier files are then untouched.
    """
    folder = Path(folder)
    staged: dict[str, Path] = {}
    name = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if (folder / name).is_dir():
                raise OutputError(
                    f"cannot write {folder / name}: it is a folder; remove it or choose another"
                )
            staged[name] = folder / f".{name}.{secrets.token_hex(6)}.part"
            _write_synced(staged[name], _encode(content))
        for name in contents:
            os.replace(staged[name], folder / name)
        _sync_folder(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot write {folder / name}: {reason.lower()}; "
            "choose a folder that is writable and has space"
        ) from error
    finally:
        # After success the temporary names are gone; after a failure or Ctrl-C they must not stay.
        for path in staged.values():
            path.unlink(missing_ok=True)
    return {name: folder / name for name in contents}


def read_bytes(path: Path) -> bytes:
    """Content of a file.

    Raises:
        OutputError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(
            f"cannot read {path}: {reason}; give the folder a report was written to"
        ) from error


def sha256(content: bytes) -> str:
    """Hexadecimal SHA-256 digest."""
    return hashlib.sha256(content).hexdigest()


def dump_json(value: Any, *, indent: int | None = 2) -> str:
    """Strictly valid JSON: NaN and infinities become null, odd types their plain counterpart."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """A value of JSON types only, for numpy numbers, arrays, dataclasses, sets, paths and such."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=str)]
    return str(value)


def dump_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """A Parquet file of the table whose schema also carries ``metadata``."""
    extra = {key.encode(): value.encode() for key, value in metadata.items()}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **extra})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def load_parquet(content: bytes, path: Path) -> pd.DataFrame:
    """The frame of a Parquet file's bytes; ``path`` is for the error message.

    Raises:
        OutputError: The bytes are not Parquet.
    """
    try:
        return pq.read_table(io.BytesIO(content)).to_pandas()
    except pa.ArrowException as error:
        raise OutputError(f"{path} is not a Parquet file headlab can read: {error}") from error


def _encode(content: str | bytes) -> bytes:
    # A lone surrogate has no UTF-8 form; its escape is what both JSON and a reader expect to see.
    return content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content


def _write_synced(path: Path, content: bytes) -> None:
    # os.open rather than tempfile: the file then gets the user's usual permissions, not 0600.
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
    )
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
