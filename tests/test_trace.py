"""Traces as objects: reading, refusing, tables, files; and what counts as a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from oracle import assert_close
from test_capture import ids_of, ragged
from tiny_models import MAX_CONTEXT, VOCAB_SIZE, build, tiny_tokenizer

import headlab as hl
from headlab.errors import HeadlabError, OutputError, PlanError, PromptError

Lab = Callable[..., Any]
N = 9


def full_plan() -> list[Any]:
    return [
        hl.keep.rows(queries=[-1, 2]),
        hl.keep.statistics("entropy", "argmax", "received", "lag_mass", bins=[0, 1, 9]),
        hl.keep.statistics("topk", k=2, queries=[-1]),
        hl.keep.statistics("segment_mass", "segment_z", segments={"a": (0, 2), "b": (2, 5)}),
        hl.keep.statistics("first_mass", heads="0.1, 1.*"),
        hl.keep.tensors("q", "k", "z", layers=[1]),
        hl.keep.tensors("pattern", heads="0.3"),
    ]


@pytest.fixture(scope="module")
def trace(lab: Lab) -> Any:
    return lab("llama").trace(ragged((N, 6)), keep=full_plan())


# -- reading ---------------------------------------------------------------------------------------


def test_shapes_are_as_documented(trace: Any) -> None:
    assert trace.rows.shape == (2, 2, 6, 2, N)
    assert trace.statistic("entropy").shape == (2, 2, 6, N)
    assert trace.statistic("received").shape == (2, 2, 6, N)
    assert trace.statistic("lag_mass").shape == (2, 2, 6, N, 2)
    assert trace.statistic("topk").shape == (2, 2, 6, 1, 2)
    assert trace.statistic("topk_index").shape == (2, 2, 6, 1, 2)
    assert trace.statistic("segment_z").shape == (2, 2, 6, N, 2, 10)
    assert trace.statistic("segment_z", "b").shape == (2, 2, 6, N, 10)
    assert trace.tensor("q").shape == (2, 1, N, 6, 10)
    assert trace.tensor("q", layer=1).shape == (2, N, 6, 10)
    assert trace.tensor("k", layer=1).shape == (2, N, 2, 10)
    assert trace.tensor("pattern", layer=0).shape == (2, 1, N, N)
    assert trace.logits.shape == (2, N, VOCAB_SIZE)
    assert trace.ids.shape == (2, N)
    assert trace.lengths.tolist() == [N, 6]
    assert [len(row) for row in trace.tokens] == [N, 6]
    assert trace.n_positions == N


def test_labels_pick_entries_of_a_last_axis(trace: Any) -> None:
    whole = trace.statistic("segment_mass")
    assert_close(trace.statistic("segment_mass", "a"), whole[..., 0])
    assert_close(trace.statistic("segment_mass", "b"), whole[..., 1])
    assert_close(trace.statistic("segment_z", "b"), trace.statistic("segment_z")[..., 1, :])
    assert_close(trace.statistic("lag_mass", "1..8"), trace.statistic("lag_mass")[..., 1])
    with pytest.raises(PlanError, match="a, b"):
        trace.statistic("segment_mass", "c")
    with pytest.raises(PlanError):
        trace.statistic("entropy", "a")


def test_ragged_heads_leave_blanks_where_a_head_was_not_kept(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(N)
    names = ("q", "z", "result", "pattern")
    every = model.trace(
        ids, keep=[hl.keep.rows(), hl.keep.statistics("entropy", "argmax"), hl.keep.tensors(*names)]
    )
    some = model.trace(
        ids,
        keep=[
            hl.keep.rows(heads="0.1, 1.*"),
            hl.keep.statistics("entropy", "argmax", heads="0.1, 1.*"),
            hl.keep.tensors(*names, heads="0.1, 1.*"),
        ],
    )
    kept = torch.zeros(2, 6, dtype=torch.bool)
    kept[0, 1] = kept[1] = True
    for got, whole in (
        (some.rows, every.rows),
        (some.statistic("entropy"), every.statistic("entropy")),
        (some.statistic("argmax"), every.statistic("argmax")),
        (some.tensor("pattern"), every.tensor("pattern")),
        *((some.tensor(n).transpose(2, 3), every.tensor(n).transpose(2, 3)) for n in names[:3]),
    ):
        assert got.shape == whole.shape
        assert_close(got[:, kept], whole[:, kept], 1e-5)
        blank = got[:, ~kept]
        assert bool((blank.isnan() if blank.is_floating_point() else blank == -1).all())
    assert some.head_axis("rows") == tuple(range(6))
    assert some.head_axis("entropy") == tuple(range(6))


def test_ragged_heads_of_grouped_keys_are_read_per_layer_or_spread(lab: Lab) -> None:
    """Heads of one group in one layer and of both in the other: key/value heads differ in number."""
    model, ids = lab("llama"), ids_of(N)
    every = model.trace(ids, keep=hl.keep.tensors("k", "v"))
    some = model.trace(ids, keep=hl.keep.tensors("k", "v", heads="0.1, 1.*"))
    for name in ("k", "v"):
        assert_close(some.tensor(name, layer=0), every.tensor(name, layer=0)[:, :, :1], 1e-6)
        assert_close(some.tensor(name, layer=1), every.tensor(name, layer=1), 1e-6)
        try:
            whole = some.tensor(name)
        except PlanError:
            continue
        assert_close(whole[:, 1], every.tensor(name, layer=1), 1e-6)
        assert bool(whole[:, 0, :, 1].isnan().all())


@pytest.mark.parametrize(
    "heads", ["0.0, 1.5", "0.4, 1.1"], ids=["first and last group", "last and first group"]
)
def test_keys_of_different_groups_are_not_mixed_up_when_stacked(lab: Lab, heads: str) -> None:
    """One key/value head per layer, but not the same one: stacked without a blank, they would lie."""
    model, ids = lab("llama"), ids_of(N)
    every = model.trace(ids, keep=hl.keep.tensors("k"))
    some = model.trace(ids, keep=hl.keep.tensors("k", heads=heads))
    try:
        stacked = some.tensor("k")
    except PlanError:
        return
    groups = sorted({int(part.split(".")[1]) // 3 for part in heads.split(", ")})
    assert stacked.shape[3] == len(groups)
    for layer in range(2):
        for at, group in enumerate(groups):
            mine = stacked[:, layer, :, at]
            if not bool(mine.isnan().all()):
                assert_close(mine, every.tensor("k", layer=layer)[:, :, group], 1e-6)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.rows,
        lambda t: t.statistic("max"),
        lambda t: t.tensor("q"),
        lambda t: t.tensor("z", layer=0),
        lambda t: t.of_head("z", hl.Head(1, 3)),
        lambda t: t.of_head("z", hl.Head(0, 0)),
        lambda t: t.to_frame("rows"),
        lambda t: t.to_frame("max"),
    ],
)
def test_what_was_not_kept_is_refused_by_name(lab: Lab, read: Callable[[Any], Any]) -> None:
    plan = [hl.keep.statistics("entropy"), hl.keep.tensors("z", layers=[1], heads="1.0")]
    kept = lab("llama").trace(ids_of(5), keep=plan)
    with pytest.raises(PlanError) as caught:
        read(kept)
    assert "\n" not in str(caught.value)


def test_a_trace_of_nothing_still_has_logits_and_refuses_tables(lab: Lab) -> None:
    kept = lab("llama").trace(ids_of(5))
    assert kept.logits is not None
    assert kept.statistics == ()
    assert kept.tensors == ()
    with pytest.raises(PlanError):
        kept.to_frame()


def test_a_trace_prints_what_it_holds(trace: Any) -> None:
    text = repr(trace)
    for part in (
        "llama",
        "9, 6",
        "rows [2, 2, 6, 2, 9]",
        "'entropy' [2, 2, 6, 9]",
        "'q'",
        "logits",
    ):
        assert part in text


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_trace_of_every_stack_prints_and_saves(lab: Lab, family: str, tmp_path: Path) -> None:
    """Encoder, decoder and cross-attention have shapes of their own, which cannot be stacked."""
    plan = [
        hl.keep.rows(),
        hl.keep.statistics("entropy", "received"),
        hl.keep.tensors("q", "k", "z", "pattern"),
    ]
    kept = lab(family).trace(ids_of(N), decoder=ids_of(5, seed=1), keep=plan)
    assert family in repr(kept)
    with pytest.raises(PlanError):
        kept.statistic("entropy")
    again = hl.Trace.load(kept.save(tmp_path / "trace"))
    assert_close(again.tensor("q", layer=0), kept.tensor("q", layer=0), 0)


# -- tables ----------------------------------------------------------------------------------------


def test_a_table_of_statistics_has_a_line_per_prompt_layer_head_and_query(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, 6))
    kept = model.trace(ids, keep=hl.keep.statistics("entropy", "argmax"))
    frame = kept.to_frame()
    assert list(frame.columns) == ["prompt", "layer", "head", "query", "token", "entropy", "argmax"]
    assert len(frame) == 2 * 6 * (N + 6)
    assert not frame.duplicated(["prompt", "layer", "head", "query"]).any()
    assert frame["argmax"].dtype.kind == "i"
    assert not frame.isna().any().any()
    for line in frame.sample(40, random_state=0).itertuples():
        at = (line.prompt, line.layer, line.head, line.query)
        assert line.entropy == pytest.approx(float(kept.statistic("entropy")[at]))
        assert line.argmax == int(kept.statistic("argmax")[at])
        assert line.token == f"w{int(ids[line.prompt, line.query])}"


def test_entries_of_a_last_axis_are_columns_with_their_names(trace: Any) -> None:
    frame = trace.to_frame("segment_mass")
    assert {"segment_mass[a]", "segment_mass[b]"} <= set(frame.columns)
    line = frame[
        (frame["prompt"] == 1)
        & (frame["layer"] == 1)
        & (frame["head"] == 2)
        & (frame["query"] == 4)
    ]
    assert len(line) == 1
    expected = trace.statistic("segment_mass", "b")[1, 1, 2, 4]
    assert float(line["segment_mass[b]"].iloc[0]) == pytest.approx(float(expected))
    assert {"lag_mass[0..0]", "lag_mass[1..8]"} <= set(trace.to_frame("lag_mass").columns)


def test_a_table_of_some_queries_names_their_positions(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, 6))
    kept = model.trace(ids, keep=hl.keep.statistics("entropy", "max", queries=[-1, 2]))
    frame = kept.to_frame()
    assert sorted(frame[frame["prompt"] == 0]["query"].unique()) == [2, N - 1]
    assert sorted(frame[frame["prompt"] == 1]["query"].unique()) == [2, 5]
    every = model.trace(ids, keep=hl.keep.statistics("entropy")).statistic("entropy")
    for line in frame.itertuples():
        at = (line.prompt, line.layer, line.head, line.query)
        assert line.entropy == pytest.approx(float(every[at]), abs=1e-5)
        assert line.token == f"w{int(ids[line.prompt, line.query])}"


@pytest.mark.parametrize("what", [None, "topk_index", "topk"])
def test_a_table_of_the_largest_weights_of_some_queries_names_their_positions(
    lab: Lab, what: str | None
) -> None:
    model, ids = lab("llama"), ragged((N, 6))
    kept = model.trace(ids, keep=hl.keep.statistics("topk", k=2, queries=[-1, 2]))
    frame = kept.to_frame(what)
    assert len(frame) == 2 * 2 * 6 * 2
    assert not frame.isna().any().any()
    assert sorted(frame[frame["prompt"] == 0]["query"].unique()) == [2, N - 1]
    assert sorted(frame[frame["prompt"] == 1]["query"].unique()) == [2, 5]


def test_a_table_of_ragged_heads_lists_the_heads_that_were_kept(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(N)
    plan = [
        hl.keep.statistics("entropy", "argmax", heads="0.1, 1.0"),
        hl.keep.rows(heads="0.1, 1.0"),
    ]
    kept = model.trace(ids, keep=plan)
    for frame in (kept.to_frame(), kept.to_frame("entropy"), kept.to_frame("argmax"),
                  kept.to_frame("rows")):  # fmt: skip
        pairs = set(zip(frame["layer"], frame["head"], strict=True))
        assert pairs == {(0, 1), (1, 0)}


def test_statistics_of_different_heads_share_one_table(lab: Lab) -> None:
    plan = [hl.keep.statistics("entropy", heads="0.*"), hl.keep.statistics("max", heads="*.1")]
    frame = lab("llama").trace(ids_of(N), keep=plan).to_frame()
    assert not frame.duplicated(["prompt", "layer", "head", "query"]).any()
    assert set(frame[frame["entropy"].notna()]["layer"]) == {0}
    assert set(frame[frame["max"].notna()]["head"]) == {1}


def test_a_table_of_layers_names_them_as_they_are(lab: Lab) -> None:
    kept = lab("llama").trace(
        ids_of(N), keep=[hl.keep.statistics("entropy", layers=[1], heads="1.4")]
    )
    frame = kept.to_frame()
    assert set(frame["layer"]) == {1}
    assert set(frame["head"]) == {4}
    every = lab("llama").trace(ids_of(N), keep=hl.keep.statistics("entropy"))
    values = frame.sort_values(["prompt", "query"])["entropy"].to_numpy()
    assert_close(values, every.statistic("entropy")[:, 1, 4].flatten(), 1e-5)


def test_a_table_of_rows_has_a_line_per_key(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, 6))
    kept = model.trace(ids, keep=hl.keep.rows(queries=[-1, 2]))
    frame = kept.to_frame()
    assert list(frame.columns) == ["prompt", "layer", "head", "query", "key", "weight"]
    assert len(frame) == 2 * 6 * 2 * (N + 6)
    sums = frame.groupby(["prompt", "layer", "head", "query"])["weight"].sum()
    assert_close(sums.to_numpy(), np.ones(2 * 2 * 6 * 2), 1e-5)
    for line in frame.sample(40, random_state=0).itertuples():
        row = kept.row_positions[line.prompt].tolist().index(line.query)
        weight = kept.rows[line.prompt, line.layer, line.head, row, line.key]
        assert line.weight == pytest.approx(float(weight))
    every = model.trace(ids, keep=hl.keep.rows()).to_frame()
    assert len(every) == 2 * 6 * (N * N + 6 * 6)


def test_a_table_of_received_attention_has_a_line_per_key(lab: Lab) -> None:
    kept = lab("llama").trace(ragged((N, 6)), keep=hl.keep.statistics("received"))
    frame = kept.to_frame()
    assert list(frame.columns) == ["prompt", "layer", "head", "key", "token", "received"]
    assert len(frame) == 2 * 6 * (N + 6)
    line = frame.iloc[17]
    value = kept.statistic("received")[line["prompt"], line["layer"], line["head"], line["key"]]
    assert line["received"] == pytest.approx(float(value))


def test_statistics_without_a_query_axis_do_not_disturb_the_others_table(lab: Lab) -> None:
    plan = hl.keep.statistics("entropy", "received", "block_map", block=4)
    kept = lab("llama").trace(ids_of(N), keep=plan)
    assert "entropy" in kept.to_frame().columns
    assert "received" not in kept.to_frame().columns
    assert "received" in kept.to_frame("received").columns
    with pytest.raises(PlanError):
        kept.to_frame("block_map")


def test_tables_of_several_statistics_join_on_their_lines(trace: Any) -> None:
    frame = trace.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert not frame.duplicated(["prompt", "layer", "head", "query"]).any()


# -- files -----------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> None:
    assert (a.model, a.tokens, a.labels, a.heads) == (b.model, b.tokens, b.labels, b.heads)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.lengths, b.lengths)
    assert (a.logits is None) == (b.logits is None)
    if a.logits is not None:
        assert_close(a.logits, b.logits, 0)
        assert a.logits.dtype == b.logits.dtype
    assert a.query_positions.keys() == b.query_positions.keys()
    for name, positions in a.query_positions.items():
        assert torch.equal(positions, b.query_positions[name])
    assert set(a.statistics) == set(b.statistics)
    assert set(a.tensors) == set(b.tensors)
    for name in a.statistics:
        assert_close(a.statistic(name), b.statistic(name), 0)
        assert a.statistic(name).dtype == b.statistic(name).dtype
    for name in a.tensors:
        for layer in a.layers(name):
            mine, theirs = a.tensor(name, layer=layer), b.tensor(name, layer=layer)
            assert_close(mine, theirs, 0)
            assert mine.dtype == theirs.dtype
    assert_close(a.rows, b.rows, 0)
    assert repr(a).splitlines()[0] == repr(b).splitlines()[0]


def test_a_saved_trace_comes_back_equal(lab: Lab, trace: Any, tmp_path: Path) -> None:
    folder = trace.save(tmp_path / "new" / "trace")
    assert folder == tmp_path / "new" / "trace"
    assert sorted(path.name for path in folder.iterdir()) == ["trace.json", "trace.safetensors"]
    again = hl.Trace.load(folder)
    same(trace, again)
    assert sorted(repr(trace).splitlines()) == sorted(repr(again).splitlines())
    pd.testing.assert_frame_equal(again.to_frame("entropy"), trace.to_frame("entropy"))
    for head in (0, 4):
        assert_close(again.of_head("k", hl.Head(1, head)), trace.of_head("k", hl.Head(1, head)), 0)
    with lab("llama").edit(hl.patch("1.*", source=trace)):
        expected = lab("llama").logits(ids_of(N))
    with lab("llama").edit(hl.patch("1.*", source=again)):
        assert torch.equal(lab("llama").logits(ids_of(N)), expected)


def test_a_trace_is_saved_over_an_earlier_one(lab: Lab, trace: Any, tmp_path: Path) -> None:
    other = lab("llama").trace(ids_of(4), keep=hl.keep.rows())
    other.save(tmp_path)
    trace.save(tmp_path)
    same(trace, hl.Trace.load(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_traces_survive_being_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    model = hl.load(build("llama").to(dtype), tokenizer=tiny_tokenizer())
    kept = model.trace(ids_of(N), keep=full_plan())
    same(kept, hl.Trace.load(kept.save(tmp_path)))


def test_generated_traces_survive_being_saved(lab: Lab, tmp_path: Path) -> None:
    plan = [hl.keep.rows(queries="generated"), hl.keep.statistics("entropy"), hl.keep.tensors("z")]
    kept = lab("mistral").generate(ragged((4, 8)), max_new_tokens=4, keep=plan).trace
    same(kept, hl.Trace.load(kept.save(tmp_path)))


def test_hostile_token_texts_survive_being_saved(tmp_path: Path) -> None:
    class Tokenizer:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [5, 6]}

        def decode(self, ids: Any, **_: Any) -> str:
            return '</script>"\\\u2028\ud83d' if 5 in list(ids) else "π\n\t"

    model = hl.load(build("llama"), tokenizer=Tokenizer())
    kept = model.trace("x", keep=hl.keep.rows())
    assert hl.Trace.load(kept.save(tmp_path)).tokens == kept.tokens


def _truncate(folder: Path) -> None:
    path = folder / "trace.safetensors"
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "trace.json").unlink(),
        lambda folder: (folder / "trace.safetensors").unlink(),
        lambda folder: (folder / "trace.json").write_text("{"),
        lambda folder: (folder / "trace.json").write_text("{}"),
        lambda folder: (folder / "trace.json").write_text("[]"),
        lambda folder: (folder / "trace.json").write_bytes(b"\xff\xfe\x00"),
        lambda folder: (folder / "trace.json").write_text(
            json.dumps({"format": "headlab-trace-1"})
        ),
        lambda folder: (folder / "trace.json").write_text(
            (folder / "trace.json").read_text().replace("headlab-trace-1", "headlab-trace-99")
        ),
        _truncate,
        lambda folder: (folder / "trace.safetensors").write_bytes(b""),
    ],
)
def test_a_spoiled_trace_is_refused_in_one_sentence(
    trace: Any, tmp_path: Path, spoil: Callable[[Path], Any]
) -> None:
    folder = trace.save(tmp_path / "trace")
    spoil(folder)
    with pytest.raises(OutputError) as caught:
        hl.Trace.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_folder_is_refused(trace: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        trace.save(tmp_path / "file")
    with pytest.raises(OutputError):
        hl.Trace.load(tmp_path / "nowhere")


# -- offloading ------------------------------------------------------------------------------------

TENSORS = ("q", "k", "v", "z", "result", "pattern")


@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_offloaded_tensors_are_those_that_would_have_been_kept(
    lab: Lab, tmp_path: Path, place: str
) -> None:
    model, ids = lab("llama"), ragged((N, 6))
    offload = "cpu" if place == "cpu" else tmp_path / "offload"
    here = model.trace(ids, keep=hl.keep.tensors(*TENSORS, heads="*.1, 1.5"))
    there = model.trace(ids, keep=hl.keep.tensors(*TENSORS, heads="*.1, 1.5", offload=offload))
    for name in TENSORS:
        for layer in range(2):
            assert_close(
                there.tensor(name, layer=layer), here.tensor(name, layer=layer), 0, what=name
            )
            assert there.tensor(name, layer=layer).device.type == "cpu"
    if place == "folder":
        assert (tmp_path / "offload").is_dir()
        assert any((tmp_path / "offload").iterdir())


@pytest.mark.parametrize("name", TENSORS)
def test_each_tensor_offloaded_to_a_folder_is_in_it(lab: Lab, tmp_path: Path, name: str) -> None:
    lab("llama").trace(ids_of(N), keep=hl.keep.tensors(name, offload=tmp_path))
    assert len([path for path in tmp_path.iterdir() if name in path.name]) == 2  # layers


def test_a_whole_even_batch_can_be_offloaded_to_a_folder_and_saved(
    lab: Lab, tmp_path: Path
) -> None:
    model, ids = lab("llama"), ids_of(N)
    here = model.trace(ids, keep=hl.keep.tensors(*TENSORS))
    there = model.trace(ids, keep=hl.keep.tensors(*TENSORS, offload=str(tmp_path / "offload")))
    later = model.trace(ids + 1, keep=hl.keep.tensors(*TENSORS, offload=str(tmp_path / "offload")))
    for name in TENSORS:  # a later trace into the same folder does not change an earlier one
        assert_close(there.tensor(name), here.tensor(name), 0, what=name)
    assert not torch.allclose(later.tensor("z"), there.tensor("z"))
    again = hl.Trace.load(there.save(tmp_path / "saved"))
    assert_close(again.tensor("z"), here.tensor("z"), 0)
    with model.edit(hl.patch("1.*", source=there)):
        assert_close(model.logits(ids), here.logits, 1e-5)


def test_generated_tensors_can_be_offloaded(lab: Lab, tmp_path: Path) -> None:
    model, ids = lab("mistral"), ragged((4, 8))
    options = {"max_new_tokens": 5, "eos_token_id": None}
    here = model.generate(ids, keep=hl.keep.tensors("k", "z"), **options).trace
    for offload in ("cpu", tmp_path / "offload"):
        kept = model.generate(ids, keep=hl.keep.tensors("k", "z", offload=offload), **options).trace
        for name in ("k", "z"):
            assert_close(kept.tensor(name), here.tensor(name), 0, what=name)


def test_half_precision_tensors_can_be_offloaded(tmp_path: Path) -> None:
    model = hl.load(build("llama").to(torch.bfloat16))
    here = model.trace(ids_of(N), keep=hl.keep.tensors("z"))
    there = model.trace(ids_of(N), keep=hl.keep.tensors("z", offload=tmp_path))
    assert torch.equal(here.tensor("z"), there.tensor("z"))
    assert there.tensor("z").dtype == torch.bfloat16


def test_a_folder_that_cannot_be_written_is_refused(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, ids = lab("llama"), ids_of(5)
    before = model.logits(ids)
    with pytest.raises(OutputError) as caught:
        model.trace(ids, keep=hl.keep.tensors("z", offload=tmp_path / "file"))
    assert "\n" not in str(caught.value)
    assert torch.equal(model.logits(ids), before)


# -- other types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "t5", "bert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_models_of_other_types_are_captured_within_their_rounding(
    family: str, dtype: torch.dtype
) -> None:
    """Logits with capture stay within the type's rounding of those without, and patterns are rows."""
    module = build(family).to(dtype)
    model = hl.load(module)
    assert model.dtype == dtype
    ids = ids_of(N)
    decoder = ids_of(5, seed=1) if family == "t5" else None
    at = [model.spec.n_layers - 1]
    plain = model.logits(ids, decoder=decoder)
    with torch.no_grad():
        options = {"input_ids": ids} | ({} if decoder is None else {"decoder_input_ids": decoder})
        assert torch.equal(plain, module(**options).logits)
    kept = model.trace(
        ids,
        decoder=decoder,
        keep=[
            hl.keep.rows(layers=at),
            hl.keep.statistics("entropy", "max", "argmax", layers=at),
            hl.keep.tensors("q", "z", "result", layers=at),
        ],
    )
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}[dtype]
    if family == "gemma2":  # its eager attention takes the softmax in float32 at best
        rounding = max(rounding, 2**-24)
    scale = float(plain.abs().max())
    assert_close(kept.logits, plain, 8 * rounding * scale)
    assert kept.logits.dtype == dtype
    assert kept.tensor("q").dtype == kept.tensor("z").dtype == dtype
    sums = kept.rows.double().sum(-1)
    assert_close(sums, torch.ones_like(sums), 1e-5)
    largest = kept.rows.double().amax(-1)
    assert_close(kept.statistic("max"), largest, 1e-5)
    expected = -torch.special.xlogy(kept.rows.double(), kept.rows.double()).sum(-1)
    assert_close(kept.statistic("entropy"), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_types_are_edited_and_generate(dtype: torch.dtype) -> None:
    model = hl.load(build("llama").to(dtype))
    ids = ids_of(N)
    source = model.trace(ids, keep=hl.keep.tensors("z"))
    edits = [
        hl.ablate("0.1", "mean", reference=ids),
        hl.add("1.0", torch.ones(10), "v"),
        hl.scale("1.1", "scores", by=0.5),
        hl.ablate("1.2", site="pattern"),
        hl.scale("1.3", "result", by=0.5),
        hl.patch("0.2", source=source),
    ]
    with model.edit(*edits):
        assert model.logits(ids).dtype == dtype
        kept = model.generate(ids, max_new_tokens=3, keep=hl.keep.statistics("entropy"))
    assert kept.ids.shape[0] == 2


# -- prompts ---------------------------------------------------------------------------------------


def test_everything_that_is_a_prompt_is_read(lab: Lab) -> None:
    model = lab("llama")
    expected = torch.tensor([[5, 6, 7]])
    for prompt in ("w5 w6 w7", ["w5 w6 w7"], [5, 6, 7], [[5, 6, 7]], (5, 6, 7), torch.tensor([5, 6, 7]),
                   expected, expected.int()):  # fmt: skip
        assert torch.equal(model.tokens(prompt), expected), prompt
    both = torch.tensor([[5, 6, 7], [8, -1, -1]])
    for prompt in (
        ["w5 w6 w7", "w8"],
        [[5, 6, 7], [8]],
        both,
        torch.tensor([[5, 6, 7], [-1, -1, 8]]),
    ):
        assert torch.equal(model.tokens(prompt), both)
    assert model.tokens("w5").dtype == torch.long
    assert model.text(torch.tensor([5, 6, -1])) == "w5 w6"


@pytest.mark.parametrize(
    "prompt",
    [
        "", "  ", "\n\t", [], [""], ["w5", ""], ["w5", " "], [[]], [[5], []], torch.tensor([]).long(),
        torch.zeros(1, 0).long(), torch.zeros(0, 3).long(), torch.tensor([[-1, -1]]),
        torch.tensor([[5, 6], [-1, -1]]), torch.tensor(5), torch.zeros(1, 2, 3).long(),
        [VOCAB_SIZE], [5, -2], torch.tensor([[VOCAB_SIZE]]), [[5], [6, 1000]], list(range(4, 9)) * 26,
        "w5 " * (MAX_CONTEXT + 1), torch.full((1, MAX_CONTEXT + 1), 5), ["w5", [6]], ["w5", 6], [5, [6]],
        [[5], "w6"], None, 5, 5.0, [5.0, 6.0], {"text": "w5"}, [None], [["w5"]], [[5.5]], b"w5",
        torch.tensor([5.5, 6.0]), torch.tensor([True, False]),
    ],
    ids=lambda prompt: repr(prompt)[:40].replace("\n", " "),
)  # fmt: skip
def test_what_is_no_prompt_is_refused_in_one_sentence(lab: Lab, prompt: Any) -> None:
    model = lab("llama")
    for run in (model.tokens, model.logits, model.trace, model.generate):
        with pytest.raises(PromptError) as caught:
            run(prompt)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200


def test_the_longest_prompt_fits(lab: Lab) -> None:
    ids = torch.randint(4, VOCAB_SIZE, (1, MAX_CONTEXT))
    assert lab("llama").trace(ids, keep=hl.keep.rows(queries=[-1])).rows.shape[-1] == MAX_CONTEXT


def test_padding_beyond_the_context_is_no_part_of_a_prompt(lab: Lab) -> None:
    ids = torch.full((1, MAX_CONTEXT + 5), -1)
    ids[0, :4] = torch.tensor([5, 6, 7, 8])
    assert lab("llama").tokens(ids)[lab("llama").tokens(ids) >= 0].tolist() == [5, 6, 7, 8]


def test_text_without_a_tokenizer_is_refused_and_ids_are_shown_as_numbers() -> None:
    model = hl.load(build("llama"))
    with pytest.raises(PromptError, match="tokenizer"):
        model.tokens("w5")
    kept = model.trace([5, 6], keep=hl.keep.statistics("entropy"))
    assert kept.tokens == (("5", "6"),)
    assert list(kept.to_frame()["token"].unique()) == ["5", "6"]
    generation = model.generate([5, 6], max_new_tokens=2)
    assert generation.texts == ()
    with pytest.raises(HeadlabError):
        model.text(torch.tensor([5]))


def test_a_prompts_own_tensor_is_left_as_it_was(lab: Lab) -> None:
    ids = torch.tensor([[-1, -1, 5], [6, 7, 8]])
    before = ids.clone()
    lab("llama").trace(ids, keep=hl.keep.rows())
    lab("llama").generate(ids, max_new_tokens=2)
    assert torch.equal(ids, before)


def test_a_model_prints_what_it_is(lab: Lab) -> None:
    assert "2 layers × 6 heads (2 key/value heads)" in repr(lab("llama"))
    assert "key/value" not in repr(lab("gpt2"))


def test_the_spec_measures_what_was_built(lab: Lab) -> None:
    llama, gemma, gpt_oss = (lab(name).spec for name in ("llama", "gemma2", "gpt_oss"))
    assert (llama.n_layers, llama.n_heads, llama.n_kv_heads, llama.d_head) == (2, 6, 2, 10)
    assert (llama.d_model, llama.n_vocab, llama.max_context) == (36, VOCAB_SIZE, MAX_CONTEXT)
    assert llama.windows == (None, None)
    assert gemma.windows == (5, None)
    assert [layer.softcap for layer in gemma.layers] == [2.5, 2.5]
    assert [layer.sinks for layer in gpt_oss.layers] == [True, True]
    assert lab("deepseek_v3").spec.d_value == 7
    assert lab("t5").spec.positions == "relative_bias"
    assert lab("gpt2").spec.positions == "learned"
    assert llama.positions == "rope"
    stacks = [layer.stack for layer in lab("bart").spec.layers]
    assert stacks == ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]
