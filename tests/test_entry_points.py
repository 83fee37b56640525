"""Roles that installed packages add: found by name, listed, scored; a broken one is named in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headlab as hl
from headlab.roles import ROLES, RoleError
from headlab.roles.base import load_entry_points

ROLE = '''
import numpy as np
from headlab.roles import Measurement, Role, RoleInfo

class Half(Role):
    """The first head of every layer, whatever it does."""

    info = RoleInfo(
        name="half", title="Half", question="?", statistic="s", null="n", decision="d",
        reference="nobody", min_score=0.2, min_effect=0.1, row_convention="none",
    )
    schema = {"type": "object", "properties": {"by": {"type": "number"}}, "required": ["by"]}

    def measure(self, probing):
        by = [record["by"] for record in probing.records or [{"by": 0.5}] * probing.n_prompts]
        spec = probing.model.spec
        values = np.zeros((len(by), spec.n_layers, spec.n_heads))
        values[:, :, 0] = np.array(by)[:, None]
        return Measurement(values, np.zeros_like(values))

made = Half()
number = 3

def fails():
    pass

class Unfinished(Role):
    pass
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``install("half = pack:Half")`` puts a package with such entry points on the path."""
    known = dict(ROLES)

    def put(*entries: str) -> None:
        (tmp_path / "headlab_half_pack.py").write_text(ROLE)
        about = tmp_path / "headlab_half_pack-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: headlab-half-pack\nVersion: 1.0\n"
        )
        (about / "entry_points.txt").write_text("\n".join(["[headlab.roles]", *entries, ""]))
        monkeypatch.syspath_prepend(tmp_path)
        load_entry_points.cache_clear()

    yield put
    load_entry_points.cache_clear()
    ROLES.clear()
    ROLES.update(known)
    monkeypatch.delitem(__import__("sys").modules, "headlab_half_pack", raising=False)


@pytest.mark.parametrize("what", ["Half", "made"])
def test_an_installed_role_is_found_by_name_and_scored(
    what: str, install: Callable[..., None], lab: Callable[..., Any], capsys: Any
):
    from headlab.cli.app import app

    install(f"half = headlab_half_pack:{what}")
    scores = hl.score(lab("llama"), "half")
    assert scores.claimed("half") == ["L0H0", "L1H0"]
    assert (scores.frame["n"] == 20).all()
    records = [{"by": 0.25 + at / 64} for at in range(6)]
    scores = hl.score(lab("llama"), "half", data={"half": records})
    assert scores.frame.loc[0, "score"] == pytest.approx(0.25 + 2.5 / 64)
    assert scores.frame.loc[0, "n"] == 6
    app(["tasks", "list"], standalone_mode=False)
    assert "half" in capsys.readouterr().out
    app(["tasks", "schema", "half"], standalone_mode=False)
    assert '"by"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "half = headlab_half_pack:Absent",
            "the role 'half' of headlab_half_pack:Absent cannot be",
        ),
        ("half = no_such_pack:Half", "'half' of no_such_pack:Half cannot be loaded: No module"),
        ("half = headlab_half_pack:Unfinished", "cannot be loaded: .*abstract"),
        (
            "half = headlab_half_pack:number",
            "the entry point 'half' .* is not a headlab.roles.Role",
        ),
        ("half = headlab_half_pack:fails", "is not a headlab.roles.Role"),
    ],
)
def test_a_broken_one_is_named_in_one_sentence(
    entry: str,
    message: str,
    install: Callable[..., None],
    lab: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
):
    from headlab.cli import main

    install(entry)
    with pytest.raises(RoleError, match=message):
        hl.score(lab("llama"), "sink")
    monkeypatch.setattr("sys.argv", ["headlab", "tasks", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("headlab: ")
    assert said.err.count("\n") == 1
