"""Generation with a cache: the tokens, and what is captured on the way.

Expected tokens come from greedy decoding without a cache, one bare forward pass per token. What a
trace captures over the steps must equal one forward pass over the finished sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_close
from test_capture import everything, ids_of, ragged, stacks_of
from tiny_models import CONFIGS, ENCODER_DECODER, EOS, MASKED, build, tiny_tokenizer
from torch import Tensor

import headlab as hl
from headlab.errors import HeadlabError, PlanError, PromptError

Lab = Callable[..., Any]
NEW = 14
DECODERS = [name for name in CONFIGS if name not in (*MASKED, *ENCODER_DECODER)]
#: Llama 4 scales queries without rotation by the position in the cache, padding included, so in a
#: left-padded batch the model itself computes something else; see the test that shows it.
PADDING_MATTERS = "llama4_text"
PADDABLE = [name for name in DECODERS if name != PADDING_MATTERS]
TOLERANCE = 5e-5


def greedy(module: Any, ids: Tensor, new: int = NEW, ends: tuple[int, ...] = (EOS,)) -> list[int]:
    """Greedy continuation of one prompt [n] without a cache, up to an end token."""
    ids = ids[ids >= 0][None]
    start = ids.shape[1]
    for _ in range(new):
        with torch.no_grad():
            logits = module(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        if int(ids[0, -1]) in ends:
            break
    return ids[0, start:].tolist()


def padded(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


def expected_ids(module: Any, ids: Tensor, **options: Any) -> list[list[int]]:
    rows = [greedy(module, row, **options) for row in ids]
    return padded(rows, max(len(row) for row in rows))


@pytest.mark.parametrize("family", DECODERS)
def test_generation_equals_greedy_decoding_without_a_cache(
    lab: Lab, twin: Lab, family: str
) -> None:
    ids = ids_of(7)
    expected = expected_ids(twin(family), ids)
    assert lab(family).generate(ids, max_new_tokens=NEW).ids.tolist() == expected
    plan = [hl.keep.rows(queries="generated"), hl.keep.statistics("entropy")]
    assert lab(family).generate(ids, max_new_tokens=NEW, keep=plan).ids.tolist() == expected


@pytest.mark.parametrize("family", PADDABLE)
def test_a_ragged_batch_generates_what_each_prompt_does_alone(
    lab: Lab, twin: Lab, family: str
) -> None:
    ids = ragged((4, 9, 7))
    expected = expected_ids(twin(family), ids)
    assert lab(family).generate(ids, max_new_tokens=NEW).ids.tolist() == expected
    plan = hl.keep.statistics("entropy")
    assert lab(family).generate(ids, max_new_tokens=NEW, keep=plan).ids.tolist() == expected


def test_left_padding_changes_llama4_itself(twin: Lab) -> None:
    """The reason it is left out above: the bare model, padded, differs from itself alone."""
    module, ids = twin(PADDING_MATTERS), ids_of(9, batch=1)
    padded_ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, 9)], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = module(input_ids=ids).logits[:, -1]
        left = module(input_ids=padded_ids, attention_mask=mask, position_ids=positions).logits[
            :, -1
        ]
    assert float((alone - left).abs().max()) > 1e-3


def compare_with_prefill(generated: Any, whole: Any, row: int, n: int) -> None:
    """What was captured of one prompt's first n positions equals one forward pass over them."""
    rows, expected = generated.rows[row], whole.rows[0]
    assert_close(rows[:, :, :n, :n], expected[..., :n, :n], TOLERANCE, what="rows")
    assert bool((rows[:, :, :n, n:] == 0).all())
    assert bool(rows[:, :, n:].isnan().all())
    for name in whole.statistics:
        got, wanted = generated.statistic(name)[row], whole.statistic(name)[0]
        if name in ("argmax", "topk_index"):
            _check_index(got[:, :, :n], wanted, expected, name)
            assert bool((got[:, :, n:] == -1).all()), name
            continue
        assert_close(got[:, :, :n], wanted, 2 * TOLERANCE, 1e-4, what=name)
        beyond = got[:, :, n:]
        assert bool((beyond.isnan() | ((beyond == 0) & (name == "received"))).all()), name
    for name in whole.tensors:
        for at in range(2):
            got, wanted = generated.tensor(name, layer=at)[row], whole.tensor(name, layer=at)[0]
            if name == "pattern":
                assert_close(got[:, :n, :n], wanted, TOLERANCE, what=name)
                continue
            assert_close(got[:n], wanted, 2 * TOLERANCE, 1e-4, what=f"{name} of layer {at}")
            assert bool(got[n:].isnan().all()), name


def _check_index(got: Tensor, wanted: Tensor, rows: Tensor, name: str) -> None:
    """The same keys, or others whose weights tie: generated tokens repeat themselves."""
    assert torch.equal(got == -1, wanted == -1), name
    depth = (lambda x: x) if wanted.dim() == 4 else (lambda x: x[..., None])
    picked = [rows.gather(-1, depth(index).clamp(min=0)) for index in (got, wanted)]
    assert_close(*picked, TOLERANCE, what=name)


@pytest.mark.parametrize("family", DECODERS)
def test_what_is_captured_over_the_steps_equals_one_forward_pass(lab: Lab, family: str) -> None:
    model, ids = lab(family), ids_of(7)
    plan = everything(7 + NEW, None)
    # A token that ends nothing: both prompts run all their steps, past every window.
    generated = model.generate(ids, max_new_tokens=NEW, keep=plan, eos_token_id=None)
    assert generated.ids.shape == (2, NEW)
    assert generated.trace.ids.shape == (2, 7 + NEW - 1)
    for row in range(2):
        sequence = torch.cat([ids[row], generated.ids[row]])[: 7 + NEW - 1]
        assert generated.trace.ids[row].tolist() == sequence.tolist()
        whole = model.trace(sequence, keep=plan)
        compare_with_prefill(generated.trace, whole, row, 7 + NEW - 1)


@pytest.mark.parametrize("family", PADDABLE)
def test_what_is_captured_of_a_ragged_batch_equals_one_forward_pass_each(
    lab: Lab, family: str
) -> None:
    model, lengths = lab(family), (4, 9)
    ids, plan = ragged(lengths), everything(9 + NEW, None)
    generated = model.generate(ids, max_new_tokens=NEW, keep=plan, eos_token_id=None)
    assert generated.trace.lengths.tolist() == [n + NEW - 1 for n in lengths]
    for row, n in enumerate(lengths):
        sequence = torch.cat([ids[row, :n], generated.ids[row]])[: n + NEW - 1]
        whole = model.trace(sequence, keep=plan)
        compare_with_prefill(generated.trace, whole, row, n + NEW - 1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_ids_of_a_trace_end_where_its_lengths_say(lab: Lab, family: str) -> None:
    ids = ragged((4, 9))
    kept = (
        lab(family)
        .generate(ids, max_new_tokens=5, keep=hl.keep.statistics("entropy"), eos_token_id=None)
        .trace
    )
    assert kept.ids.shape[1] == int(kept.lengths.max())
    for row in range(2):
        n = int(kept.lengths[row])
        assert bool((kept.ids[row, :n] >= 0).all())
        assert bool((kept.ids[row, n:] == -1).all())
        assert len(kept.tokens[row]) == n


def _early_end(model: Any) -> tuple[Tensor, int, int, int]:
    """Prompts of which one ends before the other: them, the end token, which one, and when."""
    for seed in range(20):
        ids = ragged((5, 8), seed)
        free = model.generate(ids, max_new_tokens=NEW, eos_token_id=None).ids
        for step in range(2, NEW - 4):
            for row in range(2):
                end = int(free[row, step])
                if end not in free[row, :step] and end not in free[1 - row]:
                    return ids, end, row, step
    raise AssertionError("no token ends just one prompt")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_prompt_that_ends_early_keeps_nothing_of_what_is_run_after_its_end(
    lab: Lab, family: str
) -> None:
    model = lab(family)
    ids, end, row, step = _early_end(model)
    plan = everything(8 + NEW, None)
    generated = model.generate(ids, max_new_tokens=NEW, keep=plan, stop=[end])
    assert generated.ids[row, step] == end
    assert bool((generated.ids[row, step + 1 :] == -1).all())
    assert bool((generated.ids[1 - row] >= 0).all())
    n = int((ids[row] >= 0).sum()) + step  # the end token itself predicts nothing that is kept
    sequence = torch.cat([ids[row][ids[row] >= 0], generated.ids[row, :step]])
    assert int(generated.trace.lengths[row]) == n
    whole = model.trace(sequence, keep=plan)
    compare_with_prefill(generated.trace, whole, row, n)


def test_tokens_run_after_a_prompts_end_do_not_count_for_what_keys_receive(lab: Lab) -> None:
    model, plan = lab("llama"), hl.keep.statistics("received")
    ids, end, row, step = _early_end(model)
    generated = model.generate(ids, max_new_tokens=NEW, keep=plan, stop=[end])
    sequence = torch.cat([ids[row][ids[row] >= 0], generated.ids[row, : step + 1]])
    # Whether or not the row of the end token counts, those of the padding after it do not.
    least = model.trace(sequence[:-1], keep=plan).statistic("received")[0]
    most = model.trace(sequence, keep=plan).statistic("received")[0]
    got = generated.trace.statistic("received")[row, ..., : len(sequence) - 1]
    assert bool((got >= least - TOLERANCE).all())
    assert bool((got <= most[..., :-1] + TOLERANCE).all())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generated_rows_are_those_that_predict_new_tokens(lab: Lab, family: str) -> None:
    model, lengths = lab(family), (4, 9)
    ids = ragged(lengths)
    plan = [
        hl.keep.rows(queries="generated"),
        hl.keep.statistics("entropy", "argmax", queries="generated"),
    ]
    generated = model.generate(ids, max_new_tokens=6, keep=plan, eos_token_id=None)
    kept = generated.trace
    every = [hl.keep.rows(), hl.keep.statistics("entropy", "argmax")]
    assert kept.rows.shape[3] == 6
    for row, n in enumerate(lengths):
        assert kept.row_positions[row].tolist() == list(range(n - 1, n + 5))
        assert kept.query_positions["entropy"][row].tolist() == list(range(n - 1, n + 5))
        whole = model.trace(torch.cat([ids[row, :n], generated.ids[row, :5]]), keep=every)
        width = n + 5
        assert_close(kept.rows[row][..., :width], whole.rows[0][:, :, n - 1 :], TOLERANCE)
        assert_close(
            kept.statistic("entropy")[row], whole.statistic("entropy")[0][:, :, n - 1 :], TOLERANCE
        )
        assert torch.equal(
            kept.statistic("argmax")[row], whole.statistic("argmax")[0][:, :, n - 1 :]
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_queries_of_the_prompt_are_kept_once(lab: Lab, family: str) -> None:
    model, ids = lab(family), ragged((4, 9))
    plan = [
        hl.keep.rows(queries=[-1, 1]),
        hl.keep.statistics("entropy", "received", queries=[-1, 1]),
    ]
    kept = model.generate(ids, max_new_tokens=5, keep=plan, eos_token_id=None).trace
    prompt = model.trace(ids, keep=plan)
    assert kept.row_positions.tolist() == [[3, 1], [8, 1]]
    assert_close(kept.rows[..., :9], prompt.rows, TOLERANCE)
    assert bool((kept.rows[..., 9:] == 0).all())
    assert_close(kept.statistic("entropy"), prompt.statistic("entropy"), TOLERANCE)
    received = kept.statistic("received").nan_to_num(0.0)
    assert_close(received[..., :9], prompt.statistic("received"), TOLERANCE)


def test_keys_a_shorter_prompt_does_not_have_receive_nothing(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((4, 9))
    plan = hl.keep.statistics("received")
    assert bool((model.trace(ids, keep=plan).statistic("received")[0, ..., 4:] == 0).all())
    kept = model.generate(ids, max_new_tokens=3, keep=plan, eos_token_id=None).trace
    assert bool((kept.statistic("received")[0, ..., 6:] == 0).all())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_capture_while_sampling_changes_no_token(lab: Lab, family: str) -> None:
    model, ids = lab(family), ragged((5, 8))
    state = torch.get_rng_state()
    first = model.generate(ids, max_new_tokens=8, do_sample=True, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    again = model.generate(ids, max_new_tokens=8, do_sample=True, seed=3, keep=hl.keep.tensors("z"))
    other = model.generate(ids, max_new_tokens=8, do_sample=True, seed=4)
    assert first.ids.tolist() == again.ids.tolist()
    assert first.ids.tolist() != other.ids.tolist()


def test_generation_gives_texts_and_prints_them(lab: Lab, twin: Lab) -> None:
    generation = lab("llama").generate("w5 w6 w7", max_new_tokens=4)
    expected = greedy(twin("llama"), torch.tensor([5, 6, 7]), 4)
    assert generation.texts == (tiny_tokenizer().decode(expected),)
    assert str(generation) == generation.texts[0]
    assert generation.trace is None


def test_stop_tokens_end_a_continuation_besides_the_models_own(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(6, batch=1)
    free = model.generate(ids, max_new_tokens=10, eos_token_id=None).ids[0].tolist()
    at = next(i for i in range(2, 10) if free[i] not in free[:i])
    stopped = model.generate(ids, max_new_tokens=10, stop=[free[at]]).ids[0].tolist()
    assert stopped == free[: at + 1]


# -- encoder-decoder models ------------------------------------------------------------------------


def greedy_decoder(module: Any, ids: Tensor, new: int) -> list[int]:
    ids = ids[ids >= 0][None]
    decoder = torch.tensor([[module.config.decoder_start_token_id]])
    for _ in range(new):
        with torch.no_grad():
            logits = module(input_ids=ids, decoder_input_ids=decoder, use_cache=False).logits
        decoder = torch.cat([decoder, logits[:, -1].argmax(-1, keepdim=True)], 1)
        if int(decoder[0, -1]) == EOS:
            break
    return decoder[0, 1:].tolist()


def _free(family: str) -> Any:
    """A model without forced tokens, so that generation is plain greedy decoding."""
    module = build(family)
    module.generation_config.forced_eos_token_id = None
    return module


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_encoder_decoder_generation_equals_greedy_decoding_of_each_alone(family: str) -> None:
    module, ids = _free(family), ragged((8, 12))
    rows = [greedy_decoder(_free(family), row, 6) for row in ids]
    expected = padded(rows, max(len(row) for row in rows))
    assert hl.load(module).generate(ids, max_new_tokens=6).ids.tolist() == expected


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_encoder_decoder_generation_is_captured_in_the_decoders_positions_or_refused(
    family: str,
) -> None:
    """Its sequence is the start token and the new tokens; the prompt is the encoder's."""
    module, ids = _free(family), ids_of(8)
    model = hl.load(module)
    for stack, at in stacks_of(model):
        plan = [
            hl.keep.rows(layers=at),
            hl.keep.statistics("entropy", "received", layers=at),
            hl.keep.tensors("q", "k", "z", layers=at),
        ]
        try:
            generated = model.generate(ids, max_new_tokens=6, keep=plan, eos_token_id=None)
        except HeadlabError:
            continue
        start = torch.full((2, 1), module.config.decoder_start_token_id)
        decoder = torch.cat([start, generated.ids], 1)[:, :-1]
        whole = model.trace(ids, keep=plan, decoder=decoder)
        assert generated.trace.ids.tolist() == decoder.tolist()
        assert generated.trace.lengths.tolist() == [6, 6]
        assert_close(generated.trace.rows, whole.rows, TOLERANCE, what=stack)
        for name in whole.statistics:
            assert_close(
                generated.trace.statistic(name), whole.statistic(name), TOLERANCE, what=name
            )
        for name in whole.tensors:
            for layer in at:
                got = generated.trace.tensor(name, layer=layer)
                assert_close(
                    got, whole.tensor(name, layer=layer), TOLERANCE, what=f"{stack} {name}"
                )


# -- what is refused -------------------------------------------------------------------------------


def test_a_continuation_that_does_not_fit_the_context_is_refused(lab: Lab) -> None:
    with pytest.raises(PromptError, match="128") as caught:
        lab("llama").generate(ids_of(20), max_new_tokens=109)
    assert "\n" not in str(caught.value)
    assert lab("llama").generate(ids_of(20), max_new_tokens=1).ids.shape == (2, 1)


def test_beams_are_refused(lab: Lab) -> None:
    with pytest.raises(PlanError, match="beam"):
        lab("llama").generate(ids_of(5), max_new_tokens=3, num_beams=2)


@pytest.mark.parametrize("family", MASKED)
def test_models_that_cannot_generate_say_so(lab: Lab, family: str) -> None:
    with pytest.raises(HeadlabError) as caught:
        lab(family).generate(ids_of(5), max_new_tokens=3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("new", [0, -1])
def test_a_number_of_new_tokens_below_one_is_refused(lab: Lab, new: int) -> None:
    with pytest.raises(HeadlabError):
        lab("llama").generate(ids_of(5), max_new_tokens=new)


def test_block_maps_of_a_generation_are_refused_and_leave_the_model_clean(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(5)
    before = model.logits(ids)
    with pytest.raises(PlanError, match="block_map"):
        model.generate(ids, max_new_tokens=3, keep=hl.keep.statistics("block_map"))
    assert torch.equal(model.logits(ids), before)


def test_a_static_cache_is_refused_when_something_is_captured(lab: Lab) -> None:
    with pytest.raises(HeadlabError, match="static"):
        lab("llama").generate(
            ids_of(5), max_new_tokens=3, keep=hl.keep.rows(), cache_implementation="static"
        )


def test_a_prompt_may_hold_the_token_that_generation_pads_with(lab):
    model = lab("llama")
    pad = model.module.generation_config.pad_token_id
    ids = [5, pad, 7, pad, 9]
    made = model.generate(ids, 4, keep=hl.keep.rows(queries="generated"))
    whole = ids + made.ids[0].tolist()
    logits = model.logits([whole[:-1]])[0, len(ids) - 1 :]
    assert logits.argmax(-1).tolist() == made.ids[0].tolist()
    assert made.trace.rows.shape[-1] == len(whole) - 1
