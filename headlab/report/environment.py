"""The part of a report's reproducibility block that is the same for every run."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("headlab", "torch", "transformers", "numpy")


def environment(command: Sequence[str] | None = None) -> dict[str, str]:
    """Versions, python, platform, command line and date, by the names a report uses.

    Args:
        command: The command line; this process's own by default. Its program is named without its
            folder, which says more about a machine than about the run.
    """
    words = list(sys.argv if command is None else command)
    words[:1] = [Path(word).name for word in words[:1]]
    return {
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": shlex.join(words),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
