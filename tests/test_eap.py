"""Edge attribution patching: slopes by finite differences, sums that must come out, planted edges, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact, token_pairs
from tiny_models import build, tiny_tokenizer
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import headlab as hl
from headlab import planted
from headlab.causal import metrics
from headlab.causal.attribution.eap import eap, eap_ig
from headlab.errors import PlanError, PromptError, UnsupportedError

METRIC = metrics.logit_difference(5, 7)
STEP = 1e-4


def metric_of(logits: Tensor) -> Tensor:
    """METRIC by hand."""
    return logits[:, -1, 5] - logits[:, -1, 7]


def table(edges: Any) -> dict[tuple[str, str, str], float]:
    frame = edges.frame
    return {(r.source, r.target, r.input): r.score for r in frame.itertuples()}


# -- one edge at a time, by hand ---------------------------------------------------------------------------------------


@dataclass
class Hand:
    """The second layer of a model written out, and what its first layer adds to the stream.

    Attributes:
        stream: What layer 1 reads, and what its MLP reads.
        project: (which of q, k and v, stream) → q, k or v as attention gets it, one per query head.
        mlp: The MLP of layer 1, its norm included.
        sources: What each source adds.
    """

    stream: Tensor
    mid: Tensor
    project: Callable[[str, Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    sources: dict[str, Tensor]


def run_hand(module: Any, ids: Tensor, output: Any, mlp: Any, norm: Any) -> dict[str, Tensor]:
    """Inputs of the output projections, outputs of the MLPs, input of the second layer's MLP norm, and the stream."""
    seen: dict[str, Tensor] = {}
    hooks = [norm(1).register_forward_pre_hook(lambda m, a: seen.update(mid=a[0]))]
    for at in range(2):
        hooks += [
            output(at).register_forward_pre_hook(lambda m, a, at=at: seen.update({f"z{at}": a[0]})),
            mlp(at).register_forward_hook(lambda m, a, o, at=at: seen.update({f"mlp{at}": o})),
        ]
    with torch.no_grad():
        states = module(ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    return seen | {"embed": states[0], "stream": states[1]}


def by_head(z: Tensor, matrix: Tensor, n: int, layer: int) -> dict[str, Tensor]:
    """What each head adds to the stream."""
    parts = zip(z.chunk(n, -1), matrix.chunk(n, 0), strict=True)
    return {f"L{layer}H{at}": own @ rows for at, (own, rows) in enumerate(parts)}


def llama_hand(ids: Tensor) -> Hand:
    module = exact("llama")
    layers = module.model.layers
    seen = run_hand(
        module,
        ids,
        lambda at: layers[at].self_attn.o_proj,
        lambda at: layers[at].mlp,
        lambda at: layers[at].post_attention_layernorm,
    )
    attention = layers[1].self_attn
    cos, sin = module.model.rotary_emb(seen["stream"], torch.arange(ids.shape[1])[None])

    def project(which: str, x: Tensor) -> Tensor:
        linear = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}[which]
        heads = linear(layers[1].input_layernorm(x)).unflatten(-1, (-1, 10)).transpose(1, 2)
        if which != "v":
            heads, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
        return heads.repeat_interleave(6 // heads.shape[1], 1).transpose(1, 2)

    sources = {"embed": seen["embed"], "mlp0": seen["mlp0"], "mlp1": seen["mlp1"]}
    for at in range(2):
        sources |= by_head(seen[f"z{at}"], layers[at].self_attn.o_proj.weight.T, 6, at)
    mlp = layers[1].mlp
    return Hand(
        seen["stream"],
        seen["mid"],
        project,
        lambda x: mlp(layers[1].post_attention_layernorm(x)),
        sources,
    )


def gpt2_hand(ids: Tensor) -> Hand:
    module = exact("gpt2")
    layers = module.transformer.h
    seen = run_hand(
        module,
        ids,
        lambda at: layers[at].attn.c_proj,
        lambda at: layers[at].mlp,
        lambda at: layers[at].ln_2,
    )

    def project(which: str, x: Tensor) -> Tensor:
        parts = layers[1].attn.c_attn(layers[1].ln_1(x)).chunk(3, -1)
        return parts["qkv".index(which)].unflatten(-1, (3, 12))

    sources = {"embed": seen["embed"], "mlp0": seen["mlp0"], "mlp1": seen["mlp1"]}
    for at in range(2):
        sources |= by_head(seen[f"z{at}"], layers[at].attn.c_proj.weight, 3, at)
    mlp = layers[1].mlp
    return Hand(seen["stream"], seen["mid"], project, lambda x: mlp(layers[1].ln_2(x)), sources)


HANDS = {"llama": llama_hand, "gpt2": gpt2_hand}
EDGES = [
    ("embed", "L1H2", "q"),
    ("L0H1", "L1H0", "q"),
    ("L0H2", "L1H1", "k"),
    ("mlp0", "L1H2", "k"),
    ("L0H0", "L1H2", "v"),
    ("embed", "mlp1", ""),
    ("L1H1", "mlp1", ""),
    ("mlp1", "logits", ""),
    ("L0H2", "logits", ""),
]


@torch.no_grad()
def slope(model: hl.Model, clean: Tensor, hands: tuple[Hand, Hand], edge: tuple[str, ...]) -> float:
    """Slope of the metric, per prompt and averaged, as one edge alone begins to carry its corrupted value."""
    source, target, which = edge
    ours, theirs = hands
    change = theirs.sources[source] - ours.sources[source]

    def moved(step: float) -> Tensor:
        if target == "logits":
            edit = hl.add("1.*", step * change[:, :, None], "resid_post")
        elif target == "mlp1":
            value = ours.mlp(ours.mid + step * change)[:, :, None]
            edit = hl.apply("1.*", lambda x, where: value, "mlp_out")
        else:
            head = int(target.split("H")[1])
            value = ours.project(which, ours.stream + step * change)[:, :, head : head + 1]
            edit = hl.apply(target, lambda x, where: value, which)
        with model.edit(edit):
            return metric_of(model.logits(clean))

    return float((moved(STEP) - moved(-STEP)).mean() / (2 * STEP))


@cache
def hand_setting(family: str) -> tuple[Any, ...]:
    clean, corrupted = token_pairs(3, 8, changed=(4, 7))
    model = hl.load(exact(family))
    hands = HANDS[family](clean), HANDS[family](corrupted)
    return model, clean, hands, table(eap(model, clean, corrupted, METRIC))


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: "-".join(edge))
@pytest.mark.parametrize("family", HANDS)
def test_score_is_the_slope_as_one_edge_begins_to_carry_the_corrupted_value(
    family: str, edge: tuple[str, str, str]
) -> None:
    model, clean, hands, scores = hand_setting(family)
    expected = slope(model, clean, hands, edge)
    assert abs(expected) > 1e-5
    assert scores[edge] == pytest.approx(expected, rel=1e-5, abs=1e-9)


# -- sums that must come out -------------------------------------------------------------------------------------------

SUPPORTED = ["llama", "gpt2", "gpt_neox", "gptj", "qwen3", "gpt_oss", "granite", "cohere2"]
SUPPORTED += ["deepseek_v3", "llama4_text"]


@pytest.mark.parametrize("family", SUPPORTED)
def test_edges_from_the_embedding_sum_to_its_whole_slope(family: str) -> None:
    clean, corrupted = token_pairs(2, 9)
    module = build(family)
    embed = module.get_input_embeddings()
    with torch.no_grad():
        start = embed(clean)
        change = embed(corrupted) - start
    inputs = start.requires_grad_()
    total = metric_of(module(inputs_embeds=inputs).logits).sum()
    (gradient,) = torch.autograd.grad(total, inputs)
    expected = float((gradient * change).sum()) / 2
    edges = eap(hl.load(module), clean, corrupted, METRIC)
    found = edges.frame.loc[edges.frame["source"] == "embed", "score"].sum()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_edges_from_the_embedding_sum_to_the_change_of_the_metric(family: str) -> None:
    clean, corrupted = token_pairs(2, 7)
    model = hl.load(exact(family))
    change = float(
        (metric_of(model.logits(corrupted)) - metric_of(model.logits(clean))).mean().detach()
    )

    def error(steps: int, points: str) -> float:
        frame = eap_ig(model, clean, corrupted, METRIC, steps=steps, points=points).frame  # type: ignore[arg-type]
        return abs(float(frame.loc[frame["source"] == "embed", "score"].sum()) - change)

    assert abs(change) > 0.1
    coarse, fine = error(16, "midpoint"), error(32, "midpoint")
    assert fine < 2e-3 * abs(change)
    assert fine < coarse / 2.5  # midpoints: as 1/m²
    assert error(64, "left") == pytest.approx(error(32, "left") / 2, rel=0.2)  # the ends: as 1/m


@pytest.mark.parametrize("layer", [0, 1])
def test_activation_paths_sum_to_patching_what_moves(layer: int) -> None:
    clean, corrupted = token_pairs(2, 7)
    model = hl.load(exact("llama"))
    source = model.trace(corrupted, hl.keep.tensors("z"))
    with model.edit(hl.patch(f"{layer}.*", source=source)):
        patched = metric_of(model.logits(clean).detach())
    change = float((patched - metric_of(model.logits(clean).detach())).mean())
    frame = eap_ig(model, clean, corrupted, METRIC, kind="activations", steps=40).frame
    leaving = frame["source"].str.startswith(f"L{layer}H")
    assert abs(change) > 0.02
    assert frame.loc[leaving, "score"].sum() == pytest.approx(change, rel=1e-2)


def test_the_ends_of_a_path_are_the_slopes_in_the_two_runs() -> None:
    clean, corrupted = token_pairs(2, 7)
    model = hl.load(exact("gpt2"))
    at_clean = table(eap(model, clean, corrupted, METRIC))
    backward = table(eap(model, corrupted, clean, METRIC))  # the same slope times the other change
    left = table(eap_ig(model, clean, corrupted, METRIC, steps=1, points="left"))
    right = table(eap_ig(model, clean, corrupted, METRIC, steps=1, points="right"))
    both = table(eap_ig(model, clean, corrupted, METRIC, kind="clean_corrupted"))
    for edge, score in at_clean.items():
        assert right[edge] == pytest.approx(score, abs=1e-9)
        assert left[edge] == pytest.approx(-backward[edge], abs=1e-9)
        assert both[edge] == pytest.approx((score - backward[edge]) / 2, abs=1e-9)
    assert max(abs(score + backward[edge]) for edge, score in at_clean.items()) > 0.01


# -- planted edges -----------------------------------------------------------------------------------------------------


@cache
def planted_induction(family: str) -> tuple[hl.Model, Tensor, Tensor, metrics.Metric]:
    """Prompts … A B … A whose next token is B, and the same with another first A."""
    made = planted.model(
        family,  # type: ignore[arg-type]
        {"L1H0": "previous_token", "L2H1": "induction"},
        distractors=6,
    )
    special = set(made.tokenizer.all_special_ids)
    words = torch.tensor([at for at in range(len(made.tokenizer)) if at not in special])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack(
        [words[torch.randperm(len(words), generator=generator)[:13]] for _ in range(6)]
    )
    begin = torch.full((6, 1), made.tokenizer.bos_token_id)
    clean = torch.cat([begin, drawn[:, :12], drawn[:, 4:5]], 1)
    corrupted = clean.clone()
    corrupted[:, 5] = drawn[:, 12]
    metric = metrics.logit_difference(drawn[:, 5].tolist(), drawn[:, 8].tolist())
    return hl.load(made.module, tokenizer=made.tokenizer), clean, corrupted, metric


@pytest.mark.parametrize("kind", ["inputs", "activations"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_the_planted_edge_between_heads_stands_out(family: str, kind: Any) -> None:
    model, clean, corrupted, metric = planted_induction(family)
    edges = eap_ig(model, clean, corrupted, metric, kind=kind, steps=8)
    first, second = edges.between_heads().frame.head(2).itertuples()
    assert (first.source, first.target, first.input) == ("L1H0", "L2H1", "k")
    change = edges.about["corrupted"] - edges.about["clean"]
    assert first.score == pytest.approx(change, rel=0.05)  # all of it passes through this edge
    assert abs(second.score) < 0.01 * abs(first.score)
    path = {("embed", "L1H0", "v"), ("L1H0", "L2H1", "k"), ("L2H1", "logits", "")}
    assert set(edges.top(3).edges) == path
    assert set(edges.top(3).nodes()) == {"embed", "L1H0", "L2H1", "logits"}


def test_a_saturated_edge_is_hidden_from_eap_and_not_from_eap_ig() -> None:
    model, clean, corrupted, metric = planted_induction("llama")
    edge = ("L1H0", "L2H1", "k")
    at_clean = table(eap(model, clean, corrupted, metric))[edge]
    along = table(eap_ig(model, clean, corrupted, metric, steps=8))[edge]
    assert abs(at_clean) < 0.05 * abs(along)


# -- how it is run -----------------------------------------------------------------------------------------------------


def test_batches_and_lengths_change_nothing() -> None:
    model = hl.load(exact("llama"))
    clean, corrupted = token_pairs(3, 9)
    clean[2, 7:] = corrupted[2, 7:] = -1
    whole = table(eap_ig(model, clean, corrupted, METRIC, steps=2))
    parts = table(eap_ig(model, clean, corrupted, METRIC, steps=2, tokens_at_once=1))
    singles = [
        table(eap_ig(model, clean[at : at + 1, :n], corrupted[at : at + 1, :n], METRIC, steps=2))
        for at, n in enumerate((9, 9, 7))
    ]
    for edge, score in whole.items():
        assert parts[edge] == pytest.approx(score, abs=1e-9)
        assert np.mean([one[edge] for one in singles]) == pytest.approx(score, abs=1e-9)


def test_every_edge_is_there_once() -> None:
    clean, corrupted = token_pairs(1, 6)
    sequential = eap(hl.load(build("gpt2")), clean, corrupted, METRIC)
    parallel = eap(hl.load(build("gpt_neox")), clean, corrupted, METRIC)
    assert len(set(sequential.edges)) == len(sequential) == 9 + 4 + 5 * 9 + 8 + 9
    assert len(set(parallel.edges)) == len(parallel) == 9 + 1 + 5 * 9 + 5 + 9
    assert ("L1H0", "mlp1", "") in sequential.edges
    assert ("L1H0", "mlp1", "") not in parallel.edges


def test_edits_in_force_count_and_the_model_comes_back_as_it_was() -> None:
    module = build("gpt2")
    module.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    model = hl.load(module)
    clean, corrupted = token_pairs(2, 7)
    with model.edit(hl.ablate("L0H1")):
        frame = eap(model, clean, corrupted, METRIC).frame
    assert (frame.loc[frame["source"] == "L0H1", "score"] == 0).all()
    assert (frame.loc[frame["source"] == "L0H2", "score"] != 0).any()
    with pytest.raises(PlanError, match="prompt 0"):
        eap(model, clean, corrupted, lambda logits, rows: logits[:, 0] * torch.nan)
    assert {n: p.requires_grad for n, p in module.named_parameters()} == before
    assert not model.edited
    assert all(parameter.grad is None for parameter in module.parameters())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "glm4", "bert", "bart"])
def test_families_without_edges_from_single_heads_are_refused(family: str) -> None:
    clean, corrupted = token_pairs(1, 6)
    with pytest.raises(UnsupportedError, match="nodes"):
        eap(hl.load(build(family)), clean, corrupted, METRIC)


def test_a_model_of_which_more_writes_to_the_stream_is_refused() -> None:
    module = build("llama")
    module.model.layers[0].register_forward_hook(
        lambda part, args, output: output * 1.1 if isinstance(output, Tensor) else output
    )
    clean, corrupted = token_pairs(1, 6)
    with pytest.raises(UnsupportedError, match="more than attention and MLP of layer 0 writes"):
        eap(hl.load(module), clean, corrupted, METRIC)


def test_bad_input_is_explained() -> None:
    model = hl.load(build("gpt2"), tokenizer=tiny_tokenizer())
    clean, corrupted = token_pairs(1, 6)
    with pytest.raises(PromptError, match=r"6 tokens and its corrupted one 5"):
        eap(model, clean, corrupted[:, :5], METRIC)
    with pytest.raises(PlanError, match="no gradient"):
        eap(model, clean, corrupted, metrics.recall(5))
    with pytest.raises(PlanError, match="steps=0"):
        eap_ig(model, clean, corrupted, METRIC, steps=0)
    with pytest.raises(PlanError, match="points='middle'"):
        eap_ig(model, clean, corrupted, METRIC, points="middle")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="kind='weights'"):
        eap_ig(model, clean, corrupted, METRIC, kind="weights")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="n=0 must be"):
        eap(model, clean, corrupted, METRIC).top(0)
