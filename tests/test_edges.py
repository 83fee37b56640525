"""Edge-level runs equal a forward pass written by hand, and ordinary patches where those say the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, build
from torch import Tensor

import headlab as hl
from headlab.causal import metrics
from headlab.causal.graph import Edge
from headlab.causal.paths.edges import EdgeRuns
from headlab.causal.paths.path_patching import path_patch
from headlab.errors import PlanError, PromptError, UnsupportedError

#: Experts have no float64 kernels; several families norm in float32 whatever their type.
SINGLE = ("gpt_oss", "qwen3_moe", "llama4_text", "deepseek_v3")
FAMILIES = [
    "llama", "gpt2", "gpt_neox", "gptj", "opt", "qwen3", "mistral", "granite", "cohere2", "phi", *SINGLE
]  # fmt: skip


def make(family: str, **changes: Any) -> hl.Model:
    module = build(family, **changes)
    return hl.load(module if family in SINGLE else module.double())


def prompts(n: int = 3, length: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(4, VOCAB_SIZE, (2, n, length), generator=generator)
    both[1, :, :2] = both[0, :, :2]
    return both[0], both[1]


def metric(n: int = 3) -> metrics.Metric:
    return metrics.logit_difference(list(range(5, 5 + n)), list(range(50, 50 + n)))


def measured(model: hl.Model, ids: Tensor, *edits: Any) -> np.ndarray:
    with model.edit(*edits):
        logits = model.trace(ids, logits="last").logits
    return metric(len(ids)).bind(model, ids)(logits, torch.arange(len(ids))).double().numpy()


# -- by hand -----------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One causal head in float64."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


class ByHand:
    """A tiny transformer written out: what each node gives, reading each source by itself."""

    n_layers, n_heads = 2, 0

    def run(
        self, ids: Tensor, cut: Iterable[Edge] = (), other: dict[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """What nodes write, and the logits, when edges of ``cut`` carry what sources wrote in another run."""
        cut, wrote, constant = set(cut), {"embed": self.embed(ids)}, torch.zeros(())

        def read(target: str, letter: str = "") -> Tensor:
            return constant + sum(
                other[u] if Edge(u, target, letter) in cut else now  # type: ignore[index]
                for u, now in wrote.items()
            )

        for layer in range(self.n_layers):
            new = {}
            for head in range(self.n_heads):
                name = f"L{layer}H{head}"
                new[name] = self.head(layer, head, *(read(name, letter) for letter in "qkv"))
            wrote |= new
            constant = constant + self.bias(layer)
            wrote[f"mlp{layer}"] = self.mlp(layer, read(f"mlp{layer}"))
        return wrote, self.logits(read("logits"))


class Llama(ByHand):
    """RMSNorm, RoPE, grouped keys and values, SwiGLU."""

    def __init__(self, module: Any) -> None:
        self.w = {name: value.double() for name, value in module.state_dict().items()}
        self.eps, self.n_heads = module.config.rms_norm_eps, module.config.num_attention_heads
        self.group = self.n_heads // module.config.num_key_value_heads
        self.width = module.config.head_dim

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.w[name]

    def rotated(self, x: Tensor) -> Tensor:
        half = self.width // 2
        speed = 10000.0 ** (-torch.arange(half).double() / half)
        angle = torch.arange(x.shape[1]).double()[:, None] * speed
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.w["model.embed_tokens.weight"][ids]

    def bias(self, layer: int) -> Tensor:
        return torch.zeros(())

    def head(self, layer: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at, kv = f"model.layers.{layer}.", head // self.group

        def part(letter: str, x: Tensor, which: int) -> Tensor:
            weight = self.w[f"{at}self_attn.{letter}_proj.weight"].unflatten(0, (-1, self.width))
            return self.norm(x, f"{at}input_layernorm.weight") @ weight[which].T

        z = attention(
            self.rotated(part("q", q, head)), self.rotated(part("k", k, kv)), part("v", v, kv)
        )
        return z @ self.w[f"{at}self_attn.o_proj.weight"].T.unflatten(0, (-1, self.width))[head]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        at = f"model.layers.{layer}."
        x = self.norm(x, f"{at}post_attention_layernorm.weight")
        gate, up, down = (self.w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, "model.norm.weight") @ self.w["lm_head.weight"].T


class GPT2(ByHand):
    """LayerNorm, learned positions, fused projections with biases."""

    def __init__(self, module: Any) -> None:
        self.w = {name: value.double() for name, value in module.state_dict().items()}
        self.eps, self.n_heads = module.config.layer_norm_epsilon, module.config.n_head
        self.width = module.config.n_embd // self.n_heads

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return centred / scale * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def embed(self, ids: Tensor) -> Tensor:
        positions = self.w["transformer.wpe.weight"][: ids.shape[1]]
        return self.w["transformer.wte.weight"][ids] + positions

    def bias(self, layer: int) -> Tensor:
        return self.w[f"transformer.h.{layer}.attn.c_proj.bias"]

    def head(self, layer: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = f"transformer.h.{layer}."
        weight = self.w[f"{at}attn.c_attn.weight"].unflatten(1, (3, self.n_heads, self.width))
        bias = self.w[f"{at}attn.c_attn.bias"].unflatten(0, (3, self.n_heads, self.width))
        read = (
            self.norm(x, f"{at}ln_1") @ weight[:, which, head] + bias[which, head]
            for which, x in enumerate((q, k, v))
        )
        output = self.w[f"{at}attn.c_proj.weight"].unflatten(0, (self.n_heads, self.width))
        return attention(*read) @ output[head]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        at, w = f"transformer.h.{layer}.", self.w
        x = self.norm(x, f"{at}ln_2") @ w[f"{at}mlp.c_fc.weight"] + w[f"{at}mlp.c_fc.bias"]
        x = torch.nn.functional.gelu(x, approximate="tanh")
        return x @ w[f"{at}mlp.c_proj.weight"] + w[f"{at}mlp.c_proj.bias"]

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, "transformer.ln_f") @ self.w["lm_head.weight"].T


@pytest.mark.parametrize(("family", "written"), [("llama", Llama), ("gpt2", GPT2)])
def test_edges_cut_one_by_one_and_together_equal_a_forward_pass_by_hand(
    family: str, written: type[ByHand]
):
    model = make(family)
    hand = written(model.module)  # type: ignore[call-arg]
    clean, corrupted = prompts()
    other, _ = hand.run(corrupted)
    runs = EdgeRuns(model, clean, corrupted, metric())
    generator = np.random.default_rng(0)
    cuts = [[edge] for edge in runs.edges[:: 1 if family == "gpt2" else 3]]
    cuts += [[edge for edge in runs.edges if generator.random() < 0.4] for _ in range(6)]
    found = runs.corrupting(cuts)
    bound = metric().bind(model, clean)
    for cut, values in zip(cuts, found, strict=True):
        _, logits = hand.run(clean, cut, other)
        exact = bound(logits[:, -1:], torch.arange(3)).numpy()
        np.testing.assert_allclose(values, exact, atol=2e-6, err_msg=str(cut[:2]))
    assert np.abs(found[:-6] - runs.clean).max() > 0.1
    _, logits = hand.run(clean)
    np.testing.assert_allclose(runs.clean, bound(logits[:, -1:], torch.arange(3)), atol=2e-6)


# -- by edits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_all_edges_of_a_source_or_of_an_input_equal_ordinary_patches(family: str):
    model = make(family)
    clean, corrupted = prompts()
    runs = EdgeRuns(model, clean, corrupted, metric())
    every = runs.edges
    source = model.trace(corrupted, keep=hl.keep.tensors("z", "q", "k", "v", "mlp_out"))
    cases = [(["L0H1"], [hl.patch("L0H1", "z", source=source)])]
    cases += [(["mlp0"], [hl.patch("0.*", "mlp_out", source=source)])]
    last = [hl.patch("1.0", "z", source=source), hl.patch("1.*", "mlp_out", source=source)]
    cases += [(["L1H0", "mlp1"], last)]
    sets = [[edge for edge in every if edge.source in names] for names, _ in cases]
    edits = [edit for _, edit in cases]
    for letter in "qkv":
        sets.append([edge for edge in every if (edge.target, edge.input) == ("L1H2", letter)])
        edits.append([hl.patch("L1H2", letter, source=source)])
    sets.append([edge for edge in every if edge.target == "mlp1"])
    edits.append([hl.patch("1.*", "mlp_out", source=source)])
    tolerance = 2e-5 if family in SINGLE else 1e-6
    for cut, values, edit in zip(sets, runs.corrupting(sets), edits, strict=True):
        exact = measured(model, clean, *edit)
        np.testing.assert_allclose(values, exact, atol=tolerance, err_msg=str(cut[0]))
        assert np.abs(exact - runs.clean).max() > 10 * tolerance
    whole = runs.run([[], every])
    np.testing.assert_allclose(whole[0], measured(model, corrupted), atol=tolerance)
    np.testing.assert_allclose(whole[1], measured(model, clean), atol=tolerance)
    np.testing.assert_allclose(runs.corrupting([every, []]), whole, atol=1e-12)
    assert np.abs(whole[0] - whole[1]).max() > 0.01


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gpt_oss"])
def test_cutting_one_edge_is_the_direct_path_with_mlps_frozen(family: str):
    model = make(family)
    clean, corrupted = prompts()
    runs = EdgeRuns(model, clean, corrupted, metric())
    tolerance = 2e-5 if family in SINGLE else 1e-6
    for source, target, letter, receiver in (
        ("L0H0", "logits", "", "logits"),
        ("L1H2", "logits", "", "logits"),
        ("L0H2", "L1H1", "q", "L1H1:q"),
        ("L0H1", "L1H0", "k", "L1H0:k"),
        ("L0H0", "L1H2", "v", "L1H2:v"),
        ("L0H2", "mlp1", "", "mlp1"),
    ):
        cut = runs.corrupting([[Edge(source, target, letter)]])[0]
        path = path_patch(model, clean, corrupted, metric(), source, receiver, freeze_mlps=True)
        np.testing.assert_allclose(path.values[0], cut, atol=tolerance)
        assert np.abs(cut - runs.clean).max() > 10 * tolerance


def test_batches_and_lengths_do_not_matter():
    model = make("llama")
    one, other = prompts(2, 8), prompts(2, 11, seed=1)
    clean = [*one[0].tolist(), *other[0].tolist()]
    corrupted = [*one[1].tolist(), *other[1].tolist()]
    whole = EdgeRuns(model, clean, corrupted, metric(4))
    small = EdgeRuns(model, clean, corrupted, metric(4), tokens_at_once=9)
    generator = np.random.default_rng(1)
    sets = [[edge for edge in whole.edges if generator.random() < 0.7] for _ in range(5)]
    lines: list[str] = []
    small._tell = lines.append
    np.testing.assert_allclose(small.run(sets), whole.run(sets), atol=1e-6)
    assert lines[-1] == "5 of 5 circuits on 1 prompts"
    for prompt in range(4):
        alone = EdgeRuns(
            model,
            [clean[prompt]],
            [corrupted[prompt]],
            metrics.logit_difference(5 + prompt, 50 + prompt),
        )
        np.testing.assert_allclose(alone.run(sets)[:, 0], whole.run(sets)[:, prompt], atol=1e-6)


@pytest.mark.parametrize("given", [metrics.loss(), metrics.kl("all"), metrics.kl()])
def test_metrics_of_every_position_and_with_a_reference(given: metrics.Metric):
    model = make("gpt2")
    clean, corrupted = prompts()
    runs = EdgeRuns(model, clean, corrupted, given)
    source = model.trace(corrupted, keep=hl.keep.tensors("z"))
    with model.edit(hl.patch("L0H1", "z", source=source)):
        edited = model.logits(clean)
    cut = slice(-1, None) if given.needs == "last" else slice(None)
    bound = given.bind(model, clean).with_reference(model.logits(clean)[:, cut])
    exact = bound(edited[:, cut], torch.arange(3)).numpy()
    found = runs.corrupting([[edge for edge in runs.edges if edge.source == "L0H1"]])[0]
    np.testing.assert_allclose(found, exact, atol=1e-6)
    assert np.abs(exact - runs.clean).max() > 1e-4


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "glm4"])
def test_families_that_norm_the_sum_of_heads_have_no_edges(
    family: str, lab: Callable[..., hl.Model]
):
    with pytest.raises(UnsupportedError, match="norms the sum of a layer's heads"):
        EdgeRuns(lab(family), *prompts(), metric())


def test_mistakes_are_told_in_a_sentence(lab: Callable[..., hl.Model]):
    clean, corrupted = prompts()
    with pytest.raises(UnsupportedError, match="no decoder-only model"):
        EdgeRuns(lab("t5"), clean, corrupted, metric())
    with pytest.raises(PromptError, match="10 tokens and its corrupted one 9"):
        EdgeRuns(lab("llama"), clean, corrupted[:, :9], metric())
    runs = EdgeRuns(lab("llama"), clean, corrupted, metric())
    for edge, said in (
        (("L1H0", "L0H0", "q"), "L1H0 does not come before L0H0"),
        (("L0H0", "L0H1", "q"), "does not come before"),
        (("L0H9", "logits"), "nothing named 'L0H9' writes"),
        (("L0H0", "L1H0"), "no input '' of 'L1H0'"),
        (("L0H0", "mlp1", "q"), "no input 'q' of 'mlp1'"),
        ("L0H0", "'L0H0' is no edge"),
    ):
        with pytest.raises(PlanError, match=said):
            runs.run([[edge]])  # type: ignore[list-item]
    with pytest.raises(PlanError, match="no circuit was given"):
        runs.run([])
    with pytest.raises(PlanError, match="masks must be bool"):
        runs.run_masks(runs.graph.full)
    with pytest.raises(PlanError, match="tokens_at_once=0"):
        EdgeRuns(lab("llama"), clean, corrupted, metric(), tokens_at_once=0)


def test_edges_of_sequential_and_parallel_blocks(lab: Callable[..., hl.Model]):
    clean, corrupted = prompts()
    for family, there in (("llama", True), ("gpt_neox", False)):
        runs = EdgeRuns(lab(family), clean, corrupted, metric())
        n = lab(family).spec.n_heads
        assert (Edge("L1H0", "mlp1") in runs.edges) == there
        assert Edge("L1H0", "logits") in runs.edges
        # Counted by hand for two layers of n heads: embed, n heads and an MLP write before the second layer.
        into_heads = 3 * n * 1 + 3 * n * (n + 2)
        into_mlps = (1 + n) + (2 * n + 2) if there else 1 + (n + 2)
        assert len(runs.edges) == into_heads + into_mlps + (2 * n + 3)
    assert str(Edge("L0H1", "L1H2", "k")) == "L0H1 → L1H2.k"
