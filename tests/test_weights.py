"""Per-head weights against what every architecture computes.

A recording attention function is registered with transformers. What it receives as q, k and v, and
what the attention module received as hidden states, must be related by the matrices HeadWeights
reads off the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny_models import BERT_LIKE, FAMILIES, LLAMA_LIKE, MASKED, build, inputs, randomise
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)
from transformers.masking_utils import eager_mask

from headlab.attention.probe import measure
from headlab.errors import HeadError, UnsupportedError
from headlab.models import HeadWeights

RECORDER = "headlab_test_recorder"
LATENT = ("deepseek_v3",)
POST_NORM = ("bart", *MASKED)
LEARNED_POSITIONS = ("gpt2", "opt", "gpt_bigcode")


@dataclass
class Call:
    """One pass through the seam: what arrived, what left, and the module's input and output."""

    module: nn.Module
    q: Tensor  # [b, n_heads, n_query, d_head]
    k: Tensor  # [b, n_kv_heads, n_key, d_head]
    v: Tensor  # [b, n_kv_heads, n_key, d_value]
    z: Tensor  # [b, n_query, n_heads, d_value]
    hidden: Tensor  # [b, n_query, d_model]
    source: Tensor  # [b, n_key, d_model]: what keys and values are made of


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Plain attention; masks, sinks and caps do not matter here, any mixture of values will do."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * (query.shape[-1] ** -0.5)
    z = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
    return z.transpose(1, 2).contiguous(), None


@contextmanager
def recording(model: nn.Module, modules: tuple[nn.Module, ...]) -> Iterator[list[Call]]:
    calls: list[Call] = []
    entered: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        source = next(
            (
                kwargs[name]
                for name in ("key_value_states", "encoder_hidden_states")
                if kwargs.get(name) is not None
            ),
            hidden,
        )
        entered[module] = hidden, source

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        z, _ = attend(module, query, key, value, mask, **options)
        calls.append(Call(module, query, key, value, z, *entered[module]))
        return z, None

    AttentionInterface.register(RECORDER, record)
    AttentionMaskInterface.register(RECORDER, eager_mask)
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in modules]
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDER)
    try:
        yield calls
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


@dataclass
class Traced:
    model: Any
    weights: HeadWeights
    calls: list[Call]


def traced(model: Any, family: str) -> Traced:
    spec, modules = measure(model, family)
    with recording(model, modules) as calls, torch.no_grad():
        model(**inputs(family), use_cache=False)
    assert [call.module for call in calls] == list(modules)
    return Traced(model, HeadWeights(model, modules, spec), calls)


@pytest.fixture(scope="module")
def trace_of() -> Callable[[str], Traced]:
    cache: dict[str, Traced] = {}

    def trace(family: str) -> Traced:
        if family not in cache:
            cache[family] = traced(FAMILIES[family](), family)
        return cache[family]

    return trace


def project(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b for every head: [b, n, d_model], [h, d_model, d] → [b, h, n, d]."""
    out = torch.einsum("bnm,hmd->bhnd", x, matrix)
    return out if bias is None else out + bias[None, :, None]


def normed(norm: nn.Module | None, heads: Tensor) -> Tensor:
    """Apply a QK-norm to [b, h, n, d]: over d, over all heads at once, or head by head."""
    if norm is None:
        return heads
    if hasattr(norm, "norms"):  # stablelm: one norm per head
        return norm(heads)
    rows = heads.transpose(1, 2)  # [b, n, h, d]
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.dim() == 1 and weight.numel() > heads.shape[-1]:
        return norm(rows.flatten(2)).unflatten(2, rows.shape[2:]).transpose(1, 2)
    return norm(rows).transpose(1, 2)


def check_layer(weights: HeadWeights, layer: int, call: Call) -> None:
    """Queries and keys at position 0, where rotation is the identity; values everywhere."""
    query_norm, key_norm = weights.qk_norm(layer)
    q = normed(query_norm, project(call.hidden, weights.W_Q(layer), weights.b_Q(layer)))
    k = normed(key_norm, project(call.source, weights.W_K(layer), weights.b_K(layer)))
    v = project(call.source, weights.W_V(layer), weights.b_V(layer))
    torch.testing.assert_close(q[:, :, 0], call.q[:, :, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k[:, :, 0], call.k[:, :, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v, call.v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in LATENT])
def test_query_key_and_value_matrices_reproduce_what_reaches_the_seam(
    family: str, trace_of: Callable[[str], Traced]
) -> None:
    found = trace_of(family)
    for layer, call in enumerate(found.calls):
        check_layer(found.weights, layer, call)


@pytest.mark.parametrize("family", FAMILIES)
def test_sum_of_head_results_is_the_output_projection(
    family: str, trace_of: Callable[[str], Traced]
) -> None:
    found = trace_of(family)
    for layer, call in enumerate(found.calls):
        results = torch.einsum("bnhd,hdm->bnhm", call.z, found.weights.W_O(layer))
        total = results.sum(2)
        if (bias := found.weights.b_O(layer)) is not None:
            total = total + bias
        expected = found.weights.output_projection(layer)(call.z.flatten(2))
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_projection_is_called_by_the_model_with_z(family: str) -> None:
    model = FAMILIES[family]()
    spec, modules = measure(model, family)
    weights = HeadWeights(model, modules, spec)
    received: dict[int, Tensor] = {}
    handles = [
        weights.output_projection(layer).register_forward_pre_hook(
            lambda module, args, layer=layer: received.__setitem__(layer, args[0])
        )
        for layer in range(spec.n_layers)
    ]
    with recording(model, modules) as calls, torch.no_grad():
        model(**inputs(family), use_cache=False)
    for handle in handles:
        handle.remove()
    for layer, call in enumerate(calls):
        assert torch.equal(received[layer], call.z.flatten(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_rows_are_what_the_embedding_returns_before_scaling(
    family: str, trace_of: Callable[[str], Traced]
) -> None:
    found = trace_of(family)
    ids = inputs(family)["input_ids"]
    rows = found.weights.W_E[ids]
    with torch.no_grad():
        embedded = found.model.get_input_embeddings()(ids)
    multiplier = getattr(found.model.config, "embedding_multiplier", 1.0)
    torch.testing.assert_close(rows * found.weights.embed_scale, embedded * multiplier)


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in (*POST_NORM, *LEARNED_POSITIONS, "t5")]
)
def test_scaled_embedding_rows_enter_the_residual_stream(
    family: str, trace_of: Callable[[str], Traced]
) -> None:
    found = trace_of(family)
    ids = inputs(family)["input_ids"]
    with torch.no_grad():
        stream = found.model(input_ids=ids, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(found.weights.W_E[ids] * found.weights.embed_scale, stream)


def before_the_unembedding(found: Traced, family: str) -> tuple[Tensor, Tensor]:
    """The residual stream before the final norm, and the logits."""
    norm, seen = found.weights.final_norm, []
    assert norm is not None
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = found.model(**inputs(family)).logits
    handle.remove()
    return seen[-1], logits


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in POST_NORM])
def test_final_norm_and_unembedding_give_the_logits(
    family: str, trace_of: Callable[[str], Traced]
) -> None:
    found = trace_of(family)
    weights = found.weights
    stream, logits = before_the_unembedding(found, family)
    with torch.no_grad():
        ours = weights.final_norm(stream) @ weights.W_U
    if weights.b_U is not None:
        ours = ours + weights.b_U
    ours = ours * weights.logit_scale
    if (cap := weights.logit_softcap) is not None:
        ours = cap * torch.tanh(ours / cap)
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", POST_NORM)
def test_post_norm_models_have_no_final_norm(
    family: str, trace_of: Callable[[str], Traced]
) -> None:
    assert trace_of(family).weights.final_norm is None


def test_post_norm_decoder_reaches_the_unembedding_directly(
    trace_of: Callable[[str], Traced],
) -> None:
    found = trace_of("bart")
    seen: list[Tensor] = []
    head = found.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = found.model(**inputs("bart")).logits
    handle.remove()
    assert found.weights.b_U is not None
    torch.testing.assert_close(seen[-1] @ found.weights.W_U + found.weights.b_U, logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_bigcode", {"multi_query": False}),
        ("phi", {"qk_layernorm": True}),
        ("stablelm", {"qk_layernorm": True, "use_qkv_bias": False}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 6}),
        ("gpt_neox", {"attention_bias": False}),
        ("llama4_text", {"use_qk_norm": False}),
        ("gptj", {"rotary_dim": 12}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_variants_of_a_family_are_read_the_same_way(family: str, changes: dict[str, Any]) -> None:
    found = traced(build(family, **changes), family)
    for layer, call in enumerate(found.calls):
        check_layer(found.weights, layer, call)


OTHER_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "persimmon": (AutoModelForCausalLM, BERT_LIKE),
    "hunyuan_v1_dense": (AutoModelForCausalLM, {**LLAMA_LIKE, "head_dim": 10}),
    "olmo3": (AutoModelForCausalLM, {**LLAMA_LIKE, "sliding_window": 5}),
    "modernbert": (AutoModelForMaskedLM, BERT_LIKE),
    "distilbert": (
        AutoModelForMaskedLM,
        {"vocab_size": 97, "dim": 36, "hidden_dim": 52, "n_layers": 2, "n_heads": 3},
    ),
}


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_layouts_beyond_the_tiny_models_are_read_right(family: str) -> None:
    auto, fields = OTHER_FAMILIES[family]
    model = auto.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32).eval()
    randomise(model)
    spec, modules = measure(model, family)
    with recording(model, modules) as calls, torch.no_grad():
        model(**inputs(family))
    weights = HeadWeights(model, modules, spec)
    for layer, call in enumerate(calls):
        check_layer(weights, layer, call)
        assert weights.W_O(layer).shape == (spec.n_heads, spec.d_value, spec.d_model)


def test_differential_attention_refuses_with_the_reason() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **LLAMA_LIKE))
    spec, modules = measure(model.eval(), "diffllama")
    with pytest.raises(UnsupportedError, match="differential attention"):
        HeadWeights(model, modules, spec).W_V(0)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in (*LATENT, "codegen", "opt")])
def test_matrices_are_views_of_the_model(family: str, trace_of: Callable[[str], Traced]) -> None:
    found = trace_of(family)
    storages = {p.untyped_storage().data_ptr() for p in found.model.parameters()}
    weights = found.weights
    for matrix in (weights.W_Q(1), weights.W_K(1), weights.W_V(1), weights.W_O(1), weights.W_U):
        assert matrix.untyped_storage().data_ptr() in storages
        assert not matrix.requires_grad


def test_keys_and_values_come_per_key_value_head(trace_of: Callable[[str], Traced]) -> None:
    weights = trace_of("mistral").weights
    assert weights.W_Q(0).shape == (6, 36, 10)
    assert weights.W_K(0).shape == (2, 36, 10)
    assert weights.W_V(0).shape == (2, 36, 10)
    assert weights.W_O(0).shape == (6, 10, 36)


def test_latent_attention_refuses_with_the_reason(trace_of: Callable[[str], Traced]) -> None:
    weights = trace_of("deepseek_v3").weights
    assert weights.W_O(0).shape == (3, 7, 36)
    for read in (weights.W_Q, weights.W_K, weights.W_V, weights.b_Q):
        with pytest.raises(UnsupportedError, match=r"because .* low-rank bottleneck"):
            read(0)


def test_a_layer_that_does_not_exist_is_named(trace_of: Callable[[str], Traced]) -> None:
    weights = trace_of("llama").weights
    for read in (weights.W_Q, weights.W_O, weights.output_projection, weights.qk_norm):
        with pytest.raises(HeadError, match="layer 7 does not exist: llama has layers 0–1"):
            read(7)


class Packed(nn.Linear):
    """Stands for a linear map whose weight is stored as integers, as bitsandbytes does."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)
        self.weight = nn.Parameter(of.weight.to(torch.uint8), requires_grad=False)


def test_quantised_weights_refuse_with_the_reason() -> None:
    model = build("llama")
    spec, modules = measure(model, "llama")
    modules[0].q_proj = Packed(modules[0].q_proj)
    modules[1].o_proj = Packed(modules[1].o_proj)
    weights = HeadWeights(model, modules, spec)
    with pytest.raises(UnsupportedError, match=r"W_Q of layer 0 of llama .* because .* quantised"):
        weights.W_Q(0)
    with pytest.raises(UnsupportedError, match=r"W_O of layer 1 of llama .* because .* quantised"):
        weights.W_O(1)
    assert weights.W_K(0).shape == (2, 36, 10)


class Adapted(nn.Module):
    """Stands for a linear map with an unmerged low-rank adapter beside it, as peft has them."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.base_layer = of
        self.weight = of.weight


def test_an_unmerged_adapter_refuses_rather_than_being_ignored() -> None:
    model = build("llama")
    spec, modules = measure(model, "llama")
    modules[0].v_proj = Adapted(modules[0].v_proj)
    with pytest.raises(UnsupportedError, match="carries an adapter; merge it"):
        HeadWeights(model, modules, spec).W_V(0)


def test_a_gated_query_projection_refuses_rather_than_being_cut_short() -> None:
    model = build("llama")
    spec, modules = measure(model, "llama")
    modules[0].q_proj = nn.Linear(36, 120, bias=False)
    with pytest.raises(UnsupportedError, match=r"q_proj gives 120 numbers instead of 60"):
        HeadWeights(model, modules, spec).W_Q(0)


def test_a_fused_projection_of_an_unknown_family_is_not_guessed() -> None:
    model = build("phi3")
    spec, modules = measure(model, "phi3")
    model.config.model_type = "unheard_of"
    with pytest.raises(UnsupportedError, match=r"its parts \(o_proj, qkv_proj\)"):
        HeadWeights(model, modules, replace(spec, family="unheard_of")).W_Q(0)


def test_a_family_with_llama_names_needs_no_entry() -> None:
    model = build("llama")
    spec, modules = measure(model, "llama")
    weights = HeadWeights(model, modules, replace(spec, family="unheard_of"))
    assert torch.equal(weights.W_Q(0).permute(0, 2, 1).flatten(0, 1), modules[0].q_proj.weight)


def test_embedding_behind_a_projection_refuses_with_the_reason() -> None:
    model = build("opt", word_embed_proj_dim=20, do_layer_norm_before=False)
    spec, modules = measure(model, "opt")
    weights = HeadWeights(model, modules, spec)
    with pytest.raises(UnsupportedError, match="rows have 20 numbers"):
        _ = weights.W_E
    assert weights.final_norm is None


def test_a_base_model_has_no_unembedding() -> None:
    model = build("llama").model
    spec, modules = measure(model, "llama")
    weights = HeadWeights(model, modules, spec)
    assert weights.final_norm is model.norm
    with pytest.raises(
        UnsupportedError, match=r"W_U of llama cannot be read because the model has"
    ):
        _ = weights.W_U
