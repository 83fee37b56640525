"""Weights beside behaviour: the planted heads lead both columns, and agreement equals scipy's on the same numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.errors import OutputError, UnsupportedError
from headlab.report import side_by_side
from headlab.report.side_by_side import _induction


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_the_planted_heads_lead_both_columns(family: str) -> None:
    model = hl.load(planted.model(family=family))
    found = side_by_side(model, embedding="raw", n_prompts=12)
    assert not found.notes
    frame = found.frame.set_index(["layer", "head"])
    for weights, role, head in (
        ("copying_weights", "copying", (2, 1)),
        ("previous_token_weights", "previous_token", (1, 0)),
        ("induction_weights", "induction", (2, 1)),
    ):
        assert frame[weights].idxmax() == head
        assert frame[role].idxmax() == head
        if (
            role != "copying"
        ):  # its score depends on the unembedding's gain, which planted models keep low
            assert list(frame.index[frame[f"{role}_claimed"]]) == [head]
    agreement = found.agreement.set_index("role")
    assert (agreement.loc[["previous_token", "induction"], "auc"] == 1.0).all()
    assert frame["induction_weights"].nlargest(2).iloc[1] < 0.1 * frame["induction_weights"].max()


def test_agreement_is_that_of_the_columns() -> None:
    model = hl.load(planted.model(distractors=10, n_heads=6))
    scores = hl.score(model, ["copying", "previous_token", "induction"], n_prompts=12)
    found = side_by_side(model, scores, embedding="raw")
    frame = found.frame
    assert len(frame) == 24
    for row in found.agreement.itertuples():
        x, y = frame[row.weights], frame[row.role]
        assert row.spearman == pytest.approx(spearmanr(x, y).statistic)
        assert row.ci_low <= row.spearman <= row.ci_high
        claimed = frame[f"{row.role}_claimed"]
        assert row.claimed == claimed.sum()
        wins = [a > b for a in x[claimed] for b in x[~claimed]]
        if wins:
            assert row.auc == pytest.approx(np.mean(wins))
        else:
            assert row.role == "copying"
            assert np.isnan(row.auc)
        np.testing.assert_allclose(
            y, scores.ranked(row.role).sort_values(["layer", "head"])["score"].to_numpy()
        )
    again = side_by_side(model, scores, embedding="raw")
    assert again.agreement.equals(found.agreement)
    assert "AUC" in repr(found)


def test_induction_by_weights_takes_both_a_previous_token_head_and_composition() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    before = pd.DataFrame(places, columns=["layer", "head"])
    before["effect"] = [0.5, -0.2, 0.0, 0.0]
    composed = pd.DataFrame(
        [
            ("K", "L0H0", "L1H0", 0.1),  # 0.5 · 0.1
            ("K", "L0H1", "L1H0", 0.9),  # looks elsewhere
            ("Q", "L0H0", "L1H1", 0.9),  # read by queries
            ("K", "L0H0", "L1H1", -0.1),
            ("K", "L0H1", "L1H1", 0.2),
        ],
        columns=["kind", "early", "late", "effect"],
    )
    np.testing.assert_allclose(_induction(before, composed), [0, 0, 0.05, 0])


def test_a_first_mlp_that_writes_nothing_is_noted() -> None:
    model = hl.load(planted.model())
    scores = hl.score(model, ["copying", "previous_token", "induction"], n_prompts=4)
    found = side_by_side(model, scores)
    (note,) = found.notes
    assert "embedding='raw'" in note
    assert note in repr(found)


def test_what_is_missing_is_said() -> None:
    model = hl.load(planted.model())
    scores = hl.score(model, ["copying"], n_prompts=4)
    with pytest.raises(OutputError, match="previous_token"):
        side_by_side(model, scores)
    latent = hl.load(build("deepseek_v3"), tokenizer=tiny_tokenizer())
    with pytest.raises(UnsupportedError, match="multi-head latent attention"):
        side_by_side(latent, n_prompts=4)
