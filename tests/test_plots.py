"""Figures say what the scores say, show hostile text as text, and change nothing global."""

import json
import math
import subprocess
import sys

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
import torch
from fake_reports import HOSTILE, make_scores

from headlab import plots
from headlab.errors import OutputError, PlanError


@pytest.fixture(scope="module")
def scores():
    return make_scores(10, 4, 3)


def test_role_map_holds_every_effect_at_its_own_layer_and_head(scores):
    figure = plots.role_map(scores, "induction")
    rows = scores.frame[scores.frame["role"] == "induction"]
    for row in rows.to_dict("records"):
        assert figure.data[0].z[row["layer"]][row["head"]] == pytest.approx(
            row["effect"], nan_ok=True
        )
    assert list(figure.data[0].x) == ["H0", "H1", "H2", "H3"]
    assert list(figure.data[0].y)[:2] == ["L0", "L1"]
    assert figure.layout.yaxis.scaleanchor == "x"


def test_role_map_keeps_original_ids_of_a_subset(scores):
    frame = scores.frame[scores.frame["layer"].isin([3, 7])]
    figure = plots.role_map(type(scores)(frame, scores.alpha, scores.roles), "induction")
    assert list(figure.data[0].y)[-1] == "L7"
    assert np.isnan(figure.data[0].z[0]).all()
    assert np.isfinite(figure.data[0].z[3]).all()


def test_role_map_marks_claimed_and_unmeasured_heads(scores):
    figure = plots.role_map(scores, "previous_token")
    claimed, unmeasured = figure.data[1:]
    marked = [y + x for x, y in zip(claimed.x, claimed.y, strict=True)]
    assert sorted(marked) == sorted(scores.claimed("previous_token"))
    assert set(unmeasured.y) == {"L4", "L9"}
    assert "not measurable" in unmeasured.text[0]
    assert "q " in claimed.text[0]
    assert "score" in claimed.text[0]


def test_colours_meet_at_zero_and_stay_pale_without_claims():
    scores = make_scores(4, 4, 1, claims=False)
    heat = plots.role_map(scores, "previous_token").data[0]
    assert heat.zmid == 0
    assert heat.zmin == -heat.zmax
    assert heat.zmax >= scores.roles[0].min_score


def test_unknown_role_names_the_known_ones(scores):
    with pytest.raises(OutputError, match=r"'inductoin' was not scored.*previous_token, induction"):
        plots.role_map(scores, "inductoin")


def test_pattern_accepts_a_row_a_matrix_and_a_low_precision_tensor():
    tokens = ["a", "b", "c"]
    row = plots.pattern([0.2, 0.3, 0.5], tokens)
    assert np.shape(row.data[0].z) == (1, 3)
    assert row.layout.yaxis.ticktext == ("c",)
    matrix = torch.eye(3, dtype=torch.bfloat16, requires_grad=True)
    assert np.allclose(plots.pattern(matrix, tokens).data[0].z, np.eye(3))
    some = plots.pattern(matrix[:2], tokens, queries=[0, -1])
    assert some.layout.yaxis.ticktext == ("a", "c")
    cross = plots.pattern(np.ones((1, 3)) / 3, tokens, queries=[0], query_tokens=["une"])
    assert cross.layout.yaxis.ticktext == ("une",)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.ones((2, 2, 3)), {}, "not \\[query, key\\]"),
        (np.ones((2, 4)), {}, "4 keys but there are 3 tokens"),
        (np.ones((2, 3)), {"queries": [1]}, "2 rows but 1 queries"),
        (np.ones((1, 3)), {"queries": [5]}, "within 3 tokens"),
    ],
)
def test_pattern_says_what_does_not_fit(rows, options, message):
    with pytest.raises(PlanError, match=message):
        plots.pattern(rows, ["a", "b", "c"], **options)


def test_hostile_tokens_become_plain_labels():
    tokens = [*HOSTILE, "$x^2$", "<b>bold</b>"]
    count = len(tokens)
    figure = plots.pattern(np.full((1, count), 1 / count), tokens)
    for label in figure.layout.xaxis.ticktext:
        assert "<" not in label
        assert not label.startswith("$")
        assert "\u202e" not in label
        assert label.isprintable()
    json.loads(figure.to_json())


def test_long_patterns_thin_out_their_labels_but_keep_every_token():
    figure = plots.pattern(np.ones((1, 500)) / 500, [f"t{index}" for index in range(500)])
    assert len(figure.layout.xaxis.ticktext) <= 80
    assert len(figure.data[0].text[0]) == 500


def test_profile_shows_best_heads_with_their_intervals(scores):
    figure = plots.profile(scores, "induction", top=5)
    best = scores.ranked("induction").head(5)
    dots = figure.data[1]
    assert list(dots.x) == pytest.approx(list(best["score"]))
    assert list(dots.error_x.array) == pytest.approx(list(best["ci_high"] - best["score"]))
    assert all(math.isfinite(value) for value in dots.x)


def test_figures_are_returned_and_nothing_global_changes(scores, monkeypatch):
    before = (pio.renderers.default, pio.templates.default)
    monkeypatch.setattr(go.Figure, "show", lambda *_, **__: pytest.fail("a figure was shown"))
    for figure in (
        plots.role_map(scores, "induction"),
        plots.profile(scores, "induction"),
        plots.pattern([1.0], ["a"]),
    ):
        assert isinstance(figure, go.Figure)
    assert (pio.renderers.default, pio.templates.default) == before


def test_plotly_is_imported_by_plots_alone():
    code = "import sys, headlab.report; assert 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def mapped():
    from relation_models import implementing, token_map, words

    from headlab.parameters import maps

    first, second = words(name="<b>first</b>"), words(seed=5, name="second")
    return maps(implementing("llama", {(1, 2): token_map(first)}), [first, second])


def test_operation_map_holds_every_score_of_the_heads_it_shows_and_frames_the_claimed(mapped):
    figure = plots.operation_map(mapped)
    heat = figure.data[0]
    heads = list(figure.layout.xaxis.ticktext)
    table = mapped.matrix()
    worth = mapped.matrix(column="effect").max(axis=1) >= mapped.about["min_effect"] / 2
    assert heads == [head for head in table.index if worth[head]]
    assert "L1H2" in heads
    for at, name in enumerate(table.columns):
        for across, head in enumerate(heads):
            assert heat.z[at][across] == pytest.approx(table.loc[head, name])
    (frame,) = figure.layout.shapes
    assert (frame.x0 + frame.x1) / 2 == heads.index("L1H2")
    assert (frame.y0 + frame.y1) / 2 == 0
    assert "claimed" in heat.text[0][heads.index("L1H2")]
    assert all("<b>first" not in name for name in figure.layout.yaxis.ticktext)


def test_operation_map_shows_the_heads_with_the_largest_effects(mapped):
    figure = plots.operation_map(mapped, top=1)
    assert list(figure.layout.xaxis.ticktext) == ["L1H2"]
    lowered = plots.operation_map(mapped, "suppresses")
    assert not lowered.layout.shapes


def test_operation_map_refuses_what_it_cannot_draw(mapped):
    with pytest.raises(PlanError, match="direction"):
        plots.operation_map(mapped, "sideways")
    with pytest.raises(PlanError, match="top=0"):
        plots.operation_map(mapped, top=0)
