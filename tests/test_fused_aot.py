"""The shipped configurations of the Triton kernels, compiled without a GPU: registers, spills, tensor cores.

They compile in a process of their own, since this one has Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent

#: Bytes of shared memory a program may have, by architecture.
SHARED = {80: 99 << 10, 90: 227 << 10}

CASES = (
    "forward-plain", "forward-default", "forward-rows", "forward-features", "forward-topk",
    "forward-decode", "forward-mask", "forward-bias", "merge", "second-received", "second-block-map", "second-lag-mass",
    "second-segment-z", "backward-keys", "backward-queries",
)  # fmt: skip

#: With mask, bias and soft cap, and all that goes with them: beyond what registers hold, but they compile and fit.
EVERYTHING = ("forward-everything", "second-everything")

#: Bytes of a thread that may not fit its registers, stored and loaded; Triton 3.6 spills more than 3.9.
SPILLS = {
    ("forward-mask", 80): 256,
    ("forward-mask", 90): 256,
    ("forward-bias", 80): 256,
    ("forward-bias", 90): 256,
    ("backward-keys", 90): 256 if triton.__version__.startswith("3.6.") else 128,
}


@cache
def compiled(capability: int) -> tuple[dict[str, dict[str, int]], str]:
    """What every case that compiles uses on an architecture, and why others do not."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "aot.py", str(capability), *CASES, *EVERYTHING],
        env=environment
        | {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    lines = (line.split() for line in done.stdout.splitlines())
    found = {
        case: {name: int(x) for name, x in (word.split("=") for word in words)}
        for case, *words in lines
    }
    return found, done.stderr


def uses(case: str, capability: int) -> dict[str, int]:
    """What a case uses, which has to compile."""
    found, errors = compiled(capability)
    assert case in found, errors
    return found[case]


@pytest.mark.parametrize("case", EVERYTHING)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_with_every_feature_compile_and_fit_shared_memory(
    case: str, capability: int
) -> None:
    used = uses(case, capability)
    assert used["shared"] <= SHARED[capability], used
    assert used["HGMMA" if capability == 90 else "HMMA"] >= 12, used


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("capability", [80, 90])
def test_shipped_kernels_fit_the_machine(case: str, capability: int) -> None:
    used = uses(case, capability)
    assert used["spills"] <= SPILLS.get((case, capability), 16), used
    assert used["registers"] <= 255, used
    assert used["shared"] <= SHARED[capability], used
    if case != "merge":  # few rows, as in decoding, are below what a warp group multiplies
        wide = capability == 90 and case != "forward-decode"
        assert used["HGMMA" if wide else "HMMA"] >= 12, used
    if case == "forward-plain":
        # In the loop over keys, per score: one exponential, one maximum, one sum, and no key's number as a float.
        for instruction in ("MUFU", "FMNMX", "FADD"):
            assert used[instruction] <= 1.3 * used["scores"], used
        assert used["I2F"] + used["I2FP"] == 0, used
    if case == "forward-rows":  # sums of entropy and distance: what the plain kernel has not
        assert used["FADD"] >= 1.5 * used["scores"], used
