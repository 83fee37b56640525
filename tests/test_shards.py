"""Reports and their finished parts: interrupted, damaged, out of space, of other settings."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from real_model import planted_llama, planted_model
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.errors import HeadlabError, OutputError
from headlab.planted.words import tokenizer as planted_tokenizer
from headlab.roles.retrieval import Retrieval
from headlab.shards import Shards

ROLES = "previous_token,duplicate_token,induction,sink,copying"
N_PROMPTS = 10
#: Parts of that run: three batches of text, a batch of repeats and one of controls, three batches of text and two
#: of moved first tokens for the sink's details, one of copying and one of its eigenvalues.
N_PARTS = 12


def report(out: Path | None, **options: Any) -> hl.Report:
    options = {"roles": ROLES, "n_prompts": N_PROMPTS, **options}
    return hl.report(options.pop("model", None) or planted_model(), out=out, **options)


def parts(out: Path) -> dict[str, bytes]:
    """Finished parts of every configuration under a report's folder, by path."""
    found = sorted((out / "shards").glob("*/*.npz"))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def assert_same(one: hl.Report, other: hl.Report) -> None:
    """Equal but for what times and counts a run."""
    pd.testing.assert_frame_equal(one.scores.frame, other.scores.frame, check_exact=True)
    assert one.examples == other.examples
    assert one.warnings == other.warnings
    assert one.checks == other.checks
    for key in ("configuration", "seeds", "fingerprint", "token_ids_sha256", "tokenizer_sha256"):
        assert one.reproducibility[key] == other.reproducibility[key]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[hl.Report, Path]:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    return report(out), out


class Interruption(Exception):
    """What comes from outside at a moment nobody chose."""


def stopping_at(text: str) -> Callable[[str], None]:
    def tell(said: str) -> None:
        if text in said:
            raise Interruption

    return tell


# -- a report ------------------------------------------------------------------------------------


def test_a_report_writes_its_files_and_they_read_back_the_same(whole):
    made, out = whole
    files = {path.name for path in out.iterdir()}
    tables = {"scores.parquet", "details.parquet", "examples.parquet"}
    assert files == {"report.json", "report.html", "shards", *tables}
    back = hl.Report.read(out)
    assert_same(made, back)
    assert back.model == made.model
    assert back.claims == made.claims
    frame = pd.read_parquet(out / "scores.parquet")
    pd.testing.assert_frame_equal(frame, made.scores.frame, check_dtype=False)
    data = json.loads((out / "report.json").read_text("utf-8"))
    assert data["reproducibility"]["resumed_parts"] == 0
    assert (out / "report.html").read_text("utf-8").lstrip().lower().startswith("<!doctype html>")


def test_a_reports_self_checks_hold_and_are_true(whole):
    made, _ = whole
    checks = made.checks
    assert checks["difference within rounding"] is True
    assert checks["outputs bit-equal once capture has ended"] is True
    assert 0 <= checks["largest logit difference under capture"] < 1e-3
    assert 0 <= checks["largest deviation of a row's sum from 1"] < 1e-5
    assert not any("Self-check failed" in warning for warning in made.warnings)


def test_a_report_claims_what_was_planted(whole):
    made, _ = whole
    claimed = {
        head: role for role, heads in made.claims.items() if role != "copying" for head in heads
    }
    assert claimed == planted_llama().truth


def test_a_report_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    assert_same(report(None), whole[0])
    assert list(tmp_path.iterdir()) == []


def test_a_report_records_what_it_takes_to_run_it_again(whole):
    facts = whole[0].reproducibility
    configuration = facts["configuration"]
    assert configuration["seed"] == 0
    assert configuration["n_prompts"] == N_PROMPTS
    assert configuration["roles"] == ROLES.split(",")
    assert facts["torch"] == torch.__version__
    assert facts["fingerprint"] == planted_model().fingerprint


def test_a_report_of_one_role_as_a_list(tmp_path: Path):
    made = report(tmp_path / "deep" / "er", roles=["induction"])
    assert made.scores.names == ("induction",)
    assert made.claims == {"induction": ["L2H1"]}
    assert hl.Report.read(tmp_path / "deep" / "er").claims == made.claims


@pytest.mark.parametrize("role", ["induction", "sink", "copying"])
def test_a_model_with_a_short_context_can_be_reported_on(role: str):
    live = hl.load(build("llama", max_position_embeddings=48), tokenizer=tiny_tokenizer())
    made = report(None, model=live, roles=role)
    assert made.scores.frame["score"].notna().all()
    assert made.checks["difference within rounding"] is True


def test_a_model_without_a_tokenizer_is_reported_on_or_refused_in_a_sentence():
    with contextlib.suppress(HeadlabError):
        made = report(None, model=hl.load(build("llama")), roles="induction")
        assert made.scores.frame["score"].notna().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_report_in_another_precision_claims_the_same_and_passes_its_checks(dtype: torch.dtype):
    made = planted_llama()
    live = hl.load(deepcopy(made.module).to(dtype), tokenizer=made.tokenizer)
    done = report(None, model=live, roles="previous_token,duplicate_token,induction,sink")
    assert {head: role for role, heads in done.claims.items() for head in heads} == made.truth
    assert done.checks["difference within rounding"] is True
    assert done.checks["outputs bit-equal once capture has ended"] is True


ORDERS = {
    "attribute": "import headlab as hl",
    "package first": "import headlab.report; import headlab as hl",
    "package last": "import headlab as hl; import headlab.report",
    "name from package": "from headlab.report import Report; import headlab as hl",
    "function from package": "from headlab.report import report; import headlab as hl",
    "function from module": "from headlab.report.run import report; import headlab as hl",
    "from headlab": "from headlab import report; import headlab as hl; assert report is hl.report",
    "class first": "import headlab as hl; hl.Report",
}

ORDER_PROGRAM = """
import inspect, sys, traceback
orders = {orders!r}
for name, line in orders.items():
    for module in [m for m in sys.modules if m == "headlab" or m.startswith("headlab.")]:
        del sys.modules[module]
    scope = {{}}
    exec(line, scope)
    hl = scope["hl"]
    for _ in range(2):  # the second look finds what the first one bound
        assert callable(hl.report), name
        assert hl.report.Report is hl.Report, name
        try:
            hl.report("not a model", roles="nosuch")
        except hl.roles.RoleError as error:
            assert "there is no role 'nosuch'" in str(error)
        else:
            raise AssertionError(name)
    print("ok", name)
"""


def test_report_is_a_function_and_a_package_in_any_order_of_imports():
    program = ORDER_PROGRAM.format(orders=ORDERS)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"ok {name}" for name in ORDERS]


# -- interruption --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "finished"),
    [
        ("previous_token: reading text 1–4", 0),
        ("previous_token: reading text 9–10", 2),
        ("induction: ", 5),  # shares its rows with duplicate_token, which came before
        ("copying: ", 10),
        ("picking examples", N_PARTS),
        ("writing", N_PARTS),
    ],
)
def test_a_run_interrupted_at_any_moment_goes_on_from_there(
    moment: str, finished: int, tmp_path: Path, whole
):
    with pytest.raises(Interruption):
        report(tmp_path, tell=stopping_at(moment))
    kept = parts(tmp_path)
    assert len(kept) == finished
    assert not (tmp_path / "report.json").exists()
    resumed = report(tmp_path)
    assert resumed.reproducibility["resumed_parts"] == finished
    assert_same(resumed, whole[0])
    assert parts(tmp_path).items() >= kept.items()
    assert len(parts(tmp_path)) == N_PARTS
    assert_same(hl.Report.read(tmp_path), whole[0])


def test_an_interruption_inside_a_computation_leaves_nothing_half_done(tmp_path: Path):
    shards = Shards(tmp_path, {"a": 1})

    def compute() -> dict[str, np.ndarray]:
        raise Interruption

    with pytest.raises(Interruption):
        shards.remember("part", compute)
    assert [path.name for path in shards.folder.iterdir()] == ["configuration.json"]
    again = Shards(tmp_path, {"a": 1})
    assert again.remember("part", lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]
    assert again.resumed == 0


def test_a_finished_run_computes_nothing_again(whole, tmp_path: Path):
    made, out = whole
    before = {path: path.stat().st_mtime_ns for path in (out / "shards").rglob("*.npz")}
    again = report(out)
    assert again.reproducibility["resumed_parts"] == N_PARTS
    assert_same(again, made)
    assert {path: path.stat().st_mtime_ns for path in (out / "shards").rglob("*.npz")} == before


def test_a_fresh_run_uses_nothing_that_is_there(tmp_path: Path, whole):
    report(tmp_path)
    for name in parts(tmp_path):
        np.savez(tmp_path / name, wrong=np.zeros(1))
    fresh = report(tmp_path, fresh=True)
    assert fresh.reproducibility["resumed_parts"] == 0
    assert_same(fresh, whole[0])


def test_more_roles_go_on_from_the_parts_of_fewer(tmp_path: Path, whole):
    report(tmp_path, roles="induction")
    made = report(tmp_path)
    assert made.reproducibility["resumed_parts"] == 2
    assert_same(made, whole[0])


# -- damage --------------------------------------------------------------------------------------


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "not a zip", b"not a zip file at all"
    yield "cut in half", content[: len(content) // 2]
    yield "last byte gone", content[:-1]
    yield "zeros", bytes(len(content))
    yield "middle overwritten", content[:200] + bytes(300) + content[500:]


@pytest.mark.parametrize("what", [name for name, _ in damages(b"")])
def test_a_damaged_part_is_computed_again(what: str, tmp_path: Path, whole):
    report(tmp_path)
    name = next(name for name in parts(tmp_path) if "repeats-repeated" in name)
    content = parts(tmp_path)[name]
    (tmp_path / name).write_bytes(dict(damages(content))[what])
    made = report(tmp_path)
    assert made.reproducibility["resumed_parts"] == N_PARTS - 1
    assert_same(made, whole[0])
    assert len(parts(tmp_path)) == N_PARTS


def test_no_flipped_byte_is_taken_for_a_result_or_crashes(tmp_path: Path):
    values = {"x": np.random.default_rng(0).random((4, 5)), "y": np.arange(7)}
    shards = Shards(tmp_path, {"a": 1})
    shards.remember("part", lambda: values)
    path = shards.folder / "part.npz"
    content = path.read_bytes()
    wrong: dict[str, list[int]] = {}
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            found = shards.remember("part", lambda: values)
        except Exception as error:
            wrong.setdefault(type(error).__name__, []).append(at)
            continue
        if found.keys() != values.keys():
            wrong.setdefault("arrays missing", []).append(at)
        elif not all(np.array_equal(found[name], values[name]) for name in values):
            wrong.setdefault("other values", []).append(at)
    assert not wrong


def test_parts_are_never_unpickled(tmp_path: Path):
    shards = Shards(tmp_path, {"a": 1})
    stored = io.BytesIO()
    np.savez(stored, x=np.array([print], dtype=object))
    (shards.folder / "part.npz").write_bytes(stored.getvalue())
    found = shards.remember("part", lambda: {"x": np.zeros(2)})
    assert found["x"].tolist() == [0, 0]
    assert shards.resumed == 0


def test_what_was_computed_and_what_is_read_back_are_the_same(tmp_path: Path):
    values = {
        "floats": np.array([np.nan, np.inf, 1e-300, -0.0]),
        "small": np.random.default_rng(0).random((3, 4)).astype(np.float32),
        "ints": np.arange(5, dtype=np.int32),
        "none": np.zeros((0, 3)),
    }
    first = Shards(tmp_path, {"a": 1}).remember("part", lambda: values)
    again = Shards(tmp_path, {"a": 1})
    second = again.remember("part", lambda: pytest.fail("computed again"))
    assert again.resumed == 1
    for name, value in values.items():
        assert first[name].dtype == second[name].dtype == value.dtype
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_array_equal(np.signbit(value), np.signbit(second[name]))


# -- other settings ------------------------------------------------------------------------------


def test_every_setting_the_numbers_depend_on_has_a_folder_of_its_own(tmp_path: Path):
    report(tmp_path, roles="sink", n_prompts=4)
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the river of stone . " * 900, "utf-8")
    other = planted.scramble(planted_llama(), "L1H0")
    changes: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1},
        "prompts": {"n_prompts": 3},
        "text": {"haystack": text},
        "model": {"model": hl.load(other.module, tokenizer=other.tokenizer)},
    }
    for at, (what, change) in enumerate(changes.items()):
        made = report(tmp_path, **{"roles": "sink", "n_prompts": 4, **change})
        assert made.reproducibility["resumed_parts"] == 0, what
        assert len(list((tmp_path / "shards").iterdir())) == at + 2, what
    again = report(tmp_path, roles="sink", n_prompts=4)
    assert again.reproducibility["resumed_parts"] == 4  # a batch of text, and the sink's details


def test_alpha_and_the_choice_of_roles_change_no_numbers_and_share_parts(tmp_path: Path):
    one = report(tmp_path, roles="sink,induction", alpha=0.05)
    two = report(tmp_path, roles="induction", alpha=1e-5)
    assert two.reproducibility["resumed_parts"] == 2
    assert one.claims["induction"] == ["L2H1"]
    assert two.claims["induction"] == []


def test_an_edited_model_does_not_read_the_parts_of_the_model_as_it_came(tmp_path: Path):
    plain = report(tmp_path, roles="induction")
    with planted_model().edit(hl.ablate("L1H0")):  # the head induction reads from
        alone = hl.score(planted_model(), "induction", n_prompts=N_PROMPTS)
        edited = report(tmp_path, roles="induction")
    assert plain.claims["induction"] == ["L2H1"]
    assert alone.claimed("induction") == []
    assert edited.claims["induction"] == []


def test_a_model_whose_weights_were_changed_does_not_read_the_parts_of_before(tmp_path: Path):
    module = deepcopy(planted_llama().module)
    live = hl.load(module, tokenizer=planted_llama().tokenizer)
    assert report(tmp_path, model=live, roles="sink").claims["sink"] == ["L0H2"]
    with torch.no_grad():
        module.model.layers[0].self_attn.q_proj.weight.zero_()
    assert report(tmp_path, model=live, roles="sink").claims["sink"] == []


def test_a_model_of_which_one_head_was_changed_does_not_read_the_parts_of_before(tmp_path: Path):
    """As someone does who takes one head of many out of a live model by hand."""
    made = planted.model("llama", {"L0H3": "sink"}, 0, n_layers=2, n_heads=16, max_context=160)
    live = hl.load(made.module, tokenizer=made.tokenizer)
    assert report(tmp_path, model=live, roles="sink").claims["sink"] == ["L0H3"]
    with torch.no_grad():
        made.module.model.layers[0].self_attn.q_proj.weight[3 * 64 : 4 * 64] = 0
    assert hl.score(live, "sink", n_prompts=N_PROMPTS).claimed("sink") == []
    assert report(tmp_path, model=live, roles="sink").claims["sink"] == []


def test_a_role_with_other_arguments_does_not_read_the_parts_of_the_first(tmp_path: Path):
    module = build("llama", max_position_embeddings=512)
    live = hl.load(module, tokenizer=planted_tokenizer(97, 512))
    for at, length in enumerate((200, 300)):
        role = Retrieval(lengths=(length,), depths=(0.5,))
        done = report(tmp_path, model=live, roles=[role], n_prompts=2)
        assert done.reproducibility["resumed_parts"] == 0
        assert len(parts(tmp_path)) == at + 1  # two prompts of about one length are one batch


# -- no space ------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, after: int) -> Iterator[None]:
    """A function of the system that reports a full disk from its *after*-th call on."""
    real, calls = getattr(where, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, call)
        yield


@pytest.mark.parametrize(
    ("where", "name"), [(np, "savez_compressed"), (os, "fsync")], ids=["write", "sync"]
)
@pytest.mark.parametrize("after", [0, 2, 4])
def test_a_full_disk_in_the_middle_is_one_sentence_and_loses_nothing(
    where: Any, name: str, after: int, tmp_path: Path, monkeypatch, whole
):
    with failing(monkeypatch, where, name, after), pytest.raises(OutputError) as caught:
        report(tmp_path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(tmp_path) in sentence
    assert os.strerror(errno.ENOSPC) in sentence
    assert "run the same command again" in sentence
    kept = parts(tmp_path)
    assert len(kept) == after
    assert not list(tmp_path.rglob("*.partial"))
    resumed = report(tmp_path)
    assert resumed.reproducibility["resumed_parts"] == after
    assert parts(tmp_path).items() >= kept.items()
    assert_same(resumed, whole[0])


def test_a_full_disk_while_the_report_is_written_keeps_the_parts_and_the_earlier_report(
    tmp_path: Path, monkeypatch, whole
):
    report(tmp_path, roles="sink")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    added = N_PARTS - 8  # the sink's own parts are there
    with failing(monkeypatch, os, "fsync", added), pytest.raises(OutputError) as caught:
        report(tmp_path)
    assert "\n" not in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    resumed = report(tmp_path)
    assert resumed.reproducibility["resumed_parts"] == N_PARTS
    assert_same(resumed, whole[0])


LIMITED = """
import resource, sys
sys.path.insert(0, {tests!r})
import numpy as np
from headlab.errors import OutputError
from headlab.shards import Shards
shards = Shards({out!r}, {{"a": 1}})
shards.remember("small", lambda: {{"x": np.arange(10)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
noise = np.random.default_rng(0).random(100_000)
try:
    shards.remember("large", lambda: {{"x": noise}})
except OutputError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits on file sizes are POSIX")
def test_a_file_the_system_refuses_to_grow_is_one_sentence_and_leaves_no_trace(tmp_path: Path):
    program = LIMITED.format(tests=str(Path(__file__).parent), out=str(tmp_path)).replace(
        f"Shards({str(tmp_path)!r}", f"Shards(__import__('pathlib').Path({str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert os.strerror(errno.EFBIG) in done.stdout
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["configuration.json", "small.npz"]


@pytest.mark.parametrize("what", ["out", "shards"])
def test_a_folder_that_cannot_be_made_is_refused_before_any_work(what: str, tmp_path: Path):
    (tmp_path / "file").write_text("here first")
    out = tmp_path / "file" / "out" if what == "out" else tmp_path / "out"
    if what == "shards":
        out.mkdir()
        (out / "shards").write_text("here first")
    told: list[str] = []
    with pytest.raises(OutputError, match="cannot write to") as caught:
        report(out, tell=told.append)
    assert "\n" not in str(caught.value)
    assert told == []


def test_a_partial_file_of_a_killed_run_is_in_nobodys_way(tmp_path: Path):
    shards = Shards(tmp_path, {"a": 1})
    (shards.folder / "part.partial").write_bytes(b"half")
    assert shards.remember("part", lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]
    assert sorted(p.name for p in shards.folder.iterdir()) == ["configuration.json", "part.npz"]
