"""What an unfinished stream leaves in its folder, so that a kill at any moment loses one chunk at most.

``trace.partial/`` beside the trace to be holds

    trace.safetensors    the trace, laid out in full
    columns.safetensors  sums over queries, a second time: a chunk reads one copy and writes the other
    cache.bin            keys and values of finished chunks, as they went into the model's cache
    journal.json         how many chunks are finished, and under which settings
    lock                 held while a process works here

A chunk is finished once the journal says so, and the journal says so after everything else is on the disk. What
lies beyond what it says is written over.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headlab.errors import OutputError
from headlab.shards import cannot_write

_FOLDER = "trace.partial"
_FORMAT = "headlab-stream-1"

#: Keys and values that one chunk adds to the model's cache, by layer of that cache.
KeyValues = dict[int, tuple[Tensor, Tensor]]


class Unfinished:
    """The folder of one unfinished stream; made by :func:`working`.

    Args:
        out: Where the trace goes when it is whole.
        settings: Everything its numbers depend on, in words.
    """

    def __init__(self, out: Path, settings: Mapping[str, str]) -> None:
        self.out = out
        self.folder = out / _FOLDER
        self.settings = dict(settings)
        self.trace = self.folder / "trace.safetensors"
        self.columns = self.folder / "columns.safetensors"
        self._cache = self.folder / "cache.bin"
        self._journal = self.folder / "journal.json"
        self.finished = 0
        self._layout: list[list[Any]] = []
        self._sums: list[list[int]] = []  # length and checksum of each chunk

    @property
    def begun(self) -> bool:
        """Whether an earlier run has finished a chunk."""
        return self._journal.exists()

    def read(self) -> None:
        """Take up what an earlier run with the same settings has finished.

        Raises:
            OutputError: What is there is of other settings, or damaged.
        """
        if not self.begun:
            return
        try:
            journal = json.loads(self._journal.read_text("utf-8"))
            settings = journal["settings"] if journal["format"] == _FORMAT else {"format": ""}
            if settings == self.settings:
                self._take(**{name: journal[name] for name in ("finished", "layout", "sums")})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged("its journal cannot be read") from error
        if settings != self.settings:
            names = settings.keys() | self.settings.keys()
            differ = sorted(name for name in names if settings.get(name) != self.settings.get(name))
            raise OutputError(
                f"{self.out} holds an unfinished trace that differs from this one in {', '.join(differ)}: choose "
                "another folder, or start over here with --fresh (fresh=True)"
            )

    def _take(self, finished: Any, layout: Any, sums: Any) -> None:
        """Take up a journal's entries, once they have the form they were written in."""
        for number in (finished, *(x for pair in sums for x in pair)):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is no count")
        if any(len(pair) != 2 for pair in sums):
            raise ValueError("a chunk has a length and a checksum")
        for layer, *forms, dtype in layout:
            numbers = [layer, *(x for form in forms for x in form)]
            if len(numbers) != 5 or not all(type(x) is int and x >= 0 for x in numbers):
                raise ValueError("its layout is none")
            if not isinstance(getattr(torch, dtype), torch.dtype):
                raise ValueError(f"{dtype!r} is no type")
        self.finished, self._layout, self._sums = finished, layout, sums

    def check(self, n_chunks: int) -> None:
        """Check what was taken up against the number of chunks there are.

        Raises:
            OutputError: They do not agree.
        """
        # The last chunk's keys and values are not stored: nothing comes after it.
        stored = self.finished if self.finished < n_chunks else n_chunks - 1
        if self.finished > n_chunks or len(self._sums) != stored:
            raise self.damaged("its journal counts chunks that there are not")

    def damaged(self, what: str) -> OutputError:
        """The error for a folder that cannot be gone on with."""
        return OutputError(
            f"the unfinished trace in {self.out} is damaged: {what}; start over with --fresh (fresh=True)"
        )

    def clear(self) -> None:
        """Drop everything but the lock."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """Drop the folder, now that the trace is whole."""
        self._journal.unlink()
        shutil.rmtree(self.folder)

    def append(self, new: KeyValues) -> None:
        """Append what a chunk has added to the cache."""
        if not self._layout:
            self._layout = [
                [layer, *(_form(x) for x in pair), str(pair[0].dtype).removeprefix("torch.")]
                for layer, pair in sorted(new.items())
            ]
        content = b"".join(_content(x) for _, pair in sorted(new.items()) for x in pair)
        before = sum(length for length, _ in self._sums)
        with self._cache.open("r+b" if self._cache.exists() else "w+b") as file:
            file.seek(before)  # over what a chunk that was not finished has left
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._sums.append([len(content), zlib.crc32(content)])

    def note(self, finished: int) -> None:
        """Write into the journal that chunks are finished."""
        self.finished = finished
        journal = {
            "format": _FORMAT,
            "settings": self.settings,
            "finished": finished,
            "layout": self._layout,
            "sums": self._sums,
        }
        partial = self._journal.with_suffix(".writing")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(journal, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._journal)

    def stored(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Layer, keys and values of each layer of the cache, over all finished chunks.

        Raises:
            OutputError: They are not as they were written.
        """
        if not self._sums:
            return
        total = sum(length for length, _ in self._sums)
        if not self._cache.exists() or self._cache.stat().st_size < total:
            raise self.damaged("it has fewer keys and values than its journal says")
        content = np.memmap(self._cache, np.uint8, "r", shape=(total,))
        chunks, at = [], 0
        for length, checksum in self._sums:
            chunks.append(content[at : at + length])
            at += length
            if zlib.crc32(chunks[-1].data) != checksum:
                raise self.damaged("its keys and values are not those that were written")
        starts = [0] * len(chunks)
        each = sum(_width(form, dtype) for _, *forms, dtype in self._layout for form in forms)
        for layer, *forms, dtype in self._layout:
            pair = []
            for form in forms:
                parts = []
                for index, chunk in enumerate(chunks):
                    n = len(chunk) // each
                    stop = starts[index] + n * _width(form, dtype)
                    part = torch.from_numpy(np.array(chunk[starts[index] : stop]))
                    heads, width = form
                    parts.append(part.view(getattr(torch, dtype)).view(1, heads, n, width))
                    starts[index] = stop
                pair.append(torch.cat(parts, 2))
            yield layer, pair[0], pair[1]


@contextmanager
def working(out: Path, settings: Mapping[str, str]) -> Iterator[Unfinished]:
    """The folder of an unfinished stream, for this process alone.

    Raises:
        OutputError: It cannot be written, or another process works in it.
    """
    unfinished = Unfinished(out, settings)
    try:
        with _locked(unfinished.folder / "lock", out):
            yield unfinished
    except OSError as error:
        raise cannot_write(out, error) from error


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    """Hold a lock that the system takes back when the process ends, however it ends."""
    import fcntl

    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(
                    f"another process is writing a trace to {out}; wait for it, or choose another folder"
                ) from None
            try:
                held = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                held = False
            if held:  # else its last holder has just finished and removed it
                yield
                return


def _form(x: Tensor) -> list[int]:
    """Heads and width of keys or values [1, head, position, width]."""
    return [x.shape[1], x.shape[3]]


def _width(form: list[int], dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return form[0] * form[1] * itemsize


def _content(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
