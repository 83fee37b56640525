"""Faithfulness: by hand on made-up runs, and at both ends on real ones."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import build

import headlab as hl
from headlab.causal import metrics
from headlab.causal.attribution.eap import eap
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.faithfulness import HeadRuns, area, faithfulness, faithfulness_curve
from headlab.causal.paths.edges import EdgeRuns
from headlab.errors import HeadError, PlanError, PromptError

METRIC = metrics.logit_difference(20, 30)
CLEAN = torch.randint(4, 97, (3, 7), generator=torch.Generator().manual_seed(0))
CORRUPTED = torch.randint(4, 97, (3, 7), generator=torch.Generator().manual_seed(1))


class MadeUp:
    """Runs of a game: each edge that is kept adds its worth, on two prompts."""

    #: All ten edges of a model of one layer with one head; the last four are worth something.
    EDGES = (
        ("embed", "L0H0", "q"), ("embed", "L0H0", "k"), ("embed", "L0H0", "v"), ("embed", "mlp0", ""),
        ("L0H0", "mlp0", ""), ("embed", "logits", ""), ("L0H0", "logits", ""), ("mlp0", "logits", ""),
    )  # fmt: skip
    WORTH = (0, 0, 0, 0, 0, 4.0, 3.0, -2.0)

    def __init__(self, sign: float = 1.0) -> None:
        layer = SimpleNamespace(n_heads=1)
        self.model = SimpleNamespace(
            name="toy", fingerprint="", spec=SimpleNamespace(layers=[layer])
        )
        self.sign = sign
        self.clean = self.run([self.EDGES])[0]
        self.corrupted = self.run([()])[0]

    def run(self, kept):
        worth = dict(zip(self.EDGES, self.WORTH, strict=True))
        sums = [sum(worth[tuple(edge)] for edge in edges) for edges in kept]
        return np.array([[1 + self.sign * each] * 2 for each in sums])


def ranked(sign: float = 1.0) -> Circuit:
    scores = dict(zip(MadeUp.EDGES, (0.9, 0.01, 0.02, 0.8, -0.7, 0.5, 0.6, -1.0), strict=True))
    scores = {edge: sign * score for edge, score in scores.items()}
    return Circuit.of_edges(MadeUp().model, scores)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_curve_cpr_and_cmd_by_hand(sign):
    """With sign −1 corruption raises the metric, as a loss does: the same circuit, the same faithfulness."""
    curve = faithfulness_curve(MadeUp(sign), ranked(sign), sizes=(0.25, 0.5, 0.75, 1.0))
    by_score = curve.frame[curve.frame["ranking"] == "score"]
    # Of the best 2, embed → q and embed → mlp0, nothing reaches the logits. The best 4 add embed → logits (4) and
    # L0H0 → logits (3). The best 6 add nothing of worth; all 8 add mlp0 → logits (−2). Whole: 4 + 3 − 2 = 5.
    assert by_score["n"].tolist() == [2, 4, 6, 8]
    assert by_score["n_kept"].tolist() == [0, 3, 5, 8]
    assert by_score["faithfulness"].tolist() == pytest.approx([0, 7 / 5, 7 / 5, 1])
    assert curve.cpr[0] == pytest.approx(0.25 * (0.7 + 1.4 + 1.2))
    by_size = curve.frame[curve.frame["ranking"] == "absolute"]
    # By size: mlp0 → logits (−2), embed → q | embed → mlp0, L0H0 → mlp0 | L0H0 → logits (3), embed → logits (4) | rest.
    assert by_size["n_kept"].tolist() == [0, 4, 6, 8]
    assert by_size["faithfulness"].tolist() == pytest.approx([0, -2 / 5, 1, 1])
    assert curve.cmd[0] == pytest.approx(0.25 * ((1 + 1.4) / 2 + 1.4 / 2 + 0))
    assert by_size["weighted_edges"].tolist() == [0, 4, 6, 8]
    assert by_size["metric"].tolist() == pytest.approx(
        [1, 1 - 2 * sign, 1 + 5 * sign, 1 + 5 * sign]
    )


def test_area_is_a_trapezoid_over_linear_shares():
    assert area([0.1, 0.2, 1.0], np.array([1.0, 3.0, 5.0])) == pytest.approx(0.1 * 2 + 0.8 * 4)
    assert area([0.001, 1.0], np.ones((5, 2))) == pytest.approx([0.999] * 5)


def test_intervals_resample_prompts():
    runs = MadeUp()
    rng = np.random.default_rng(0)
    runs.clean, runs.corrupted = rng.normal(3, 1, 40), rng.normal(0, 1, 40)
    half = (runs.clean + runs.corrupted) / 2 + rng.normal(0, 0.5, 40)
    runs.run = lambda kept: np.stack([half for _ in kept])
    found = faithfulness(runs, ranked(), seed=3)
    draws = np.random.default_rng(9).integers(40, size=(20_000, 40))
    empty = runs.corrupted[draws].mean(1)
    ratios = (half[draws].mean(1) - empty) / (runs.clean[draws].mean(1) - empty)
    low, high = np.percentile(ratios, [2.5, 97.5])
    assert found.ci_low == pytest.approx(low, abs=0.02)
    assert found.ci_high == pytest.approx(high, abs=0.02)
    runs.clean, runs.corrupted, half = runs.clean[:1], runs.corrupted[:1], half[:1]
    assert np.isnan(faithfulness(runs, ranked()).ci_low)


def test_circuits_that_cannot_be_tested_are_refused():
    runs = MadeUp()
    with pytest.raises(
        PlanError, match=r"scores 2 of the model's 8 edges, but a curve up to 1 needs 8"
    ):
        faithfulness_curve(runs, ranked().top(2))
    faithfulness_curve(runs, ranked().top(2), sizes=(0.1, 0.25))
    for sizes in [(0.5,), (0.5, 0.2), (0, 1), (0.5, 1.5)]:
        with pytest.raises(PlanError, match="two or more rising shares"):
            faithfulness_curve(runs, ranked(), sizes=sizes)
    with pytest.raises(
        PlanError, match="runs are of circuits of edges, but this circuit is one of heads"
    ):
        faithfulness(runs, Circuit("heads", {"L0H0": 1.0}, "toy", "", (1,)))
    with pytest.raises(PlanError, match="4 heads in 2 layers, but toy has 1 in 1"):
        faithfulness(runs, Circuit("edges", {}, "other", "", (2, 2)))
    runs.clean = runs.corrupted
    with pytest.raises(PlanError, match="both measure 1, so faithfulness is undefined"):
        faithfulness(runs, ranked())


def precise(family: str) -> tuple[hl.Model, float]:
    """A model in float64 and how closely its numbers must agree; experts and Gemma's norms compute in float32."""
    module = build(family)
    if family != "gpt_oss":
        module = module.double()
    return hl.load(module), {"gpt_oss": 1e-4, "gemma2": 1e-5, "gemma3_text": 1e-5}.get(family, 1e-9)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "patch"),
        ("llama", "mean"),
        ("llama", "zero"),
        ("gpt2", "mean"),
        ("gpt_neox", "patch"),
        ("gemma2", "patch"),
        ("gemma3_text", "mean"),
        ("gpt_oss", "patch"),
    ],
)
def test_heads_outside_a_circuit_are_taken_out(family, kind):
    model, close = precise(family)
    runs = HeadRuns(model, CLEAN, CORRUPTED, METRIC, kind=kind, reference=CORRUPTED)

    def measured(gone) -> np.ndarray:
        edit = hl.ablate(gone, kind if kind != "patch" else "zero", reference=CORRUPTED)
        if kind == "patch":
            edit = hl.patch(gone, "z", source=model.trace(CORRUPTED, keep=hl.keep.tensors("z")))
        with model.edit(edit):
            logits = model.logits(CLEAN)[:, -1]
        return (logits[:, 20] - logits[:, 30]).detach().numpy()

    logits = model.logits(CLEAN)[:, -1]
    clean, empty = (logits[:, 20] - logits[:, 30]).detach().numpy(), measured("*.*")
    assert runs.clean == pytest.approx(clean, abs=close)
    assert runs.corrupted == pytest.approx(empty, abs=close)
    some = Circuit.of_heads(model, {"0.*": 1.0, "1.2": 0.5})
    found = faithfulness(runs, some)
    rest = [head for head in hl.parse_heads("1.*", model.spec) if head != (1, 2)]
    part = measured(rest).mean()
    hand = (part - empty.mean()) / (clean.mean() - empty.mean())
    assert found.value == pytest.approx(hand, abs=close)
    assert found.n == len(some) < runs.model.spec.n_layers * runs.model.spec.n_heads
    whole = Circuit.of_heads(model, {"*.*": 1.0})
    assert faithfulness(runs, whole).value == pytest.approx(1, abs=close)
    assert faithfulness(runs, whole.top(0)).value == pytest.approx(0, abs=close)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gpt_oss"])
def test_no_edge_is_the_corrupted_run_and_every_edge_the_clean_one(family):
    model, close = precise(family)
    runs = EdgeRuns(model, CLEAN, CORRUPTED, METRIC)
    ranking = Circuit.of_edges(model, eap(model, CLEAN, CORRUPTED, METRIC))
    assert ranking.parallel == (family == "gpt_neox")
    assert len(ranking) == ranking.n_possible
    assert faithfulness(runs, ranking).value == pytest.approx(1, abs=close)
    assert faithfulness(runs, ranking.top(0)).value == pytest.approx(0, abs=close)
    corrupted = model.logits(CORRUPTED)[:, -1]
    hand = (corrupted[:, 20] - corrupted[:, 30]).mean()
    assert faithfulness(runs, ranking.top(0)).metric == pytest.approx(float(hand), abs=close)


def test_scores_of_attribution_turn_their_sign_and_rank_helpful_edges_first(lab):
    model = lab("llama")
    edges = eap(model, CLEAN, CORRUPTED, METRIC)
    circuit = Circuit.of_edges(model, edges)
    row = edges.frame.iloc[0]
    assert circuit.edges[row["source"], row["target"], row["input"]] == -row["score"]
    assert (circuit.method, circuit.metric) == ("EAP", "logit difference")


def test_effects_become_circuits_of_heads(lab):
    model = lab("llama")
    ablated = hl.causal.ablate_each(model, CLEAN, METRIC)
    circuit = Circuit.of_heads(model, ablated)
    row = ablated.frame.iloc[3]
    assert circuit.scores[f"L{row['layer']}H{row['head']}"] == -row["effect"]
    assert len(circuit) == 12
    restored = hl.causal.patch_each(model, CLEAN, CORRUPTED, METRIC, direction="denoising")
    row = restored.frame.iloc[3]
    assert (
        Circuit.of_heads(model, restored).scores[f"L{row['layer']}H{row['head']}"] == row["effect"]
    )


def test_an_effect_of_a_group_is_the_score_of_all_its_heads(lab):
    model = lab("llama")  # two groups of three heads in each of two layers
    grouped = hl.causal.ablate_each(model, CLEAN, METRIC, by="kv_group")
    circuit = Circuit.of_heads(model, grouped)
    assert circuit.heads == hl.parse_heads("*.*", model.spec)
    for row in grouped.frame.to_dict("records"):
        for head in range(row["head"], row["head"] + 3):
            assert circuit.scores[f"L{row['layer']}H{head}"] == -row["effect"]


@pytest.mark.parametrize("options", [{"by": "layer"}, {"site": "mlp_out"}])
def test_effects_of_whole_layers_are_no_heads(lab, options):
    effects = hl.causal.ablate_each(lab("llama"), CLEAN, METRIC, **options)
    with pytest.raises(PlanError, match="effects of whole layers, which are no heads"):
        Circuit.of_heads(lab("llama"), effects)


def test_runs_take_heads_by_any_name(lab):
    model = lab("llama")
    runs = HeadRuns(model, CLEAN, CORRUPTED, METRIC)
    layer = [hl.Head(0, head) for head in range(6)]
    circuit = Circuit.of_heads(model, {"0.*": 1.0})
    several = ["0.*", ["0.*"], [(0, head) for head in range(6)], circuit, set(layer), iter(layer)]
    values = runs.run([layer, *several, (), "1.2", (1, 2), ["L1H2"]])
    assert np.array_equal(values[:7], np.tile(values[0], (7, 1)))
    assert np.array_equal(values[8:], np.tile(values[8], (3, 1)))
    assert np.array_equal(values[7], runs.corrupted)
    assert np.abs(values[[0, 8]] - runs.corrupted).min() > 1e-6  # they do measure other things


@pytest.mark.parametrize(
    "kept", [[[(9, 9)]], ["L0H9"], ["first"], [""], [5], [None], [[("L0", "H1")]]]
)
def test_runs_refuse_heads_that_do_not_exist(lab, kept):
    with pytest.raises(HeadError):
        HeadRuns(lab("llama"), CLEAN, CORRUPTED, METRIC).run(kept)


def test_runs_refuse_what_is_no_list_of_circuits(lab):
    runs = HeadRuns(lab("llama"), CLEAN, CORRUPTED, METRIC)
    for kept in ("0.*", None, Circuit.of_heads(lab("llama"), {"0.*": 1.0})):
        with pytest.raises(PlanError, match="must be a list of circuits"):
            runs.run(kept)
    edges = Circuit.of_edges(lab("llama"), {("mlp0", "logits"): 1.0})
    with pytest.raises(PlanError, match="this circuit is one of edges"):
        runs.run([edges])
    with pytest.raises(PlanError, match="circuit=None must be a Circuit"):
        faithfulness(runs, None)
    for sizes in (None, "ab", 5):
        with pytest.raises(PlanError, match="must be a list of shares"):
            faithfulness_curve(runs, Circuit.of_heads(lab("llama"), {"*.*": 1.0}), sizes=sizes)
    with pytest.raises(PlanError, match="a share of sizes='a' must be a finite number"):
        faithfulness_curve(runs, Circuit.of_heads(lab("llama"), {"*.*": 1.0}), sizes=["a", "b"])


def test_draws_that_tell_nothing_apart_are_left_out_of_the_interval():
    """Prompt 0 measures the same whole and empty: a quarter of the draws of two prompts are 0/0."""
    runs = MadeUp()
    keep_all = runs.run

    def run(kept):
        values = keep_all(kept)
        values[:, 0] = 0.1
        return values

    runs.run, runs.clean, runs.corrupted = run, np.array([0.1, 6.0]), np.array([0.1, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = faithfulness(runs, ranked())
        curve = faithfulness_curve(runs, ranked(), sizes=(0.5, 1.0))
    # Whatever else is drawn, the second prompt alone decides: its 5 of 5 is f of all draws that have one.
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx((1, 1, 1))
    assert np.isfinite(curve.frame[["ci_low", "ci_high"]].to_numpy()).all()
    assert np.isfinite([*curve.cpr, *curve.cmd]).all()


def test_patched_runs_need_pairs(lab):
    with pytest.raises(PromptError, match="7 tokens and its corrupted one 6"):
        HeadRuns(lab("llama"), CLEAN, CORRUPTED[:, :6], METRIC)
    with pytest.raises(PlanError, match="needs corrupted= prompts"):
        HeadRuns(lab("llama"), CLEAN, None, METRIC)
    with pytest.raises(PlanError, match="needs reference= prompts"):
        HeadRuns(lab("llama"), CLEAN, None, METRIC, kind="mean")
    with pytest.raises(PlanError, match="no removal 'mute'"):
        HeadRuns(lab("llama"), CLEAN, None, METRIC, kind="mute")
