"""Compiles the C++ engine on first use and keeps the result.

A compiled file is kept under a name made of the source, the compiler and the instruction set it compiles for, so that
machines that share a home never run each other's code. It appears under that name complete or not at all: several
processes may build at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from headlab.errors import OutputError, UnsupportedError
from headlab.shards import write_text

_SOURCE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)
#: How compilers are asked for this machine's instruction set: one of these works, if only the last.
_NATIVE: tuple[tuple[str, ...], ...] = (("-march=native",), ("-mcpu=native",), ())


def library() -> ctypes.CDLL:
    """The compiled engine, built if there is none for this machine yet.

    Raises:
        UnsupportedError: There is no C++ compiler, it failed, or its result cannot be kept or loaded.
    """
    found = _load(compiler(), _cache_folder())
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found


def unavailable() -> str | None:
    """Why there is no C++ engine on this machine, or None when there is one."""
    found = _load(compiler(), _cache_folder())
    return found if isinstance(found, str) else None


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: ``$CXX``, or what is on the path; empty when there is none."""
    if chosen := os.environ.get("CXX"):
        try:
            return tuple(shlex.split(chosen))
        except ValueError:  # an open quotation: no command, and it will be said so
            return (chosen,)
    names = ("c++", "g++", "clang++")
    return next(((path,) for name in names if (path := shutil.which(name))), ())


def compiled_name(command: tuple[str, ...], native: tuple[str, ...], target: str) -> str:
    """File name of the compiled engine: a hash of all it depends on.

    Args:
        command: The compiler.
        native: Flags that ask for this machine's instruction set.
        target: The compiler's predefined macros under these flags: its version, and every instruction it may use.
    """
    digest = hashlib.sha256(repr((command, _FLAGS, native, target, sys.platform)).encode())
    for path in sorted((*_SOURCE.glob("*.cpp"), *_SOURCE.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"attention-{digest.hexdigest()[:20]}.so"


def _cache_folder() -> Path:
    from headlab.models import cache_root  # late: models need kernels, and most of their imports

    return cache_root() / "kernels"


@cache
def _load(command: tuple[str, ...], folder: Path) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not command:
        return "there is no C++ compiler (install g++ or clang++, or name one in CXX)"
    try:
        native, target = _target(command)
        path = folder / compiled_name(command, native, target)
        if not _whole(path):
            folder.mkdir(parents=True, exist_ok=True)
            _compile(command, native, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else "no message")
        return f"the C++ compiler {shlex.join(command)} failed: {first.strip()}"
    except (OSError, OutputError) as error:
        return f"it could not be built or loaded: {error}"


def _digest(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _whole(path: Path) -> bool:
    """Whether a compiled file is as it was written: loading a damaged one would end the process."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _digest(path).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _target(command: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Flags for this machine's instruction set, and the macros that they define."""
    for native in _NATIVE:
        ask = [*command, *native, "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(ask, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return native, "\n".join(sorted(done.stdout.splitlines()))
    done.check_returncode()
    raise AssertionError("a failed command has a return code")


def _compile(command: tuple[str, ...], native: tuple[str, ...], path: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        build = [*command, *_FLAGS, *native, str(_SOURCE / "attention.cpp"), "-o", name]
        subprocess.run(build, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        os.replace(name, path)
        write_text(_digest(path), digest)
    finally:
        Path(name).unlink(missing_ok=True)
