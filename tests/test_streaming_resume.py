"""Streams that are stopped: killed at any moment, met by a full disk, by damage or by another run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_streaming import CHUNK, assert_same, chosen_plan, ids_of, whole_plan
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.attention import streaming, tensorfile, unfinished
from headlab.errors import OutputError

Lab = Callable[..., Any]


# -- kills -----------------------------------------------------------------------------------------


def killed_in(step: str, count: int, work: Callable[[], Any]) -> None:
    """Do work in a forked process that kills itself as it enters a step for the nth time."""
    owner: Any
    owner, name = {
        "writing": (streaming._Writing, "put"),
        "flushing": (tensorfile.TensorFile, "flush"),
        "appending": (unfinished.Unfinished, "append"),
        "noting": (unfinished.Unfinished, "note"),
        "moving": (Path, "replace"),
        "removing": (unfinished.Unfinished, "remove"),
    }[step]
    child = os.fork()
    if not child:
        original, left = getattr(owner, name), [count]

        def deadly(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **options)

        setattr(owner, name, deadly)
        try:
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize(
    ("step", "count"),
    [("writing", 1), ("writing", 60), ("writing", 130), ("flushing", 5), ("appending", 3),
     ("noting", 1), ("noting", 4), ("noting", 5), ("moving", 8), ("moving", 9), ("removing", 1)],
)  # fmt: skip
def test_a_kill_at_any_moment_changes_no_bit(lab: Lab, step: str, count: int, tmp_path: Path):
    model, ids, plan = lab("gemma3_text"), ids_of(), whole_plan()
    undisturbed = model.stream(ids, plan, tmp_path / "a", chunk=CHUNK)
    killed_in(step, count, lambda: model.stream(ids, plan, tmp_path / "b", chunk=CHUNK))
    lines: list[str] = []
    resumed = model.stream(ids, plan, tmp_path / "b", chunk=CHUNK, tell=lines.append)
    assert_same(undisturbed, resumed, exactly=True)
    if (step, count) == ("noting", 4):
        assert lines[0] == "going on from token 24 of 37"
        assert len(lines) == 3
    if step in ("moving", "removing") and count != 8:
        assert not [line for line in lines if "tokens/s" in line]  # nothing was run again


def test_a_stream_killed_after_every_chunk_comes_to_its_end(lab: Lab, tmp_path: Path):
    model, ids, plan = lab("gpt_oss"), ids_of(), whole_plan()
    undisturbed = model.stream(ids, plan, tmp_path / "a", chunk=CHUNK)
    for _ in range(4):
        killed_in("noting", 2, lambda: model.stream(ids, plan, tmp_path / "b", chunk=CHUNK))
    resumed = model.stream(ids, plan, tmp_path / "b", chunk=CHUNK)
    assert_same(undisturbed, resumed, exactly=True)


def test_a_command_killed_from_outside_goes_on(
    run: Callable[..., Any], capsys: Any, tmp_path: Path
):
    n = 1500
    build("llama", max_position_embeddings=n).save_pretrained(tmp_path / "long")
    tiny_tokenizer().save_pretrained(tmp_path / "long")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{token}" for token in ids_of(n + 50)[0].tolist()), "utf-8")
    words = ["trace", tmp_path / "long", "--file", text, "--context", n, "--chunk", 50]
    words += ["--keep", "entropy,received,rows,z", "--out", tmp_path / "out"]
    program = [sys.executable, "-c", "from headlab.cli import main; main()"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*program, *map(str, words)], stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("300 of 1,500 tokens"):
                break
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "trace.json").exists()
    capsys.readouterr()
    done = run(*words)
    assert done.code == 0
    lines = done.err.splitlines()
    assert lines[1].startswith("going on from token ")
    assert int(lines[1].split()[4].replace(",", "")) >= 300
    assert lines[-1].startswith("1,500 of 1,500 tokens")
    model = hl.load(tmp_path / "long", device="cpu", dtype="float32")
    plan = [hl.keep.rows(queries=[-1]), hl.keep.statistics("entropy", "received")]
    once = model.trace(ids_of(n + 50)[:, :n], [*plan, hl.keep.tensors("z")], logits="last")
    assert_same(once, hl.Trace.load(tmp_path / "out"))


def test_a_whole_trace_is_not_made_again(lab: Lab, tmp_path: Path):
    model, ids, plan = lab("llama"), ids_of(), chosen_plan()
    first = model.stream(ids, plan, tmp_path, chunk=CHUNK)
    stamp = (tmp_path / "trace.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    again = model.stream(ids, plan, tmp_path, chunk=CHUNK, tell=lines.append)
    assert lines == [f"{tmp_path} holds this trace already"]
    assert (tmp_path / "trace.safetensors").stat().st_mtime_ns == stamp
    assert_same(first, again, exactly=True)
    model.stream(ids, plan, tmp_path, chunk=CHUNK, fresh=True)
    assert (tmp_path / "trace.safetensors").stat().st_mtime_ns > stamp
    before = (tmp_path / "trace.safetensors").read_bytes()
    with pytest.raises(OutputError, match=r"holds a finished trace of another prompt .*--fresh"):
        model.stream(ids_of(20), [hl.keep.rows(queries=[0])], tmp_path, chunk=CHUNK)
    assert (tmp_path / "trace.safetensors").read_bytes() == before
    other = model.stream(ids_of(20), [hl.keep.rows(queries=[0])], tmp_path, chunk=CHUNK, fresh=True)
    assert other.n_positions == 20


# -- folders that cannot be gone on with -----------------------------------------------------------


@pytest.fixture
def stopped(lab: Lab, tmp_path: Path) -> Callable[..., hl.Trace]:
    """Goes on with a stream that was killed after three chunks."""
    model, ids = lab("llama"), ids_of()

    def go_on(**options: Any) -> hl.Trace:
        settings = {"prompt": ids, "keep": whole_plan(), "chunk": CHUNK} | options
        return model.stream(out=tmp_path, **settings)

    killed_in("noting", 4, go_on)
    return go_on


def partial(tmp_path: Path, name: str) -> Path:
    return tmp_path / "trace.partial" / name


def _journal(folder: Path, **changes: Any) -> None:
    path = folder / "journal.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut cache": (lambda folder: os.truncate(folder / "cache.bin", 1000), "fewer keys"),
    "no cache": (lambda folder: (folder / "cache.bin").unlink(), "fewer keys"),
    "changed cache": (
        lambda folder: (folder / "cache.bin").write_bytes(
            b"x" * (folder / "cache.bin").stat().st_size
        ),
        "not those that were written",
    ),
    "no trace": (lambda folder: (folder / "trace.safetensors").unlink(), "missing"),
    "no sums": (lambda folder: (folder / "columns.safetensors").unlink(), "missing"),
    "cut trace": (lambda folder: os.truncate(folder / "trace.safetensors", 5000), "laid out"),
    "more chunks": (lambda folder: _journal(folder, finished=5), "journal"),
    "all chunks": (lambda folder: _journal(folder, finished=10**30), "journal"),
    "no count": (lambda folder: _journal(folder, finished="3"), "journal"),
    "no layout": (lambda folder: _journal(folder, layout=[[0, [1, 2], [1, 2], "os"]]), "journal"),
    "no JSON": (lambda folder: (folder / "journal.json").write_text("{"), "journal"),
    "other JSON": (lambda folder: (folder / "journal.json").write_text("[1]"), "journal"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_fresh_starts_over(
    stopped: Callable[..., hl.Trace], lab: Lab, tmp_path: Path, damage: str
):
    spoil, said = DAMAGE[damage]
    spoil(tmp_path / "trace.partial")
    with pytest.raises(OutputError, match=rf"damaged.*{said}.*--fresh"):
        stopped()
    again = stopped(fresh=True)
    assert_same(lab("llama").trace(ids_of(), whole_plan(), logits="last"), again)


def test_loading_says_that_a_trace_is_unfinished(stopped: Callable[..., hl.Trace], tmp_path: Path):
    with pytest.raises(OutputError, match="holds an unfinished trace; run the command that began"):
        hl.Trace.load(tmp_path)
    with pytest.raises(OutputError, match=r"there is no folder .*absent"):
        hl.Trace.load(tmp_path / "absent")
    assert stopped().n_positions > 0
    assert hl.Trace.load(tmp_path).n_positions > 0


def test_other_settings_are_named(stopped: Callable[..., hl.Trace], lab: Lab, tmp_path: Path):
    with pytest.raises(OutputError, match=r"differs from this one in chunk: .*--fresh"):
        stopped(chunk=4)
    with pytest.raises(OutputError, match=r"in keep, prompt: "):
        stopped(prompt=ids_of(31), keep=chosen_plan())
    other = hl.load(build("llama", seed=1), tokenizer=tiny_tokenizer())
    with pytest.raises(OutputError, match=r"in weights: "):
        other.stream(ids_of(), whole_plan(), tmp_path, chunk=CHUNK)
    model = lab("llama")
    with pytest.raises(OutputError, match=r"in edits: "), model.edit(hl.scale("0.0", by=0.0)):
        stopped()
    assert partial(tmp_path, "journal.json").exists()
    assert_same(model.trace(ids_of(), whole_plan(), logits="last"), stopped())


def test_a_kill_in_the_first_chunk_leaves_nothing_to_go_on_with(lab: Lab, tmp_path: Path):
    model = lab("llama")
    killed_in("writing", 9, lambda: model.stream(ids_of(), whole_plan(), tmp_path, chunk=CHUNK))
    assert partial(tmp_path, "trace.safetensors").exists()
    other = model.stream(ids_of(), chosen_plan(), tmp_path, chunk=4)
    assert_same(model.trace(ids_of(), chosen_plan(), logits="last"), other)


def test_two_runs_in_one_folder_are_kept_apart(lab: Lab, tmp_path: Path):
    refused: list[str] = []

    def run(tell: Callable[[str], None]) -> hl.Trace:
        return lab("llama").stream(ids_of(), whole_plan(), tmp_path, chunk=CHUNK, tell=tell)

    def meanwhile(line: str) -> None:
        with pytest.raises(OutputError) as caught:
            run(lambda text: None)
        refused.append(str(caught.value))

    streamed = run(meanwhile)
    assert len(refused) == 5
    assert "another process is writing" in refused[0]
    assert_same(lab("llama").trace(ids_of(), whole_plan(), logits="last"), streamed)


@pytest.mark.parametrize("function", ["posix_fallocate", "fsync"])
def test_a_full_disk_costs_nothing(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
):
    model, calls = lab("llama"), iter(range(100))
    original = getattr(os, function)

    def full(*given: Any) -> Any:
        if next(calls) == (0 if function == "posix_fallocate" else 4):  # appending the third chunk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with pytest.raises(OutputError, match=r"No space left.*run the same command again"):
            model.stream(ids_of(), whole_plan(), tmp_path, chunk=CHUNK)
    lines: list[str] = []
    streamed = model.stream(ids_of(), whole_plan(), tmp_path, chunk=CHUNK, tell=lines.append)
    if function == "fsync":
        assert lines[0] == "going on from token 16 of 37"
    assert_same(model.trace(ids_of(), whole_plan(), logits="last"), streamed)
