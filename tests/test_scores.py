"""Scores refuse what is malformed, rank what is claimed, and show nothing unescaped."""

import json

import numpy as np
import pandas as pd
import pytest
from fake_reports import hostile_example, make_scores, role_info

from headlab.errors import OutputError
from headlab.roles.scores import COLUMNS, Example, Scores, head_label, visible

NAN = float("nan")


def frame_of(**changes):
    row = dict(
        zip(
            COLUMNS,
            ("a", 0, 1, 0.5, 0.4, 0.6, 9, 0.1, 0.4, 2.0, 0.45, 0.55, 0.01, 0.02, True, ""),
            strict=True,
        )
    )
    return pd.DataFrame([{**row, **changes}])


def scores_of(**changes):
    return Scores(frame_of(**changes), 0.05, (role_info("a", "A", "?"),))


def test_scores_keep_columns_types_and_values_and_copy_the_frame():
    frame = frame_of(layer=np.int32(3), claimed=np.True_, note=None).iloc[:, ::-1]
    scores = Scores(frame, 0.05, [role_info("a", "A", "?")])
    assert tuple(scores.frame.columns) == COLUMNS
    assert scores.frame["layer"].dtype == "int64"
    assert scores.frame["claimed"].dtype == "bool"
    assert scores.frame.loc[0, "note"] == ""
    frame.loc[0, "score"] = 9.0
    assert scores.frame.loc[0, "score"] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "unknown columns extra"),
        ({"role": "b"}, "without a description: b"),
        ({"layer": -1}, "count from 0"),
        ({"layer": 1.5}, "column layer .* whole numbers"),
        ({"n": NAN}, "column n .* whole numbers"),
        ({"claimed": "yes"}, "column claimed"),
        ({"claimed": None}, "column claimed"),
        ({"score": "high"}, "column score"),
        ({"q_value": 1.2}, "wrong for a of L0H1: q_value is not between 0 and 1"),
        ({"ci_low": 0.9}, "interval's ends"),
        ({"score": NAN}, "without a score cannot be claimed"),
    ],
)
def test_malformed_scores_are_refused_in_one_sentence(changes, message):
    with pytest.raises(OutputError, match=message) as caught:
        scores_of(**changes)
    assert "\n" not in str(caught.value)


def test_scores_refuse_missing_columns_repeated_rows_and_impossible_levels():
    info = role_info("a", "A", "?")
    with pytest.raises(OutputError, match="lacks q_value, note"):
        Scores(frame_of().drop(columns=["q_value", "note"]), 0.05, (info,))
    with pytest.raises(OutputError, match="more than one row"):
        Scores(pd.concat([frame_of(), frame_of()]), 0.05, (info,))
    with pytest.raises(OutputError, match="alpha 5"):
        Scores(frame_of(), 5, (info,))
    with pytest.raises(OutputError, match="described twice"):
        Scores(frame_of(), 0.05, (info, info))


def test_claimed_heads_come_by_falling_score():
    scores = make_scores(12, 4, 2)
    rows = scores.frame[(scores.frame["role"] == "induction") & scores.frame["claimed"]]
    expected = rows.sort_values("score", ascending=False)
    labels = [head_label(a, b) for a, b in zip(expected["layer"], expected["head"], strict=True)]
    assert scores.claimed("induction") == labels
    ranked = scores.ranked("induction")
    assert [*ranked["claimed"]] == sorted(ranked["claimed"], reverse=True)
    with pytest.raises(OutputError, match="'sink' was not scored"):
        scores.claimed("sink")


def test_scores_json_is_strict_and_round_trips():
    scores = make_scores(10, 2, 2)
    assert scores.frame["score"].isna().any()
    text = scores.to_json()
    json.loads(text, parse_constant=pytest.fail)
    again = Scores.from_json(text)
    pd.testing.assert_frame_equal(again.frame, scores.frame)
    assert (again.roles, again.alpha) == (scores.roles, scores.alpha)
    for bad in ("{", "[]", "{}", '{"alpha": 1, "roles": [], "rows": []}'):
        with pytest.raises(OutputError):
            Scores.from_json(bad)


def test_empty_scores_are_scores():
    scores = Scores(pd.DataFrame(columns=list(COLUMNS)), 0.05, ())
    assert repr(scores).startswith("Scores: 0 roles, 0 heads")
    assert scores.to_dict()["rows"] == []
    assert "Scores" in scores._repr_html_()


def test_reprs_show_the_claims_and_escape_everything():
    scores = make_scores(32, 32, 10)
    assert "induction" in repr(scores)
    assert scores.claimed("induction")[0] in repr(scores)
    html = scores._repr_html_()
    assert len(html) < 200_000
    assert scores.claimed("induction")[0] in html
    evil = "</table><script>alert(1)</script>\u202e"
    info = role_info("a", evil, "?")
    page_ = Scores(frame_of(note=evil), 0.05, (info,))._repr_html_()
    assert "<script" not in page_
    assert "\u202e" not in page_


def test_a_repr_stays_small_with_very_many_roles_and_notes():
    infos = tuple(role_info(f"r{index}", f"R{index}", "?") for index in range(300))
    frames = [
        frame_of(role=info.name, head=head, note="x" * 5000) for info in infos for head in (0, 1)
    ]
    html = Scores(pd.concat(frames), 0.05, infos)._repr_html_()
    assert len(html) < 200_000
    assert "showing 40 of 300 roles" in html


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" Paris", " Paris"),
        ("", "∅"),
        ("  ", "␣␣"),
        ("\n", "↵"),
        ("\t", "⇥"),
        ("\x00", "\\u0000"),
        ("\u202e", "\\u202e"),
        ("\u2028", "\\u2028"),
        ("\u00a0x", "\\u00a0x"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("\ue000", "\\ue000"),
        ("\u0301", "◌\u0301"),
        ("e" + "\u0301" * 4, "e\u0301\u0301\\u0301\\u0301"),
        ("日本", "日本"),
        ("a" * 50, "a" * 40 + "…"),
    ],
)
def test_visible_hides_nothing(text, shown):
    assert visible(text) == shown
    assert visible(text).isprintable()


def test_examples_are_checked_and_always_encodable():
    example = hostile_example("a", 0, 1)
    for token in example.tokens:
        token.encode("utf-8")
    good = {"role": "a", "layer": 0, "head": 0, "kind": "high", "tokens": ("x", "y"), "value": 0.5}
    Example(**good, query=0, weights=(1.0,))
    Example(**good, query=0, weights=(0.5, 0.5))
    for changes, message in (
        ({"query": 2, "weights": (1.0,)}, "query 2 is not among its 2 tokens"),
        ({"query": 1, "weights": (1.0,)}, "1 weights fit neither"),
        ({"query": 0, "weights": (NAN,)}, "finite"),
        ({"query": 0, "weights": (1.0,), "kind": "best"}, "must be one of high, median, random"),
    ):
        with pytest.raises(OutputError, match=message):
            Example(**{**good, **changes})
