"""The GPU benchmark is ready to run: all that it does but the timing, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_capture.py"


@pytest.mark.long
def test_its_checks_hold_and_every_timed_case_launches() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--seed", "3"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "336 of 336 checks hold" in done.stdout
    assert done.stdout.count("launched: ") == 13
