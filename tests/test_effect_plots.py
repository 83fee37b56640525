"""Figures of the causal part hold the tables' numbers at the right places, and show hostile text as text."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from fake_reports import HOSTILE

from headlab import plots
from headlab.causal import effects_of
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.faithfulness import FaithfulnessCurve
from headlab.causal.graph import Edge
from headlab.causal.head_sets.pruning import PruningCurve
from headlab.errors import PlanError


def effects(keys, seed=0, corrupted=True, about=None):
    rng = np.random.default_rng(seed)
    means = np.linspace(-2, 3, len(keys))
    values = means[:, None] + rng.normal(0, 0.5, (len(keys), 12))
    baseline = rng.normal(0, 0.1, 12)
    other = baseline - 4 if corrupted else None
    about = (
        {"did": "patching", "direction": "noising", "metric": "loss"} if about is None else about
    )
    return effects_of(keys, values, baseline, baseline, other, about)


@pytest.fixture
def by_head():
    keys = [
        {"layer": at, "head": head} for at in range(3) for head in range(4) if (at, head) != (1, 2)
    ]
    return effects([*keys, {"layer": 2, "site": "mlp_out"}])


def test_every_effect_is_at_its_layer_and_head(by_head):
    figure = plots.effect_map(by_head)
    heat = figure.data[0]
    assert figure.layout.xaxis.ticktext == ("H0", "H1", "H2", "H3", "mlp_out")
    assert figure.layout.yaxis.ticktext == ("L0", "L1", "L2")
    for row in by_head.frame.to_dict("records"):
        column = row["head"] if row["head"] >= 0 else 4
        assert heat.z[row["layer"]][column] == row["effect"]
        assert f"{row['effect']:.4g}" in heat.text[row["layer"]][column]
    assert math.isnan(heat.z[1][2])
    assert math.isnan(heat.z[0][4])
    assert (heat.zmid, heat.zmin) == (0, -heat.zmax)
    assert heat.zmax == pytest.approx(by_head.frame["effect"].abs().max())
    assert "patching · noising · loss" in figure.layout.title.text


def test_clear_effects_are_framed(by_head):
    figure = plots.effect_map(by_head, alpha=0.01)
    marks = figure.data[1]
    corners = np.array(
        [point for point in zip(marks.y, marks.x, strict=True) if point[0] is not None]
    )
    outlines = corners.reshape(-1, 5, 2)  # closed: the fifth corner is the first
    framed = {tuple(map(round, outline[:4].mean(0))) for outline in outlines}
    assert np.abs(outlines - outlines[:, :4].mean(1, keepdims=True)).max() < 0.5  # within the cell
    clear = by_head.frame[by_head.frame["q_value"] <= 0.01]
    assert 0 < len(clear) < len(by_head.frame)
    assert framed == {(r.layer, r.head if r.head >= 0 else 4) for r in clear.itertuples()}
    assert figure.layout.title.subtitle.text == "framed in orange: q ≤ 0.01"
    none = plots.effect_map(by_head, alpha=0)
    assert not none.data[1].x
    assert none.layout.title.subtitle.text == "no cell has q ≤ 0"


def test_signed_columns_diverge_from_zero_and_values_do_not(by_head):
    heat = plots.effect_map(by_head, "normalised").data[0]
    row = by_head.frame.iloc[0]
    assert heat.z[0][0] == row["normalised"]
    assert (heat.zmid, heat.zmin) == (0, -heat.zmax)
    assert plots.effect_map(by_head, "value").data[0].zmid is None
    bare = plots.effect_map(effects([{"layer": 0, "head": 0}], corrupted=False))
    assert "normalised" not in bare.data[0].text[0][0]


def test_layers_run_from_the_first_to_the_last_that_was_swept():
    swept = effects([{"layer": layer, "head": head} for layer in (22, 24) for head in (0, 1)])
    figure = plots.effect_map(swept)
    assert figure.layout.yaxis.ticktext == ("L22", "L23", "L24")
    rows = swept.frame.set_index(["layer", "head"])["effect"]
    assert list(figure.data[0].z[0]) == [rows[22, 0], rows[22, 1]]
    assert list(figure.data[0].z[2]) == [rows[24, 0], rows[24, 1]]
    assert np.isnan(figure.data[0].z[1]).all()


@pytest.mark.parametrize("title", ["Logit difference of answers and foils", "word " * 38])
def test_titles_fit_beside_and_above_a_map_of_one_column(title):
    figure = plots.effect_map(effects([{"layer": 0, "site": "mlp_out"}]), title=title)
    lines = figure.layout.title.text.split("<br>")
    assert " ".join(lines) == title.strip()
    margin = figure.layout.margin
    assert margin.l + 8 * max(map(len, lines)) <= figure.layout.width
    assert margin.t >= 20 * len(lines) + 8 * len("mlp_out")
    # The cell keeps its size, and the colour bar its room.
    assert figure.layout.width - margin.l - margin.r == plots.heatmap.CELL
    below_top = figure.layout.height - margin.t
    assert figure.data[0].colorbar.len >= 100
    assert below_top >= figure.data[0].colorbar.len


def test_one_prompt_has_no_interval_to_point_at():
    lone = effects_of(
        [{"layer": 0, "head": 0}], np.ones((1, 1)), np.zeros(1), np.zeros(1), None, {}
    )
    lone.frame[["ci_low", "ci_high"]] = math.nan
    figure = plots.effect_map(lone)
    assert "effect 1<br>" in figure.data[0].text[0][0]
    assert figure.layout.title.text == "Effects"


@pytest.fixture
def by_position():
    keys = [
        {"layer": at, "head": head, "position": position}
        for at in range(3) for head in range(5) for position in range(4)
    ]  # fmt: skip
    return effects(keys)


def test_positions_run_across_and_the_largest_heads_down(by_position):
    tokens = ["The", HOSTILE[0], "$x$", "<b>"]
    figure = plots.position_map(by_position, tokens, top=4)
    frame = by_position.frame
    largest = frame["effect"].abs().groupby([frame["layer"], frame["head"]]).max().nlargest(4)
    wanted = [f"L{layer}H{head}" for layer, head in sorted(largest.index)]
    assert list(figure.layout.yaxis.ticktext) == wanted
    for row in frame.to_dict("records"):
        name = f"L{row['layer']}H{row['head']}"
        if name in wanted:
            assert figure.data[0].z[wanted.index(name)][row["position"]] == row["effect"]
    labels = figure.layout.xaxis.ticktext
    assert labels[0] == "0 The"
    assert figure.layout.xaxis.tickangle == -60
    assert not any("<" in label or "$" in label for label in labels)


def test_whole_layers_run_down_in_order():
    keys = [{"layer": at, "position": p, "site": "resid_pre"} for at in range(3) for p in (0, 2)]
    figure = plots.position_map(effects(keys), top=1)
    assert figure.layout.yaxis.ticktext == ("L0", "L1", "L2")
    assert figure.layout.xaxis.ticktext == ("0", "1", "2")
    assert figure.layout.xaxis.tickangle == 0
    assert all(math.isnan(row[1]) for row in figure.data[0].z)


def test_maps_say_what_they_cannot_show(by_head, by_position):
    with pytest.raises(PlanError, match="L0 H0 has several rows"):
        plots.effect_map(by_position)
    with pytest.raises(PlanError, match="not by position; sweep with positions="):
        plots.position_map(by_head)
    for draw in (plots.effect_map, plots.position_map):
        with pytest.raises(PlanError, match="column='q_value' must be one of"):
            draw(by_position, column="q_value")
        with pytest.raises(PlanError, match=rf"{draw.__name__} draws Effects, .* not dict"):
            draw({"L0H0": 0.1})
    for n in (3, 5):
        with pytest.raises(PlanError, match=f"there are {n} tokens but 4 positions, 0–3"):
            plots.position_map(by_position, ["a"] * n)


def faithful(shift=0.0) -> FaithfulnessCurve:
    share = [0.01, 0.1, 1.0]
    rows = [
        (ranking, s, int(100 * s), int(90 * s), 90 * s, 0.0, y + shift, y + shift - 0.1, y + shift + 0.2)
        for ranking, ys in (("score", (0.2, 0.9, 1.0)), ("absolute", (0.1, 0.5, 1.0)))
        for s, y in zip(share, ys, strict=True)
    ]  # fmt: skip
    columns = [
        "ranking",
        "share",
        "n",
        "n_kept",
        "weighted_edges",
        "metric",
        "faithfulness",
        "ci_low",
        "ci_high",
    ]
    ends = np.zeros(2)
    return FaithfulnessCurve(
        pd.DataFrame(rows, columns=columns), (0.9, 0.8, 1.0), (0.2, 0.1, 0.3), ends, ends
    )


def test_faithfulness_curves_carry_cpr_and_cmd_in_the_legend():
    figure = plots.faithfulness_curve({"<EAP>": faithful(), "random": faithful(-0.1)})
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [line.name for line in lines] == [
        "&lt;EAP&gt; · by score: CPR 0.900 [0.800, 1.000]",
        "&lt;EAP&gt; · by absolute score: CMD 0.200 [0.100, 0.300]",
        "random · by score: CPR 0.900 [0.800, 1.000]",
        "random · by absolute score: CMD 0.200 [0.100, 0.300]",
    ]
    assert [line.line.dash for line in lines] == ["solid", "dash"] * 2
    assert list(lines[0].y) == [0.2, 0.9, 1.0]
    assert list(lines[3].y) == pytest.approx([0.0, 0.4, 0.9])
    assert list(lines[0].x) == [0.01, 0.1, 1.0]
    band = figure.data[0]
    assert list(band.y) == pytest.approx([0.4, 1.1, 1.2, 0.9, 0.8, 0.1])
    assert figure.layout.showlegend
    assert figure.layout.yaxis.title.text.endswith("(0: empty circuit, 1: whole model)")
    alone = plots.faithfulness_curve(faithful())
    assert "by score: CPR 0.900 [0.800, 1.000]" in [trace.name for trace in alone.data]
    with pytest.raises(PlanError, match="there is no curve"):
        plots.faithfulness_curve({})


def pruned(n_prompts=3) -> PruningCurve:
    bound = [1.0, 0.5] if n_prompts > 1 else [math.nan] * 2
    columns = {
        "removed": [0, 6],
        "share": [0, 0.5],
        "metric": [2.0, 1.0],
        "ci_low": bound,
        "ci_high": [3.0, 2.0],
    }
    frame = pd.DataFrame(columns | {"retained": [1.0, 0.5], "heads": ["", "L0H0"]})
    return PruningCurve(frame, (), np.zeros((2, n_prompts)), {})


def test_pruning_curves_show_the_metric_with_its_interval_or_what_is_retained():
    figure = plots.pruning_curve({"Michel": pruned(), "random": pruned(1)})
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [list(line.y) for line in lines] == [[2.0, 1.0]] * 2
    assert [list(line.x) for line in lines] == [[0, 0.5]] * 2
    assert len(figure.data) == 3  # no band where there is no interval
    retained = plots.pruning_curve(pruned(), column="retained")
    assert list(retained.data[0].y) == [1.0, 0.5]
    assert len(retained.data) == 1
    with pytest.raises(PlanError, match="must be 'metric' or 'retained'"):
        plots.pruning_curve(pruned(), column="share")


EDGES = {
    Edge("embed", "L0H1", "q"): 0.9,
    Edge("L0H1", "L2H0", "k"): -0.5,
    Edge("mlp0", "L2H0", "v"): 0.1,
    Edge("L2H0", "logits"): 0.3,
}


def circuit(scores, kind="edges", **facts) -> Circuit:
    return Circuit(kind, scores, facts.pop("model", "toy"), "", (3, 3, 3), **facts)


def test_a_graph_runs_from_the_embedding_up_to_the_logits():
    figure = plots.head_graph(circuit(EDGES))
    nodes = next(trace for trace in figure.data if trace.name == "nodes")
    places = {name: (x, y) for name, x, y in zip(nodes.text, nodes.x, nodes.y, strict=True)}
    assert set(places) == {"embed", "L0H1", "mlp0", "L2H0", "logits"}
    assert places["L0H1"] == (1, 0)
    assert places["L2H0"] == (0, 2)
    heights = [places[name][1] for name in ("embed", "L0H1", "mlp0", "L2H0", "logits")]
    assert heights == sorted(heights)
    assert len(set(heights)) == 5
    assert places["mlp0"][0] > 2  # beside the heads
    drawn = {}
    for trace in figure.data:
        if trace.mode == "lines" and trace.showlegend is False:
            gaps = [at for at, x in enumerate(trace.x) if x is None]
            for start, stop in zip([-1, *gaps], gaps, strict=False):
                first, last = start + 1, stop - 1
                ends = (trace.x[first], trace.y[first]), (trace.x[last], trace.y[last])
                assert list(trace.y[first:stop]) == sorted(trace.y[first:stop])
                drawn[ends] = trace
    assert len(drawn) == len(EDGES)
    for edge, score in EDGES.items():
        trace = drawn[places[edge.source], places[edge.target]]
        assert trace.line.color == (plots.style.BLUE if score > 0 else "#8a5a2b")
        assert trace.line.dash == {"q": "solid", "k": "dash", "v": "dot", "": "solid"}[edge.input]
    widths = {
        score: drawn[places[e.source], places[e.target]].line.width for e, score in EDGES.items()
    }
    # Square roots, to half a pixel: one strong edge leaves the others visible and distinct.
    for score, width in widths.items():
        assert width == pytest.approx(5 * math.sqrt(abs(score) / 0.9), abs=0.25)
    hover = next(trace for trace in figure.data if trace.name == "edges")
    assert "L0H1 → L2H0.k<br>score -0.5" in hover.text


def test_a_graph_says_what_its_lines_mean():
    figure = plots.head_graph(circuit(EDGES))
    legend = {
        trace.name: (trace.line.color, trace.line.dash)
        for trace in figure.data
        if trace.showlegend is not False
    }
    assert figure.layout.showlegend
    assert legend["raises the metric"] == (plots.style.BLUE, "solid")
    assert legend["lowers the metric"] == ("#8a5a2b", "solid")
    dashes = {name: dash for name, (_, dash) in legend.items() if name.startswith("into")}
    assert dashes == {"into q, an MLP or the logits": "solid", "into k": "dash", "into v": "dot"}
    assert "edges run upward" in figure.layout.title.subtitle.text


def test_a_graph_shows_all_of_its_edges_and_keeps_names_off_other_nodes():
    long = Circuit(
        "edges", {Edge("L0H2", "mlp29"): 1.0, Edge("mlp0", "mlp29"): 1.0}, "toy", "", (3,) * 30
    )
    figure = plots.head_graph(long)
    (left, right), (low, high) = figure.layout.xaxis.range, figure.layout.yaxis.range
    for trace in figure.data:
        assert all(left < x < right for x in trace.x if x is not None)
        assert all(low < y < high for y in trace.y if y is not None)
    nodes = next(trace for trace in figure.data if trace.name == "nodes")
    sides = dict(zip(nodes.text, nodes.textposition, strict=True))
    assert sides == {"L0H2": "top center", "mlp0": "middle right", "mlp29": "middle right"}


def test_a_circuit_of_heads_is_coloured_by_score():
    figure = plots.head_graph(circuit({"L1H2": 2.0, "L0H0": -1.0}, "heads"))
    (nodes,) = figure.data
    assert not figure.layout.showlegend
    assert dict(zip(nodes.text, nodes.marker.color, strict=True)) == {"L0H0": -1.0, "L1H2": 2.0}
    assert (nodes.marker.cmin, nodes.marker.cmax) == (-2.0, 2.0)


def test_parallel_blocks_have_their_mlp_beside_their_heads():
    figure = plots.head_graph(circuit({Edge("embed", "mlp1"): 1.0}, parallel=True))
    nodes = next(trace for trace in figure.data if trace.name == "nodes")
    assert dict(zip(nodes.text, nodes.y, strict=True))["mlp1"] == 1


def test_graphs_refuse_nothing_and_tangles():
    with pytest.raises(PlanError, match="circuit is empty"):
        plots.head_graph(circuit({}))
    heads = [f"L{layer}H{head}" for layer in range(6) for head in range(12)]
    many = {Edge(a, b, "q"): 1.0 for a in heads for b in heads if a[1] < b[1]}
    with pytest.raises(PlanError, match="has 2160 edges, and a graph of more than 500"):
        plots.head_graph(Circuit("edges", many, "toy", "", (12,) * 6))


@pytest.mark.parametrize("text", [*HOSTILE, "$x^2$", "<b>bold</b>"])
def test_hostile_names_become_plain_titles(text):
    figures = [
        plots.head_graph(circuit(EDGES, model=text)),
        plots.effect_map(effects([{"layer": 0, "head": 0}], about={"did": text})),
        plots.faithfulness_curve(faithful(), title=text),
        plots.pruning_curve({text: pruned(), "b": pruned()}, title=text),
    ]
    for figure in figures:
        assert isinstance(figure, go.Figure)
        named = [trace.name for trace in figure.data if trace.name]
        for shown in (figure.layout.title.text.replace("<br>", ""), *named):
            assert "<" not in shown
            assert "$" not in shown
            assert shown.isprintable()
        json.loads(figure.to_json())
