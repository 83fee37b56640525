"""What a trace captures, for every architecture, against Hugging Face's eager attention.

Expected rows are the ``attentions`` that a second copy of the model returns under eager attention.
Expected statistics are plain formulas (oracle.py) of those rows. Nothing is compared with headlab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import assert_close
from tiny_models import ENCODER_DECODER, FAMILIES, UNSUPPORTED, VOCAB_SIZE, build, inputs
from torch import Tensor

import headlab as hl
from headlab.errors import HeadlabError, PlanError, UnsupportedError

N, M = 15, 12  # tokens of a prompt, and of the decoder's side where there is one
TOLERANCE = 2e-5
Lab = Callable[..., Any]

families = pytest.mark.parametrize("family", FAMILIES)


def ids_of(n: int = N, batch: int = 2, seed: int = 0) -> Tensor:
    """Distinct tokens, so that no two keys tie in a model without positions."""
    g = torch.Generator().manual_seed(seed)
    return torch.stack([4 + torch.randperm(VOCAB_SIZE - 4, generator=g)[:n] for _ in range(batch)])


def ragged(lengths: tuple[int, ...], seed: int = 0, padding: str = "right") -> Tensor:
    ids = ids_of(max(lengths), len(lengths), seed)
    for row, n in enumerate(lengths):
        if padding == "right":
            ids[row, n:] = -1
        else:
            ids[row] = torch.cat([torch.full((ids.shape[1] - n,), -1), ids[row, :n]])
    return ids


def sides(family: str, lengths: tuple[int, ...] = (N, N)) -> tuple[Tensor, Tensor | None]:
    """Prompts and, for an encoder-decoder model, what its decoder sees."""
    if family not in ENCODER_DECODER:
        return ragged(lengths), None
    return ragged(lengths), ragged(tuple(max(1, n - (N - M)) for n in lengths), seed=1)


def arguments(ids: Tensor, decoder: Tensor | None) -> dict[str, Tensor]:
    """The same prompts as arguments of a Hugging Face forward pass."""
    made = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
    if decoder is not None:
        made["decoder_input_ids"] = decoder.clamp(min=0)
        made["decoder_attention_mask"] = (decoder >= 0).long()
    return made


def run(module: Any, ids: Tensor, decoder: Tensor | None, **options: Any) -> Any:
    with torch.no_grad():
        return module(**arguments(ids, decoder), **options)


@dataclass
class Layer:
    """One attention layer's expected pattern, with its place in headlab's order."""

    at: int
    stack: str
    p: np.ndarray  # [batch, head, query, key]


def attentions(module: Any, family: str, ids: Tensor, decoder: Tensor | None) -> list[Layer]:
    """Eager attention weights of every layer, in forward order."""
    output = run(module, ids, decoder, output_attentions=True)
    if family not in ENCODER_DECODER:
        stack = "encoder" if family in ("bert", "roberta") else "decoder"
        return [Layer(i, stack, oracle.array(p)) for i, p in enumerate(output.attentions)]
    found = [("encoder", p) for p in output.encoder_attentions]
    for own, cross in zip(output.decoder_attentions, output.cross_attentions, strict=True):
        found += [("decoder", own), ("cross", cross)]
    return [Layer(i, stack, oracle.array(p)) for i, (stack, p) in enumerate(found)]


def by_stack(layers: list[Layer]) -> dict[str, list[Layer]]:
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.stack, []).append(layer)
    return found


def trace(model: Any, ids: Tensor, decoder: Tensor | None, keep: Any, **options: Any) -> Any:
    return model.trace(ids, keep=keep, decoder=decoder, **options)


# -- logits ----------------------------------------------------------------------------------------


@families
def test_logits_without_capture_are_the_models_own_to_the_bit(
    lab: Lab, twin: Lab, family: str
) -> None:
    ids, decoder = sides(family)
    plain = (
        {"input_ids": ids} if decoder is None else {"input_ids": ids, "decoder_input_ids": decoder}
    )
    with torch.no_grad():
        own = twin(family)(**plain).logits
    assert torch.equal(lab(family).logits(ids, decoder=decoder), own)
    assert torch.equal(lab(family).trace(ids, decoder=decoder).logits, own)


@families
def test_logits_of_a_ragged_batch_without_capture_are_the_models_own_to_the_bit(
    lab: Lab, twin: Lab, family: str
) -> None:
    ids, decoder = sides(family, (N, N - 4))
    shown = ids if decoder is None else decoder
    own = run(twin(family), ids, decoder).logits
    got = lab(family).logits(ids, decoder=decoder)
    assert torch.equal(got[shown >= 0], own[shown >= 0])
    assert bool(got[shown < 0].isnan().all())


@families
def test_logits_with_capture_stay_within_rounding(lab: Lab, twin: Lab, family: str) -> None:
    ids, decoder = sides(family)
    own = run(twin(family), ids, decoder).logits
    plans = {
        "rows": [hl.keep.rows(queries=[-1])],
        "statistics": [hl.keep.statistics("entropy", "received")],
        "some heads": [hl.keep.statistics("entropy", heads="*.0")],
        "tensors": [hl.keep.tensors("q", "k", "v", "z")],
        "result": [hl.keep.tensors("result", "pattern")],
    }
    for name, plan in plans.items():
        assert_close(trace(lab(family), ids, decoder, plan).logits, own, TOLERANCE, what=name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert", "bart"])
def test_only_the_last_logits_can_be_kept(lab: Lab, family: str) -> None:
    for lengths in ((N, N), (N, N - 5)):
        ids, decoder = sides(family, lengths)
        whole = lab(family).logits(ids, decoder=decoder)
        last = lab(family).trace(ids, decoder=decoder, logits="last").logits
        shown = ids if decoder is None else decoder
        ends = (shown >= 0).sum(1) - 1
        assert last.shape == (2, 1, whole.shape[2])
        assert_close(last[:, 0], whole[torch.arange(2), ends], 1e-6)
        assert lab(family).trace(ids, decoder=decoder, logits="none").logits is None


# -- rows and statistics ---------------------------------------------------------------------------


@families
def test_rows_equal_eager_attention(lab: Lab, eager: Lab, family: str) -> None:
    ids, decoder = sides(family)
    for layers in by_stack(attentions(eager(family), family, ids, decoder)).values():
        at = [layer.at for layer in layers]
        expected = np.stack([layer.p for layer in layers], 1)
        every = trace(lab(family), ids, decoder, hl.keep.rows(layers=at))
        assert_close(every.rows, expected, TOLERANCE)
        some = trace(lab(family), ids, decoder, hl.keep.rows(queries=[-1, 0, 5], layers=at))
        assert_close(some.rows, expected[..., [-1, 0, 5], :], TOLERANCE)
        assert every.rows.shape[1] == len(layers)


@families
def test_kept_patterns_equal_eager_attention(lab: Lab, eager: Lab, family: str) -> None:
    ids, decoder = sides(family)
    kept = trace(lab(family), ids, decoder, hl.keep.tensors("pattern"))
    for layer in attentions(eager(family), family, ids, decoder):
        assert_close(kept.tensor("pattern", layer=layer.at), layer.p, TOLERANCE)


def statistics_plan(n_queries: int, n_keys: int, at: list[int]) -> tuple[list[Any], dict[str, Any]]:
    g = torch.Generator().manual_seed(3)
    known = {
        "targets": torch.randint(-1, n_keys, (2, n_queries), generator=g),
        "x": torch.randn(2, n_keys, 2, generator=g),
        "mask": torch.rand(2, n_keys, generator=g) < 0.5,
    }
    segments = {"span": (2, 5), "each": [(0, 3), (4, 6)], "mask": known["mask"]}
    plan = hl.keep.statistics(
        "lse", "entropy", "max", "argmax", "topk", "first_mass", "local_mass", "mean_distance",
        "segment_mass", "feature", "target_mass", "lag_mass", "received", "block_map", "segment_z",
        layers=at, n_first=2, window=3, bins=[-20, -1, 0, 1, 3, 20], k=3, segments=segments,
        targets=known["targets"], x=known["x"], block=4,
    )  # fmt: skip
    return [plan, hl.keep.tensors("q", "k", "v", "z", layers=at)], known


def members(known: dict[str, Any], n_keys: int) -> np.ndarray:
    """The plan's segments as [batch, key, segment]."""
    member = np.zeros((2, n_keys, 3), dtype=bool)
    member[:, 2:5, 0] = True
    member[0, 0:3, 1] = member[1, 4:6, 1] = True
    member[:, :, 2] = known["mask"].numpy()
    return member


def expected_statistics(
    p: np.ndarray, v: np.ndarray, known: dict[str, Any], counted: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Every statistic of one layer's eager weights by its plain formula."""
    lag = oracle.lags(p.shape[2], p.shape[3])
    member = members(known, p.shape[3])
    return {
        "entropy": oracle.entropy(p),
        "max": p.max(-1),
        "argmax": oracle.argmax(p),
        "topk": oracle.topk(p, 3)[0],
        "topk_index": oracle.topk(p, 3)[1],
        "first_mass": p[..., :2].sum(-1),
        "local_mass": oracle.local_mass(p, lag, 3),
        "mean_distance": oracle.mean_distance(p, lag),
        "segment_mass": oracle.feature(p, member.astype(float)),
        "feature": oracle.feature(p, oracle.array(known["x"])),
        "target_mass": oracle.target_mass(p, known["targets"].numpy()),
        "lag_mass": oracle.lag_mass(p, lag, [-20, -1, 0, 1, 3, 20]),
        "received": oracle.received(p, counted),
        "block_map": oracle.block_map(p, 4, counted),
        "segment_z": oracle.segment_z(p, v, member),
    }


def lse_from(p: np.ndarray, q: Tensor, k: Tensor, spec: Any) -> np.ndarray:
    """ln Σ exp s = s − ln p at each row's likeliest key, from captured q and k and eager p."""
    q, k = oracle.array(q).transpose(0, 2, 1, 3), oracle.array(k).transpose(0, 2, 1, 3)
    s = q @ np.repeat(k, q.shape[1] // k.shape[1], 1).transpose(0, 1, 3, 2) * spec.scaling
    if spec.softcap is not None:
        s = spec.softcap * np.tanh(s / spec.softcap)
    best = p.argmax(-1)[..., None]
    return (np.take_along_axis(s, best, -1) - np.log(np.take_along_axis(p, best, -1)))[..., 0]


@families
def test_every_statistic_equals_the_formula_of_eager_attention(
    lab: Lab, eager: Lab, family: str
) -> None:
    model, (ids, decoder) = lab(family), sides(family)
    for layers in by_stack(attentions(eager(family), family, ids, decoder)).values():
        at = [layer.at for layer in layers]
        plan, known = statistics_plan(*layers[0].p.shape[2:], at)
        kept = trace(model, ids, decoder, plan)
        for index, layer in enumerate(layers):
            v = oracle.array(kept.tensor("v", layer=layer.at)).transpose(0, 2, 1, 3)
            expected = expected_statistics(layer.p, v, known)
            spec = model.spec.layers[layer.at]
            if model.spec.positions != "relative_bias":
                q, k = kept.tensor("q", layer=layer.at), kept.tensor("k", layer=layer.at)
                expected["lse"] = lse_from(layer.p, q, k, spec)
            for name, value in expected.items():
                got = kept.statistic(name)[:, index]
                if name in ("argmax", "topk_index"):
                    np.testing.assert_array_equal(got.numpy(), value, err_msg=name)
                else:
                    assert_close(got, value, 5 * TOLERANCE, 1e-5, what=f"{name}, layer {layer.at}")
            assert_close(kept.statistic("segment_mass", "each")[:, index],
                         expected["segment_mass"][..., 1], TOLERANCE)  # fmt: skip
            z = oracle.segment_z(layer.p, v, np.ones((2, v.shape[2], 1)))[..., 0, :]
            assert_close(kept.tensor("z", layer=layer.at), z.transpose(0, 2, 1, 3), 5 * TOLERANCE)


@families
def test_statistics_of_some_queries_and_heads_are_those_of_every_query(
    lab: Lab, family: str
) -> None:
    ids, decoder = sides(family, (N, N - 3))
    model, at = lab(family), [lab(family).spec.n_layers - 1]  # decoder, encoder or cross
    names = ("entropy", "argmax", "first_mass", "mean_distance", "topk")
    every = trace(model, ids, decoder, hl.keep.statistics(*names, layers=at))
    chosen = [-2, 0, 3]
    some = trace(
        model, ids, decoder, hl.keep.statistics(*names, layers=at, queries=chosen, heads="*.1, *.0")
    )
    shown = ids if decoder is None else decoder
    lengths = (shown >= 0).sum(1)
    for row, n in enumerate(lengths.tolist()):
        picked = [n - 2, 0, 3]
        for name in (*names, "topk_index"):
            whole = every.statistic(name)[row, :, :2][:, :, picked]
            assert_close(some.statistic(name)[row], whole, 1e-5, what=name)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert"])
def test_received_counts_only_the_chosen_queries(lab: Lab, eager: Lab, family: str) -> None:
    ids, decoder = sides(family)
    plan = hl.keep.statistics("received", "block_map", queries=[2, -1], block=5)
    kept = trace(lab(family), ids, decoder, plan)
    counted = np.zeros((2, N), dtype=bool)
    counted[:, [2, N - 1]] = True
    for index, layer in enumerate(attentions(eager(family), family, ids, decoder)):
        assert_close(
            kept.statistic("received")[:, index], oracle.received(layer.p, counted), TOLERANCE
        )
        expected = oracle.block_map(layer.p, 5, counted)
        assert_close(kept.statistic("block_map")[:, index], expected, TOLERANCE)


# -- values and results ----------------------------------------------------------------------------


@families
def test_results_of_all_heads_add_up_to_what_the_layer_writes(lab: Lab, family: str) -> None:
    """Σ_h result[h] + bias is the output projection's output, and z·W_O of each head its result."""
    model, (ids, decoder) = lab(family), sides(family)
    written: dict[int, Tensor] = {}
    entered: dict[int, Tensor] = {}
    projections = [model.weights.output_projection(at) for at in range(model.spec.n_layers)]

    def note(at: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            entered[at], written[at] = args[0].clone(), output.clone()

        return hook

    handles = [p.register_forward_hook(note(at)) for at, p in enumerate(projections)]
    kept = trace(model, ids, decoder, hl.keep.tensors("z", "result"))
    for handle in handles:
        handle.remove()
    for at, projection in enumerate(projections):
        result, z = kept.tensor("result", layer=at), kept.tensor("z", layer=at)
        assert_close(z.flatten(2), entered[at], 1e-6)
        total = result.sum(2)
        if projection.bias is not None:
            total = total + projection.bias
        assert_close(total, written[at], TOLERANCE)
        weight = projection.weight.detach()
        matrix = weight if type(projection).__name__ == "Conv1D" else weight.T
        split = matrix.reshape(z.shape[2], z.shape[3], -1)
        for head in range(z.shape[2]):
            assert_close(result[:, :, head], z[:, :, head] @ split[head], TOLERANCE)


# -- ragged batches --------------------------------------------------------------------------------


def everything(n_keys: int, at: list[int] | None) -> list[Any]:
    return [
        hl.keep.rows(layers=at),
        hl.keep.statistics(
            "lse", "entropy", "max", "argmax", "topk", "first_mass", "local_mass",
            "mean_distance", "segment_mass", "target_mass", "lag_mass", "received", "segment_z",
            layers=at, k=2, bins=[-9, 0, 2, 9], segments={"a": (1, 4)},
            targets=torch.arange(n_keys) % 3, n_first=1, window=4,
        ),
        hl.keep.tensors("q", "k", "v", "z", "result", "pattern", layers=at),
    ]  # fmt: skip


STACKS = ("encoder", "decoder", "cross")


def stacks_of(model: Any) -> list[tuple[str, list[int]]]:
    found = [
        (stack, [at for at, layer in enumerate(model.spec.layers) if layer.stack == stack])
        for stack in STACKS
    ]
    return [(stack, at) for stack, at in found if at]


def check_alone(batch: Any, alone: Any, row: int, n_queries: int, n_keys: int, layers: Any) -> None:
    """Row *row* of a batch equals its own run, and holds blanks where it has no tokens."""
    rows = batch.rows[row]
    assert_close(rows[..., :n_queries, :n_keys], alone.rows[0], TOLERANCE, what="rows")
    assert bool(rows[..., n_queries:, :].isnan().all())
    assert bool((rows[..., :n_queries, n_keys:] == 0).all())
    for name in alone.statistics:
        got, expected = batch.statistic(name)[row], alone.statistic(name)[0]
        n = n_keys if name == "received" else n_queries
        assert_close(got[:, :, :n], expected, 5 * TOLERANCE, 1e-5, what=name)
        beyond = got[:, :, n:]
        if name == "received":
            assert bool((beyond == 0).all() | beyond.isnan().all())
        elif beyond.is_floating_point():
            assert bool(beyond.isnan().all()), name
        else:
            assert bool((beyond == -1).all()), name
    for name in alone.tensors:
        for at in layers:
            got, expected = batch.tensor(name, layer=at)[row], alone.tensor(name, layer=at)[0]
            if name == "pattern":
                assert_close(got[:, :n_queries, :n_keys], expected, TOLERANCE, what=name)
                assert bool(got[:, n_queries:].isnan().all())
                continue
            n = n_keys if name in ("k", "v") else n_queries
            assert_close(got[:n], expected, 5 * TOLERANCE, what=f"{name} of layer {at}")
            assert bool(got[n:].isnan().all()), f"{name} of layer {at}"


@families
@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_ragged_batch_equals_each_prompt_alone(lab: Lab, family: str, padding: str) -> None:
    model, lengths = lab(family), (N, N - 6, N - 1)
    ids = ragged(lengths, padding=padding)
    decoder_lengths = (M - 5, M, M - 1)
    decoder = ragged(decoder_lengths, 1, padding) if family in ENCODER_DECODER else None
    for stack, at in stacks_of(model):
        kept = trace(model, ids, decoder, everything(N, at))
        for row, n in enumerate(lengths):
            own = ids[row][ids[row] >= 0][None]
            own_decoder = None if decoder is None else decoder[row][decoder[row] >= 0][None]
            alone = trace(model, own, own_decoder, everything(N, at))
            n_decoder = n if decoder is None else decoder_lengths[row]
            n_queries = n if stack == "encoder" else n_decoder
            n_keys = n_decoder if stack == "decoder" else n
            check_alone(kept, alone, row, n_queries, n_keys, at)
            assert_close(kept.logits[row, :n_decoder], alone.logits[0], 5 * TOLERANCE)
            assert bool(kept.logits[row, n_decoder:].isnan().all())
        shown = lengths if decoder is None else decoder_lengths
        assert kept.lengths.tolist() == list(shown)
        assert bool((kept.ids >= 0).sum(1).eq(kept.lengths).all())


def needlessly(ids: Tensor, padding: str) -> Tensor:
    """The same prompts with padding that every one of them has."""
    pad = torch.full((len(ids), 4), -1)
    return torch.cat([ids, pad] if padding == "right" else [pad, ids], 1)


needless = pytest.mark.parametrize("padding", ["right", "left"])


@needless
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert", "gpt2"])
def test_needless_padding_is_not_captured(lab: Lab, family: str, padding: str) -> None:
    model, ids = lab(family), ids_of(9)
    kept = trace(model, needlessly(ids, padding), None, everything(N, None))
    for row in range(2):
        alone = trace(model, ids[row : row + 1], None, everything(N, None))
        check_alone(kept, alone, row, 9, 9, range(2))


@needless
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_needless_padding_does_not_count_for_what_keys_receive(
    lab: Lab, family: str, padding: str
) -> None:
    model, ids = lab(family), ids_of(9)
    plan = hl.keep.statistics("received", "block_map", block=3)
    plain, kept = (model.trace(prompt, keep=plan) for prompt in (ids, needlessly(ids, padding)))
    assert_close(kept.statistic("received")[..., :9], plain.statistic("received"), TOLERANCE)
    got = kept.statistic("block_map")[..., :3, :3]
    assert_close(got, plain.statistic("block_map"), TOLERANCE)


@needless
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_last_logits_are_those_of_the_last_token_before_needless_padding(
    lab: Lab, family: str, padding: str
) -> None:
    model, ids = lab(family), ids_of(9)
    padded = needlessly(ids, padding)
    plain = model.logits(ids)
    assert_close(model.logits(padded)[:, :9], plain, TOLERANCE)
    assert_close(model.trace(padded, logits="last").logits[:, 0], plain[:, -1], TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "t5", "bart", "bert"])
def test_block_maps_of_a_ragged_batch_leave_padding_out(lab: Lab, family: str) -> None:
    model, lengths = lab(family), (N, N - 6)
    ids = ragged(lengths)
    decoder = ragged((M - 5, M), 1) if family in ENCODER_DECODER else None
    for stack, at in stacks_of(model):
        plan = hl.keep.statistics("block_map", block=4, layers=at)
        kept = trace(model, ids, decoder, plan).statistic("block_map")
        for row in range(2):
            own = ids[row][ids[row] >= 0][None]
            own_decoder = None if decoder is None else decoder[row][decoder[row] >= 0][None]
            alone = trace(model, own, own_decoder, plan).statistic("block_map")[0]
            down, across = alone.shape[-2:]
            assert_close(kept[row, :, :, :down, :across], alone, TOLERANCE, what=stack)
            assert float(kept[row].nansum()) == pytest.approx(float(alone.sum()), abs=1e-4)


def test_negative_queries_count_from_each_prompts_own_end(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, 7))
    every = trace(model, ids, None, hl.keep.rows())
    kept = trace(model, ids, None, [hl.keep.rows(queries=[-1, -3])])
    for row, n in enumerate((N, 7)):
        assert_close(kept.rows[row], every.rows[row][:, :, [n - 1, n - 3]], 1e-6)
    assert kept.row_positions.tolist() == [[N - 1, N - 3], [6, 4]]
    own = trace(model, ids, None, [hl.keep.rows(queries=torch.tensor([[3, -1], [0, 6]]))])
    assert_close(own.rows[0], every.rows[0][:, :, [3, N - 1]], 1e-6)
    assert_close(own.rows[1], every.rows[1][:, :, [0, 6]], 1e-6)


def test_positions_of_kept_tensors_count_from_each_prompts_own_end(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, 7))
    names = ("q", "k", "v", "z", "result", "pattern")
    every = trace(model, ids, None, hl.keep.tensors(*names))
    kept = trace(model, ids, None, hl.keep.tensors(*names, positions=[-1, 2]))
    for name in names:
        for row, n in enumerate((N, 7)):
            whole = every.tensor(name, layer=1)[row]
            whole = whole[:, [n - 1, 2]] if name == "pattern" else whole[[n - 1, 2]]
            assert_close(kept.tensor(name, layer=1)[row], whole, 1e-6, what=name)


def test_encoder_positions_count_from_the_encoders_end(lab: Lab) -> None:
    """In an encoder-decoder model, queries of encoder layers are encoder positions."""
    model, ids, decoder = lab("bart"), ragged((N, 8)), ragged((5, M), 1)
    for stack, at in stacks_of(model):
        every = trace(model, ids, decoder, hl.keep.rows(layers=at)).rows
        kept = trace(model, ids, decoder, hl.keep.rows(layers=at, queries=[-1]))
        for row in range(2):
            end = ((N, 8) if stack == "encoder" else (5, M))[row]
            assert_close(kept.rows[row, :, :, 0], every[row, :, :, end - 1], 1e-6, what=stack)
            assert int(kept.row_positions[row, 0]) == end - 1


def test_a_decoder_that_is_not_given_starts_with_its_start_token(lab: Lab, twin: Lab) -> None:
    for family, start in (("bart", 2), ("t5", 0)):
        ids = ids_of()
        own = run(twin(family), ids, torch.full((2, 1), start)).logits
        assert_close(lab(family).logits(ids), own, 1e-6)


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "deepseek_v3"])
def test_chosen_layers_and_heads_are_those_of_the_whole(lab: Lab, family: str) -> None:
    model, ids = lab(family), ids_of()
    names = ("q", "k", "v", "z", "result", "pattern")
    every = trace(model, ids, None, [hl.keep.tensors(*names), hl.keep.rows()])
    kept = trace(
        model, ids, None,
        [hl.keep.tensors(*names, layers=[1], heads="1.2, 1.0"), hl.keep.rows(heads="1.2, 0.1")],
    )  # fmt: skip
    group = model.spec.n_heads // model.spec.n_kv_heads
    for name in names:
        whole, got = every.tensor(name, layer=1), kept.tensor(name, layer=1)
        if name == "pattern":
            assert_close(got, whole[:, [0, 2]], 1e-6)
        elif name in ("k", "v"):
            assert_close(got, whole[:, :, sorted({0, 2 // group})], 1e-6)
        else:
            assert_close(got, whole[:, :, [0, 2]], 1e-6)
        for head in (0, 2):
            mine = kept.of_head(name, hl.Head(1, head))
            assert_close(mine, every.of_head(name, hl.Head(1, head)), 1e-6)
        with pytest.raises(PlanError):
            kept.tensor(name, layer=0)
    assert kept.layers("rows") == (0, 1)
    assert kept.head_axis("rows") == (1, 2)
    assert_close(kept.rows[:, 0, 0], every.rows[:, 0, 1], 1e-6)
    assert_close(kept.rows[:, 1, 1], every.rows[:, 1, 2], 1e-6)
    assert bool(kept.rows[:, 0, 1].isnan().all())
    assert bool(kept.rows[:, 1, 0].isnan().all())


def test_several_plans_for_statistics_live_side_by_side(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    each = {
        "entropy": hl.keep.statistics("entropy"),
        "max": hl.keep.statistics("max", layers=[1]),
        "topk": hl.keep.statistics("topk", k=2, heads="0.*"),
        "first_mass": hl.keep.statistics("first_mass", n_first=3),
        "segment_mass": hl.keep.statistics("segment_mass", segments={"b": (2, 4)}),
        "lse": hl.keep.statistics("lse", queries=[-1]),
    }
    together = trace(model, ids, None, list(each.values()))
    for name, plan in each.items():
        alone = trace(model, ids, None, [plan])
        assert_close(together.statistic(name), alone.statistic(name), 1e-6, what=name)
    assert set(together.statistics) == {*each, "topk_index"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: hl.keep.statistics("entropyy"),
        lambda: hl.keep.statistics(),
        lambda: hl.keep.statistics("segment_mass"),
        lambda: hl.keep.statistics("segment_z"),
        lambda: hl.keep.statistics("feature"),
        lambda: hl.keep.statistics("target_mass"),
        lambda: hl.keep.statistics("lag_mass"),
        lambda: hl.keep.statistics("lag_mass", bins=[3]),
        lambda: hl.keep.statistics("lag_mass", bins=[3, 1]),
        lambda: hl.keep.statistics("topk", k=0),
        lambda: hl.keep.statistics("block_map", block=0),
        lambda: hl.keep.statistics("entropy", layers=[]),
        lambda: hl.keep.statistics("topk_index"),
        lambda: hl.keep.tensors(),
        lambda: hl.keep.tensors("zz"),
        lambda: hl.keep.tensors("scores"),
    ],
)
def test_plans_that_make_no_sense_are_refused_when_written(make: Callable[[], Any]) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: [hl.keep.rows(layers=[2])],
        lambda: [hl.keep.rows(heads="5.0")],
        lambda: [hl.keep.rows(heads="0.0", layers=[1])],
        lambda: [hl.keep.rows(queries=[15])],
        lambda: [hl.keep.rows(queries=[-16])],
        lambda: [hl.keep.rows(queries=torch.zeros(3, 1, dtype=torch.long))],
        lambda: [hl.keep.rows(), hl.keep.rows()],
        lambda: [hl.keep.statistics("entropy"), hl.keep.statistics("entropy", "max")],
        lambda: [hl.keep.tensors("z"), hl.keep.tensors("z", layers=[1])],
        lambda: [hl.keep.tensors("z", positions=[99])],
        lambda: [hl.keep.statistics("segment_mass", segments={"a": (4, 4)})],
        lambda: [hl.keep.statistics("segment_mass", segments={"a": (5, 2)})],
        lambda: [hl.keep.statistics("segment_mass", segments={"a": [(0, 1)] * 3})],
        lambda: [hl.keep.statistics("feature", x=torch.zeros(4))],
        lambda: [hl.keep.statistics("feature", x=torch.zeros(1, 2, 3, 4))],
        lambda: ["entropy"],
        lambda: "entropy",
    ],
)
def test_plans_that_do_not_fit_the_run_are_refused_and_leave_no_trace(
    lab: Lab, plan: Callable[[], Any]
) -> None:
    model, ids = lab("llama"), ids_of()
    before = model.logits(ids)
    with pytest.raises(HeadlabError) as caught:
        model.trace(ids, keep=plan())
    assert "\n" not in str(caught.value)
    assert torch.equal(model.logits(ids), before)


def test_one_plan_need_not_be_put_in_a_list(lab: Lab) -> None:
    assert lab("llama").trace(ids_of(), keep=hl.keep.rows(queries=[-1])).rows.shape[3] == 1


def test_batch_of_one_prompt_equals_the_first_of_two(lab: Lab) -> None:
    model, ids = lab("mistral"), ids_of()
    plan = [hl.keep.rows(), hl.keep.statistics("entropy")]
    one, two = model.trace(ids[0], keep=plan), model.trace(ids, keep=plan)
    assert_close(one.rows[0], two.rows[0], TOLERANCE)
    assert_close(one.statistic("entropy")[0], two.statistic("entropy")[0], TOLERANCE)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "t5"])
def test_gradients_reach_the_embedding_as_they_do_without_headlab(family: str) -> None:
    """d(sum of logits)/d(embedding) with capture on equals that of the bare model."""
    module = build(family)
    ids, decoder = sides(family)
    weight = module.get_input_embeddings().weight
    options = arguments(ids, decoder)
    (expected,) = torch.autograd.grad(module(**options).logits.pow(2).sum(), weight)
    model = hl.load(module)
    kept = trace(model, ids, decoder, hl.keep.statistics("entropy", "max"), grad=True)
    (got,) = torch.autograd.grad(kept.logits.pow(2).sum(), weight)
    size = float(expected.abs().max())
    assert_close(got, expected, 1e-4 * size)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_rows_and_statistics_carry_the_gradient_of_eager_attention(family: str) -> None:
    module = build(family)
    module.set_attn_implementation("eager")
    ids, weight = ids_of(), module.get_input_embeddings().weight
    p = torch.stack(module(input_ids=ids, output_attentions=True).attentions, 1).double()
    entropy = -torch.special.xlogy(p, p.clamp(min=1e-30)).sum(-1)
    (by_rows,) = torch.autograd.grad(p[..., -1, :].pow(2).sum(), weight, retain_graph=True)
    (by_entropy,) = torch.autograd.grad(entropy.pow(2).sum(), weight, retain_graph=True)
    (by_last,) = torch.autograd.grad(entropy[..., -1].pow(2).sum(), weight)
    model = hl.load(build(family))
    weight = model.module.get_input_embeddings().weight
    plan = [
        hl.keep.rows(queries=[-1]),
        hl.keep.statistics("entropy"),
        hl.keep.tensors("z", "q", "result"),
    ]
    kept = model.trace(ids, keep=plan, grad=True)
    (rows,) = torch.autograd.grad(kept.rows.pow(2).sum(), weight, retain_graph=True)
    assert_close(rows, by_rows, 1e-4 * float(by_rows.abs().max()))
    (whole,) = torch.autograd.grad(
        kept.statistic("entropy").pow(2).sum(), weight, retain_graph=True
    )
    assert_close(whole, by_entropy, 1e-4 * float(by_entropy.abs().max()))
    for name in ("z", "q", "result"):
        (reached,) = torch.autograd.grad(kept.tensor(name).sum(), weight, retain_graph=True)
        assert bool(reached.isfinite().all())
        assert float(reached.abs().sum()) > 0
    some = model.trace(ids, keep=hl.keep.statistics("entropy", queries=[-1]), grad=True)
    (last,) = torch.autograd.grad(some.statistic("entropy").pow(2).sum(), weight)
    assert_close(last, by_last, 1e-4 * float(by_last.abs().max()))


def test_nothing_records_gradients_unless_asked(lab: Lab) -> None:
    plan = [hl.keep.rows(), hl.keep.statistics("entropy"), hl.keep.tensors("z", "k", "result")]
    kept = lab("llama").trace(ids_of(), keep=plan)
    tensors = [kept.rows, kept.statistic("entropy"), kept.logits]
    tensors += [kept.tensor(name) for name in ("z", "k", "result")]
    assert not any(x.requires_grad for x in tensors)


# -- what cannot be served -------------------------------------------------------------------------


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_architectures_beside_the_seam_are_refused_by_name(family: str) -> None:
    module = UNSUPPORTED[family]()
    ids = inputs(family)["input_ids"]
    with torch.no_grad():
        before = module(input_ids=ids).logits
    implementation = module.config._attn_implementation
    with pytest.raises(UnsupportedError, match=family) as caught:
        hl.load(module)
    assert "\n" not in str(caught.value)
    assert module.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("llama", "eager"), ("llama", "sdpa"), ("gemma2", "eager"), ("t5", "eager"), ("t5", "sdpa"),
     ("gpt_oss", "eager")],
)  # fmt: skip
def test_capture_is_the_same_whatever_attention_the_model_came_with(
    lab: Lab, family: str, implementation: str
) -> None:
    module = build(family)
    module.set_attn_implementation(implementation)
    model, (ids, decoder) = hl.load(module), sides(family, (N, N - 2))
    before = run(module, ids, decoder).logits
    at = [model.spec.n_layers - 1]
    plan = [hl.keep.rows(layers=at), hl.keep.statistics("entropy", layers=at)]
    kept, expected = trace(model, ids, decoder, plan), trace(lab(family), ids, decoder, plan)
    assert_close(kept.rows, expected.rows, TOLERANCE)
    assert_close(kept.statistic("entropy"), expected.statistic("entropy"), TOLERANCE)
    shown = (ids if decoder is None else decoder) >= 0
    assert torch.equal(model.logits(ids, decoder=decoder)[shown], before[shown])
    assert_close(kept.logits[shown], before[shown], TOLERANCE)
