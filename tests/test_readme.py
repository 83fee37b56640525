"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import headlab as hl

ROOT = Path(__file__).resolve().parent.parent


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.long
def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run = [block for block in blocks("python") if 'data={"spans"' not in block]
    assert len(run) >= 2
    for block in run:
        # Every role would take minutes, and `make report` runs them.
        exec(compile(block.replace('roles="all"', 'roles="sink"'), "README.md", "exec"), names)
    assert names["effects"].frame.shape[0] == 270
    assert len(names["circuit"].scores) > 0
    assert (tmp_path / "report" / "report.html").exists()


def test_names_of_the_causal_table_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    table = text.split("## Causal experiments")[1].split("Sites are")[0]
    named = set(re.findall(r"`([A-Za-z_]+)(?:\(|`)", table))
    assert len(named) > 20
    missing = [name for name in named if not hasattr(hl.causal, name)]
    assert missing == []
