"""Streamed traces: the same numbers as in one pass, and nothing read before it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headlab as hl
from headlab.errors import PlanError, PromptError, UnsupportedError

Lab = Callable[..., Any]
N, CHUNK = 37, 8
BESIDES = {"segment_mass", "segment_z", "feature", "target_mass", "lag_mass"}


def ids_of(n: int = N) -> torch.Tensor:
    return torch.randint(4, 97, (1, n), generator=torch.Generator().manual_seed(n))


def whole_plan(n: int = N) -> list[Any]:
    every = [*(name for name in hl.keep.NAMES if name not in BESIDES), *sorted(BESIDES)]
    return [
        hl.keep.statistics(
            *every,
            n_first=2,
            window=3,
            bins=[0, 1, 4, n],
            k=3,
            segments={"a": (0, 5), "b": (11, 20)},
            targets=torch.arange(n) - 2,
            x=torch.randn(n, 2, generator=torch.Generator().manual_seed(0)),
            block=4,
        ),
        hl.keep.rows(queries=[-1, 3, 20, 17], heads="0.1, 1.*"),
        hl.keep.tensors("q", "k", "v", "z", "result", "resid_post"),
    ]


def chosen_plan() -> list[Any]:
    """Of some queries, in no order, and none in some chunks."""
    names = ("entropy", "topk", "received", "block_map")
    return [
        hl.keep.statistics(*names, queries=[30, -1, 3], k=2, block=4),
        hl.keep.rows(queries="generated", layers=[1]),
        hl.keep.tensors("z", "k", positions=[-1, 7, 5]),
    ]


def assert_same(one: hl.Trace, other: hl.Trace, *, exactly: bool = False) -> None:
    """Two traces hold the same things, to rounding or to the bit."""

    def same(a: torch.Tensor, b: torch.Tensor) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        tolerance = 0.0 if exactly or not a.is_floating_point() else 5e-5
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)

    for name in ("model", "tokens", "heads", "labels", "statistics", "tensors", "_groups"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.query_positions.keys() == other.query_positions.keys()
    for name, positions in one.query_positions.items():
        same(positions, other.query_positions[name])
    for name in one.statistics:
        same(one.statistic(name), other.statistic(name))
    for name in one.tensors:
        same(one.tensor(name), other.tensor(name))
    same(one.rows, other.rows)
    same(one.ids, other.ids)
    same(one.lengths, other.lengths)
    assert (one.logits is None) == (other.logits is None)
    if one.logits is not None and other.logits is not None:
        same(one.logits, other.logits)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 16, 64])  # windows are 5 and 6 tokens
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "gpt2", "gpt_oss", "qwen3"])
def test_a_stream_holds_what_one_pass_does(lab: Lab, family: str, chunk: int, tmp_path: Path):
    model, ids = lab(family), ids_of()
    for at, plan in enumerate((whole_plan(), chosen_plan())):
        logits = ("all", "last")[at]
        once = model.trace(ids, plan, logits=logits)
        streamed = model.stream(ids, plan, tmp_path / str(at), chunk=chunk, logits=logits)
        assert_same(once, streamed)
        written = sorted(path.name for path in (tmp_path / str(at)).iterdir())
        assert written == ["trace.json", "trace.safetensors"]


def test_edits_in_force_act_on_every_chunk(lab: Lab, tmp_path: Path):
    model, ids = lab("gemma3_text"), ids_of()

    def far(scores: torch.Tensor, where: Any) -> torch.Tensor:
        return scores + 0.1 * (where.first_key + torch.arange(scores.shape[-1]))

    edits = [
        hl.scale("0.1", "v", by=-2.0),
        hl.add("1.*", 0.5, "resid_pre", positions=[-3, 2, 9]),
        hl.apply("0.2", far, "scores"),
        hl.scale("1.3", "pattern", by=0.5, positions=[12]),
    ]
    plain = model.trace(ids, whole_plan())
    with model.edit(*edits):
        once = model.trace(ids, whole_plan(), logits="last")
        streamed = model.stream(ids, whole_plan(), tmp_path, chunk=CHUNK)
    assert_same(once, streamed)
    assert not torch.allclose(plain.statistic("lse"), streamed.statistic("lse"), atol=1e-2)


def test_a_layer_is_read_by_itself(lab: Lab, tmp_path: Path):
    trace = lab("llama").stream(ids_of(), whole_plan(), tmp_path, chunk=CHUNK)
    assert torch.equal(trace.statistic("lse", layer=1), trace.statistic("lse")[:, 1])
    of_segment = trace.statistic("segment_z", "b", layer=0)
    assert torch.equal(of_segment, trace.statistic("segment_z", "b")[:, 0])
    assert torch.equal(trace.layer_rows(0), trace.rows[:, 0, 1:2])  # of head 0.1 alone
    with pytest.raises(PlanError, match="not for layer 2"):
        trace.statistic("lse", layer=2)
    with pytest.raises(PlanError, match="not for layer 2"):
        trace.layer_rows(2)


# -- laziness --------------------------------------------------------------------------------------


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = words[-1] == str(path)
        elif inside and words[0] == "Rss:":
            found += int(words[1]) << 10
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_nothing_is_read_before_it_is_asked_for(lab: Lab, tmp_path: Path):
    n, layers = 1 << 20, 6
    small = lab("llama").trace(ids_of(), hl.keep.statistics("entropy"), logits="none")
    table = {layer: torch.full((1, 2, n), float(layer)) for layer in range(layers)}
    object.__setattr__(small, "_statistics", {"entropy": table})
    small.heads["entropy"] = dict.fromkeys(range(layers), (0, 1))
    path = small.save(tmp_path) / "trace.safetensors"
    size = 2 * n * 4
    assert path.stat().st_size > layers * size
    trace = hl.Trace.load(tmp_path)
    assert "'entropy' [1, 6, 2, 1048576]" in repr(trace)
    assert resident(path) < size // 8
    assert float(trace.statistic("entropy", layer=4).mean()) == 4
    assert size // 2 < resident(path) < 3 * size // 2


# -- refusals --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "two prompts": ({"prompt": torch.ones(2, 9, dtype=torch.long)}, PromptError, "model.trace"),
    "no chunk": ({"chunk": 0}, PlanError, "chunk=0"),
    "half a chunk": ({"chunk": 1.5}, PlanError, "chunk=1.5"),
    "logits": ({"logits": "some"}, PlanError, "'some'"),
    "pattern": ({"keep": hl.keep.tensors("pattern")}, PlanError, "square.*model.trace"),
    "every row": ({"keep": hl.keep.rows()}, PlanError, "square.*chosen queries"),
    "query": ({"keep": hl.keep.rows(queries=[N])}, PlanError, f"position {N}"),
    "position": ({"keep": hl.keep.tensors("z", positions=[N])}, PlanError, f"position {N}"),
    "feature": (
        {"keep": hl.keep.statistics("feature", x=torch.ones(N - 1))},
        PlanError,
        f"{N - 1} keys",
    ),
    "gradient": (
        {"keep": hl.keep.statistics("received", z_gradient={0: torch.zeros(1, N, 6, 10)})},
        PlanError,
        "backward pass",
    ),
    "block": ({"keep": hl.keep.statistics("block_map", block=3)}, PlanError, "chunk=8.*block of 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_streamed_is_refused_before_anything_is_written(
    lab: Lab, tmp_path: Path, case: str
):
    change, error, said = REFUSED[case]
    given = {"prompt": ids_of(), "keep": whole_plan(), "chunk": CHUNK} | change
    with pytest.raises(error, match=said):
        lab("llama").stream(out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_models_that_are_no_decoders_are_refused(lab: Lab, family: str, tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"model\.trace"):
        lab(family).stream(ids_of(9), hl.keep.statistics("lse"), tmp_path, chunk=4)


@pytest.fixture
def command(run: Callable[..., Any], tiny_folder: Path) -> Callable[..., Any]:
    """``headlab trace`` of nine tokens by the tiny llama."""
    text = "w9 w8 w7 w6 w9 w8 w7 w6 w5"
    return lambda *words: run("trace", tiny_folder, "--text", text, *words)


def test_the_command_streams_prompts_longer_than_a_chunk(
    command: Callable[..., Any], tmp_path: Path
):
    plan = ("--keep", "entropy,block_map", "--block", 2)
    once = command(*plan, "--out", tmp_path / "a", "--chunk", 9)
    streamed = command(*plan, "--out", tmp_path / "b", "--chunk", 4)
    assert "tokens/s" not in once.err
    assert "4 of 9 tokens" in streamed.err
    assert once.out.splitlines()[:-1] == streamed.out.splitlines()[:-1]
    assert "'block_map' [1, 2, 6, 5, 5]" in once.out
    assert json.loads((tmp_path / "b" / "trace.json").read_text())["configuration"]
    refused = command("--keep", "pattern", "--out", tmp_path / "c", "--chunk", 4)
    assert refused.code == 2
    assert "--chunk" in refused.err
