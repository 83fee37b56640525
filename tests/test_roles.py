"""Roles measure what their definitions say, on patterns worked out by hand or by transformers itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from real_model import eager_smollm2, planted_model, smollm2
from test_reference import REFERENCE
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.errors import HeadlabError, UnsupportedError
from headlab.planted.words import tokenizer as planted_tokenizer
from headlab.roles import ROLES, Measurement, Probing, Role, RoleError, RoleInfo, register
from headlab.roles.copying import copying_shares
from headlab.roles.retrieval import LENGTHS, Retrieval, answered, copied_share, recall
from headlab.tasks import (
    NeedleTrial,
    needle_trials,
    plain_tokens,
    prose,
    prose_windows,
    repeated_tokens,
)

ALL = (
    "retrieval",
    "induction",
    "natural_induction",
    "fuzzy_induction",
    "copying",
    "episodic",
    "previous_token",
    "duplicate_token",
    "successor",
    "temporal",
    "contextual",
    "sink",
    "delimiter",
    "positional",
    "local",
    "long_range",
    "long_context",
)
ON_TEXT = ("previous_token", "sink", "local", "long_range")


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in the words of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("haystack")
    rng = np.random.default_rng(0)
    words = " ".join(f"w{i}" for i in rng.integers(4, 97, 4000))
    (folder / "words.txt").write_text(words, "utf-8")
    return folder


@cache
def tiny(family: str, **changes: Any) -> hl.Model:
    return hl.load(build(family, **changes), tokenizer=tiny_tokenizer())


# -- retrieval: the score, by hand ---------------------------------------------------------------

#: The answer is 20 21 20 22, at positions 4 to 7; its first token also stands at 2, its last at 9.
TRIAL = NeedleTrial((1, 10, 20, 12, 20, 21, 20, 22, 13, 22), (4, 8), "a", 10, 0)
NEW = np.array([20, 21, 20, 22, 20, 2])


@pytest.mark.parametrize(
    ("what", "attended", "paper", "code"),
    [
        ("follows the answer", (4, 5, 6, 7, 0, 0), 4 / 4, 4 / 4),
        ("copies its first token again", (4, 5, 6, 7, 4, 0), 4 / 4, 5 / 4),
        ("dwells on the first token", (4, 4, 4, 4, 4, 4), 1 / 4, 3 / 4),
        ("takes the other of two equal tokens", (6, 5, 4, 7, 0, 0), 4 / 4, 4 / 4),
        ("finds half", (4, 0, 0, 7, 0, 0), 2 / 4, 2 / 4),
        # What an order-blind comparison of token sets would count:
        ("reads the answer backwards", (7, 6, 5, 4, 1, 0), 0, 0),
        ("is one token ahead", (5, 6, 7, 8, 0, 0), 0, 0),
        ("is one token behind", (3, 4, 5, 6, 7, 0), 0, 0),
        ("looks at equal tokens outside", (2, 0, 2, 9, 2, 0), 0, 0),
        ("looks at what was just generated", (10, 10, 11, 12, 13, 14), 0, 0),
        ("sees no key", (-1, -1, -1, -1, -1, -1), 0, 0),
    ],
)
def test_copied_share_of_a_head_that(
    what: str, attended: tuple[int, ...], paper: float, code: float
):
    rows = np.array(attended)[None, None]
    assert copied_share(rows, NEW, TRIAL)[0, 0] == paper
    assert copied_share(rows, NEW, TRIAL, "code")[0, 0] == code


def test_tokens_outside_the_answer_count_for_nothing_even_when_attended():
    rows = np.array([[[8, 9, 8, 3, 1, 2]]])
    new = np.array([13, 22, 13, 12, 10, 20])  # what stands at 8, 9, 8, 3, 1 and 2
    assert copied_share(rows, new, TRIAL)[0, 0] == 0
    assert copied_share(rows, new, TRIAL, "code")[0, 0] == 0


@pytest.mark.parametrize(
    ("response", "answer", "share"),
    [
        ("Salted plums.", "salted plums", 1),
        ("plums, salted", "salted plums", 1),
        ("the plums", "salted plums", 1 / 2),
        ("plums plums", "salted plums", 1 / 2),
        ("nothing", "salted plums", 0),
        ("", "salted plums", 0),
        ("unsalted plumss", "salted plums", 0),
        ("the cat and the hat", "the cat the dog the hat", 4 / 6),  # ROUGE-1 clips counts
    ],
)
def test_recall_is_the_share_of_the_answers_words_in_the_response(response, answer, share):
    assert recall(response, answer) == pytest.approx(share)


# -- retrieval: from trials to a measurement -----------------------------------------------------


def staged_retrieval(
    model: hl.Model,
    play: Callable[[int, NeedleTrial, np.ndarray], tuple[list[int], np.ndarray]],
    n: int = 4,
    convention: Any = "paper",
) -> tuple[Measurement, tuple[NeedleTrial, ...]]:
    """Retrieval measured from answers and attention that *play* makes up; the model is never run."""
    role = Retrieval(lengths=(256,), depths=(0.2, 0.8), convention=convention)
    trials = needle_trials(model.tokenizer, prose(), (256,), (0.2, 0.8), n, 0)
    spec = model.spec

    def one(at: int, trial: NeedleTrial) -> dict[str, np.ndarray]:
        new, attended = play(at, trial, np.zeros((spec.n_layers, spec.n_heads, 24), np.int32))
        distance = len(trial.ids) - 1 - trial.span[0]
        seen = [window is None or window > distance for window in spec.windows]
        return {
            "new": np.array(new),
            "attended": attended[..., : len(new)],
            "seen": np.array(seen),
        }

    with patch(
        "headlab.roles.retrieval.answered",
        lambda probing, trials: [one(at, trial) for at, trial in enumerate(trials)],
    ):
        return role.measure(Probing(model, seed=0, n_prompts=n)), trials


def answering(at: int, trial: NeedleTrial, attended: np.ndarray) -> tuple[list[int], np.ndarray]:
    """A response that is the answer and a full stop; 0.0 follows it, 0.1 dwells on its last token."""
    start, stop = trial.span
    steps = np.arange(stop - start)
    attended[0, 0, steps] = start + steps
    attended[0, 1] = stop - 1
    attended[0, 2, steps] = stop - 1 - steps
    return [*trial.ids[start:stop], 30], attended


def test_a_staged_head_that_follows_the_needle_scores_one_and_all_others_far_less():
    found, trials = staged_retrieval(smollm2(), answering)
    assert found.values.shape == found.null.shape == (4, 30, 9)
    assert (found.values[:, 0, 0] == 1).all()
    for at, trial in enumerate(trials):
        answer = trial.ids[slice(*trial.span)]
        assert found.values[at, 0, 1] == pytest.approx(1 / len(answer))
    assert (found.values[:, 1:] == 0).all()
    assert found.notes[-1, -1] == "4 of 4 needles recalled"


def test_the_null_pairs_generated_and_attended_tokens_wrongly():
    found, trials = staged_retrieval(smollm2(), answering)
    for at, trial in enumerate(trials):
        answer = np.array(trial.ids[slice(*trial.span)])
        new = [*answer.tolist(), 30]
        shares = []
        for shift in range(1, len(new)):
            wrong = [new[(step - shift) % len(new)] for step in range(len(new))]
            shares.append(sum(a == b for a, b in zip(answer, wrong, strict=False)) / len(answer))
        assert found.null[at, 0, 0] == pytest.approx(np.mean(shares))
        assert found.null[at, 0, 0] < 0.2
        # A head that dwells on one token gains nothing by the order it dwells in.
        assert found.null[at, 0, 1] == pytest.approx(found.values[at, 0, 1])


def test_trials_the_model_did_not_recall_are_left_out():
    def play(at: int, trial: NeedleTrial, attended: np.ndarray) -> tuple[list[int], np.ndarray]:
        new, attended = answering(at, trial, attended)
        if at % 2:
            new = smollm2().tokenizer(" I cannot say", add_special_tokens=False)["input_ids"]
        return new, attended

    found, _ = staged_retrieval(smollm2(), play)
    assert found.values.shape == (2, 30, 9)
    assert found.notes[-1, -1] == "2 of 4 needles recalled"
    assert (found.values[:, 0, 0] == 1).all()


def test_the_codes_convention_reaches_the_measurement():
    def play(at: int, trial: NeedleTrial, attended: np.ndarray) -> tuple[list[int], np.ndarray]:
        new, attended = answering(at, trial, attended)
        answer = new[:-1]
        attended[0, 0, len(answer) : 2 * len(answer)] = attended[0, 0, : len(answer)]
        return answer + answer, attended

    paper, _ = staged_retrieval(smollm2(), play)
    code, _ = staged_retrieval(smollm2(), play, convention="code")
    assert (paper.values[:, 0, 0] == 1).all()
    assert (code.values[:, 0, 0] == 2).all()


@cache
def wide_gemma() -> hl.Model:
    """A tiny model with one windowed and one full layer, in SmolLM2's vocabulary."""
    module = build(
        "gemma2",
        vocab_size=smollm2().spec.n_vocab,
        max_position_embeddings=1200,
        sliding_window=60,
    )
    return hl.load(module, tokenizer=smollm2().tokenizer)


def test_heads_whose_window_does_not_reach_the_needle_are_out_of_window_not_zero():
    model = wide_gemma()
    assert model.spec.windows == (60, None)
    found, trials = staged_retrieval(model, answering)
    reach = [len(trial.ids) - 1 - trial.span[0] < 60 for trial in trials]
    assert not all(reach)
    for at, seen in enumerate(reach):
        assert np.isnan(found.values[at, 0]).all() == (not seen)
        assert not np.isnan(found.values[at, 1]).any()
    assert np.array_equal(np.isnan(found.values), np.isnan(found.null))
    assert ((0, 0) in found.notes) == (not any(reach))
    assert (1, 0) not in found.notes


def test_a_model_that_recalls_nothing_is_not_measurable_rather_than_zero():
    module = build("llama", max_position_embeddings=600)
    model = hl.load(module, tokenizer=planted_tokenizer(97, 600))
    scores = hl.score(model, roles=[Retrieval(lengths=(256,))], n_prompts=3)
    frame = scores.frame
    assert len(frame) == 12
    assert frame["score"].isna().all()
    assert frame["p_value"].isna().all()
    assert (frame["n"] == 0).all()
    assert not frame["claimed"].any()
    assert (
        frame["note"].str.startswith("not measurable: the model recalled the needle in none").all()
    )
    assert scores.claimed("retrieval") == []


def test_a_context_without_room_for_a_needle_is_not_measurable():
    frame = hl.score(tiny("llama"), roles="retrieval", n_prompts=3).frame
    assert frame["score"].isna().all()
    assert frame["note"].str.startswith("not measurable: the context holds no prompt of 256").all()


def test_retrieval_fits_the_shortest_context_it_says_it_fits():
    """A prompt of 256 tokens and 24 generated ones."""
    config = {"vocab_size": smollm2().spec.n_vocab, "max_position_embeddings": 280}
    model = hl.load(build("llama", **config), tokenizer=smollm2().tokenizer)
    frame = hl.score(model, roles="retrieval", n_prompts=8).frame
    assert not frame["note"].str.contains("context").any()
    assert frame["note"].str.startswith("not measurable").all()


def test_retrieval_needs_a_model_that_generates():
    frame = hl.score(tiny("bert"), roles="retrieval", n_prompts=3).frame
    assert frame["score"].isna().all()
    assert (frame["note"] == "not measurable: retrieval needs a model that generates").all()


def greedy_with_eager_attention(ids: tuple[int, ...], steps: int) -> tuple[list[int], np.ndarray]:
    """Step-by-step decoding by transformers alone: new tokens and each predicting row's argmax."""
    module = eager_smollm2()
    new: list[int] = []
    attended = []
    given, cache_kept = torch.tensor([ids]), None
    with torch.no_grad():
        for _ in range(steps):
            output = module(
                given, past_key_values=cache_kept, use_cache=True, output_attentions=True
            )
            cache_kept = output.past_key_values
            attended.append(torch.stack([a[0, :, -1].argmax(-1) for a in output.attentions]))
            new.append(int(output.logits[0, -1].argmax()))
            given = torch.tensor([new[-1:]])
    return new, torch.stack(attended, -1).numpy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("at", [0, 1])
def test_fast_generation_measures_what_step_by_step_eager_decoding_does(at: int):
    model = smollm2()
    trial = needle_trials(model.tokenizer, prose(), (256,), (0.3, 0.7), 2, 0)[at]
    found = answered(Probing(model), [trial])[0]
    steps = len(found["new"])
    assert 1 <= steps <= 24
    new, attended = greedy_with_eager_attention(trial.ids, steps)
    assert found["new"].tolist() == new
    ends = {2, *model.tokenizer("\n", add_special_tokens=False)["input_ids"]}
    assert steps == 24 or new[-1] in ends
    assert not set(new[:-1]) & ends
    assert found["attended"].shape == attended.shape == (30, 9, steps)
    assert (found["attended"] == attended).mean() >= 0.99


@pytest.mark.slow
def test_claims_on_the_real_model_agree_with_the_recorded_table():
    scores = hl.score(smollm2(), roles="induction,duplicate_token,previous_token", n_prompts=20)
    tables = {
        "induction": "induction_prefix_matching",
        "duplicate_token": "duplicate_token",
    }
    for role, name in tables.items():
        recorded = np.array(REFERENCE["scores"][name])
        info = scores.role(role)
        claimed = np.zeros((30, 9), bool)
        rows = scores.frame.query("role == @role and claimed")
        claimed[rows["layer"], rows["head"]] = True
        assert claimed[recorded > 1.3 * info.min_score].all(), role
        assert not claimed[recorded < 0.7 * info.min_score].any(), role
        measured = scores.frame.query("role == @role")["score"].to_numpy().reshape(30, 9)
        assert np.abs(measured - recorded).max() < 0.15
    assert scores.claimed("induction")


# -- copying -------------------------------------------------------------------------------------


def unembedding(n: int, norm: Any = None) -> Any:
    """A model whose stream is the vocabulary: direction i raises the logit of token i."""
    return SimpleNamespace(weights=SimpleNamespace(W_U=torch.eye(n), final_norm=norm))


def shares(pattern: torch.Tensor, result: torch.Tensor, norm: Any = None) -> tuple[Any, Any]:
    ids = torch.arange(pattern.shape[-1])[None]
    score, null = copying_shares(
        pattern[None, None], result[None, None], ids, unembedding(result.shape[-1], norm)
    )
    return score[0, 0], null[0, 0]


CAUSAL_ROWS = torch.tensor(
    [[1.0, 0, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0.25, 0.25, 0.25, 0.25]]
)


def test_a_head_that_writes_what_it_reads_scores_the_attention_it_pays():
    score, null = shares(CAUSAL_ROWS, CAUSAL_ROWS)
    # The last row raises every token alike, which is no raise at all over their mean.
    assert score[:3].tolist() == [1.0, 1.0, 0.5]
    assert torch.isnan(score[3])
    assert null[:3].tolist() == [0.0, 0.0, pytest.approx(0.5 / 3)]


def test_a_head_that_lowers_what_it_reads_scores_zero():
    score, null = shares(CAUSAL_ROWS, -CAUSAL_ROWS)
    assert score[:3].tolist() == [0.0, 0.0, 0.0]
    assert null[0].item() == pytest.approx(1 / 3)  # all the raise, shared by three others


def test_a_head_that_writes_another_token_scores_zero():
    score, _ = shares(CAUSAL_ROWS, CAUSAL_ROWS[:, [1, 2, 3, 0]].roll(2, 1))
    assert score[:2].tolist() == [0.0, 0.0]


def test_the_raise_is_over_the_mean_of_the_samples_tokens_only():
    # Logits 5, 3, 1, 1 of the sample, 100 outside it: raises 2.5 and 0.5.
    result = torch.tensor([[5.0, 3.0, 1.0, 1.0, 100.0]])
    pattern = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    score, null = shares(pattern, result)
    assert score.item() == pytest.approx(0.5 * 2.5 / 3 + 0.25 * 0.5 / 3)
    assert null.item() == pytest.approx((1 - score.item()) / 3)


def test_copying_ignores_the_size_of_the_output_and_of_what_bos_leaves_over():
    result = torch.tensor([[5.0, 3.0, 1.0, 1.0]])
    pattern = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    score, _ = shares(pattern, result)
    for size in (1e-6, 1e3):
        assert shares(pattern, size * result)[0].item() == pytest.approx(score.item(), rel=1e-5)
    assert shares(0.01 * pattern, result)[0].item() == pytest.approx(score.item(), rel=1e-5)


def test_copying_takes_off_the_bias_of_the_final_norm():
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(6)
    result = torch.randn(1, 6)
    pattern = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    with torch.no_grad():
        plain, _ = shares(pattern, result, norm)
        norm.bias.copy_(10 * torch.randn(6))
        biased, _ = shares(pattern, result, norm)
    assert biased.item() == pytest.approx(plain.item(), rel=1e-4)


def test_silent_heads_are_not_measurable_for_copying():
    module = build("llama")
    with torch.no_grad():
        module.model.layers[1].self_attn.o_proj.weight[:, 20:30] = 0  # head 2 of width 10
    model = hl.load(module, tokenizer=tiny_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        frame = hl.score(model, "copying", n_prompts=4).frame
    silent = (frame["layer"] == 1) & (frame["head"] == 2)
    assert frame[silent]["score"].isna().all()
    assert frame[silent]["note"].str.startswith("not measurable").all()
    assert frame[~silent]["score"].notna().all()


def test_copying_of_a_tiny_model_equals_the_formula_on_transformers_attention():
    """Head outputs rebuilt from transformers' eager pattern, values and the projection weights."""
    module = build("gpt2")
    model = hl.load(build("gpt2"), tokenizer=tiny_tokenizer())
    found = ROLES["copying"].measure(Probing(model, seed=3, n_prompts=4))
    module.set_attn_implementation("eager")
    look = found.looks[0]
    ids = torch.from_numpy(look.ids)[None]
    assert ids.shape == (1, 26)
    with torch.no_grad():
        states = module(ids, output_attentions=True, output_hidden_states=True)
        for layer, block in enumerate(module.transformer.h):
            v = block.attn.c_attn(block.ln_1(states.hidden_states[layer]))[0, :, 72:]
            for head in range(3):
                part = slice(12 * head, 12 * head + 12)
                pattern = states.attentions[layer][0, head][1:, 1:]
                result = pattern @ v[1:, part] @ block.attn.c_proj.weight[part]
                ln = module.transformer.ln_f
                spread = result - result.mean(-1, keepdim=True)
                normed = spread / spread.std(-1, correction=0, keepdim=True) * ln.weight
                logits = normed @ module.lm_head.weight[ids[0, 1:]].T
                raised = (logits - logits.mean(-1, keepdim=True)).relu()
                share = raised / raised.sum(-1, keepdim=True)
                wanted = (pattern / pattern.sum(-1, keepdim=True) * share).sum(-1)
                np.testing.assert_allclose(look.values[layer, head], wanted, atol=2e-4)
                assert found.values[0, layer, head] == pytest.approx(float(wanted.mean()), abs=2e-4)


# -- roles on transformers' own patterns ---------------------------------------------------------


def eager_patterns(family: str, ids: torch.Tensor, **changes: Any) -> np.ndarray:
    """[prompt, layer, head, query, key] in float64, from a module headlab never saw."""
    module = build(family, **changes)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = module(ids, output_attentions=True).attentions
    return torch.stack(attentions, 1).double().numpy()


def mean_over(rows: Any, value: Callable[[int], np.ndarray]) -> np.ndarray:
    return np.mean([value(q) for q in rows], axis=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_roles_on_text_equal_their_definitions_on_transformers_patterns(family, haystack: Path):
    changes = {"max_position_embeddings": 400} if family != "gpt2" else {"n_positions": 400}
    model = tiny(family, **changes)
    ids = prose_windows(model.tokenizer, prose(haystack), 3, 384, 5, 1)
    a = eager_patterns(family, ids, **changes)
    n = 384

    def first(q: int) -> np.ndarray:
        return a[..., q, 0]

    def previous(q: int) -> np.ndarray:
        return a[..., q, q - 1]

    def share(q: int, low: int, high: int) -> np.ndarray:
        """Of the attention beyond the first token, the part on keys at distance low .. high − 1."""
        keys = [k for k in range(1, q + 1) if low <= q - k < high]
        return a[..., q, keys].sum(-1) / a[..., q, 1 : q + 1].sum(-1)

    wanted = {
        "sink": (
            mean_over(range(1, n), first),
            mean_over(range(1, n), lambda q: (1 - first(q)) / q),
        ),
        "previous_token": (
            mean_over(range(2, n), previous),
            mean_over(range(2, n), lambda q: (1 - first(q) - previous(q)) / (q - 1)),
        ),
        "local": (
            mean_over(range(32, n), lambda q: share(q, 0, 16)),
            np.mean([16 / q for q in range(32, n)]),
        ),
        "long_range": (
            mean_over(range(256, n), lambda q: share(q, 128, n)),
            np.mean([(q - 128) / q for q in range(256, n)]),
        ),
    }
    for role, (value, null) in wanted.items():
        found = ROLES[role].measure(Probing(model, seed=5, n_prompts=3, haystack=haystack))
        np.testing.assert_allclose(found.values, value, atol=2e-5, err_msg=role)
        np.testing.assert_allclose(
            found.null, np.broadcast_to(null, value.shape), atol=2e-5, err_msg=f"{role}, null"
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_roles_on_repeats_equal_their_definitions_on_transformers_patterns(family: str):
    model = tiny(family)
    plain = plain_tokens(model.tokenizer, 97)
    n = 46  # 93 words hold no more than 46 distinct ones twice
    prompts = repeated_tokens(plain, 3, n, 2, 1)
    a = {name: eager_patterns(family, getattr(prompts, name)) for name in ("repeated", "control")}
    for role, back in (("induction", n - 1), ("duplicate_token", n)):
        found = ROLES[role].measure(Probing(model, seed=2, n_prompts=3))
        for name, measured in (("repeated", found.values), ("control", found.null)):
            rows = range(n + 2, 2 * n + 1)
            wanted = mean_over(rows, lambda q, name=name, back=back: a[name][..., q, q - back])
            np.testing.assert_allclose(measured, wanted, atol=2e-5)


EVEN = {
    "llama": {"max_position_embeddings": 400},
    "gpt2": {"n_positions": 400},
    "mistral": {"max_position_embeddings": 400, "sliding_window": 160},
    "bert": {"max_position_embeddings": 400},
}


@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize("role", ON_TEXT)
def test_a_head_that_attends_evenly_scores_its_null(family: str, role: str, haystack: Path):
    module = build(family, **EVEN[family])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "c_attn" in name:
                parameter[..., :36] = 0  # queries come first
            elif "q_proj" in name or ".query." in name:
                parameter.zero_()
    model = hl.load(module, tokenizer=tiny_tokenizer())
    frame = hl.score(model, role, n_prompts=4, haystack=haystack).frame
    assert frame["score"].notna().all()
    assert frame["effect"].abs().max() < 1e-4
    assert not frame["claimed"].any()


def test_an_evenly_attending_head_of_a_narrow_window_has_a_null_that_is_a_share(haystack: Path):
    model = tiny("mistral", max_position_embeddings=400, sliding_window=6)
    frame = hl.score(model, "local,previous_token", n_prompts=4, haystack=haystack).frame
    assert frame["null_mean"].dropna().between(0, 1).all()


# -- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "induction", "duplicate"),
    [(45, False, False), (46, True, False), (47, True, True)],
)
def test_heads_that_cannot_see_the_repeat_are_out_of_window(window, induction, duplicate):
    """With n = 46 the induction target lies 45 back, the duplicate 46: window w sees w − 1 back."""
    model = tiny("mistral", sliding_window=window)
    scores = hl.score(model, "induction,duplicate_token,previous_token", n_prompts=4)
    for role, seen in (("induction", induction), ("duplicate_token", duplicate)):
        frame = scores.frame[scores.frame["role"] == role]
        assert frame["score"].notna().all() == seen
        assert frame["score"].isna().all() == (not seen)
        assert frame["note"].str.startswith("out of window").all() == (not seen)
        assert not frame["claimed"].any()
    assert scores.frame.query("role == 'previous_token'")["score"].notna().all()
    # transformers agrees that this is where the target comes into sight.
    prompts = repeated_tokens(plain_tokens(model.tokenizer, 97), 1, 46, 0, 1)
    a = eager_patterns("mistral", prompts.repeated, sliding_window=window)
    queries = prompts.second_copy.numpy()
    assert (a[..., queries, queries - 45] > 0).all() == induction
    assert (a[..., queries, queries - 46] > 0).all() == duplicate


def test_only_the_windowed_layers_of_a_mixed_model_are_out_of_window():
    scores = hl.score(tiny("gemma2"), "induction,duplicate_token", n_prompts=4)
    windowed = scores.frame["layer"] == 0
    assert scores.frame[windowed]["score"].isna().all()
    assert scores.frame[windowed]["note"].str.startswith("out of window").all()
    assert scores.frame[~windowed]["score"].notna().all()


def test_layers_of_chunked_attention_that_cannot_see_the_target_are_out_of_window():
    """Llama 4's chunked layers see at most 6 tokens here; its other layer sees everything."""
    module = build("llama4_text")
    assert module.config.layer_types == ["chunked_attention", "full_attention"]
    model = hl.load(module, tokenizer=tiny_tokenizer())
    scores = hl.score(model, "induction,duplicate_token", n_prompts=4)
    chunked = scores.frame["layer"] == 0
    assert scores.frame[~chunked]["score"].notna().all()
    assert scores.frame[chunked]["score"].isna().all()
    assert scores.frame[chunked]["note"].str.startswith("out of window").all()


def test_long_range_needs_a_window_and_a_context_that_reach_far(haystack: Path):
    narrow = tiny("mistral", max_position_embeddings=400, sliding_window=100)
    frame = hl.score(narrow, "long_range", n_prompts=4, haystack=haystack).frame
    assert frame["score"].isna().all()
    assert frame["note"].str.startswith("out of window").all()
    wide = tiny("mistral", max_position_embeddings=400, sliding_window=200)
    frame = hl.score(wide, "long_range", n_prompts=4, haystack=haystack).frame
    assert frame["score"].notna().all()
    short = tiny("llama", max_position_embeddings=130)
    frame = hl.score(short, "long_range", n_prompts=4, haystack=haystack).frame
    assert frame["score"].isna().all()
    # No window is to blame here.
    assert not frame["note"].str.contains("out of window").any()
    assert frame["note"].str.len().min() > 0


# -- choosing roles, seeds, sharing --------------------------------------------------------------


def test_roles_come_by_name_list_object_or_all_and_each_once():
    assert tuple(ROLES)[: len(ALL) + 2] == (*ALL, "spans", "syntactic")
    model = planted_model()
    for roles in ("sink, induction", ["sink", "induction"], ("sink", ROLES["induction"], "sink")):
        assert hl.score(model, roles, n_prompts=2).names == ("sink", "induction")
    assert hl.score(tiny("llama"), n_prompts=2).names == ALL


@pytest.mark.parametrize("roles", ["nosuch", "induction,", "", [], ["sink", "Induction"]])
def test_unknown_roles_are_refused_with_the_known_ones(roles):
    with pytest.raises(
        RoleError, match="there are retrieval, induction, natural_induction"
    ) as caught:
        hl.score(tiny("llama"), roles)
    assert "\n" not in str(caught.value)


class Silent(Role):
    info = RoleInfo("silent", "Silent", "?", "s", "n", "d", "r", 0.5, 0.5, "own row")

    def measure(self, probing: Probing) -> Measurement:
        shape = (probing.n_prompts, probing.model.spec.n_layers, probing.model.spec.n_heads)
        values = np.zeros(shape)
        values[:, 1, 1] = 0.9
        return Measurement(values, np.zeros(shape))


def test_a_users_role_is_scored_by_object_and_once_registered_by_name():
    scores = hl.score(tiny("llama"), [Silent()], n_prompts=10)
    assert scores.claimed("silent") == ["L1H1"]
    try:
        register(Silent())
        assert hl.score(tiny("llama"), "silent", n_prompts=10).claimed("silent") == ["L1H1"]
    finally:
        ROLES.pop("silent")


def test_the_same_seed_gives_the_same_table_and_another_seed_another():
    model, roles = planted_model(), "induction,sink,copying"
    frame = hl.score(model, roles, seed=1, n_prompts=6).frame
    pd.testing.assert_frame_equal(frame, hl.score(model, roles, seed=1, n_prompts=6).frame)
    other = hl.score(model, roles, seed=2, n_prompts=6).frame
    assert not np.allclose(frame["score"], other["score"], atol=1e-6)


def test_a_role_scores_the_same_alone_and_in_company():
    model = planted_model()
    together = hl.score(model, "previous_token,sink,local,induction,duplicate_token", n_prompts=5)
    for role in ("sink", "duplicate_token"):
        alone = hl.score(model, role, n_prompts=5).frame
        rows = together.frame.query("role == @role").reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, rows)


def test_roles_that_read_the_same_rows_run_the_model_once():
    computed: list[str] = []

    def remember(key: str, compute: Callable[[], Any]) -> Any:
        computed.append(key)
        return compute()

    roles = "previous_token,sink,local,long_range,induction,duplicate_token"
    hl.score(planted_model(), roles, n_prompts=5, remember=remember)
    assert len(computed) == len(set(computed))
    shared = [
        key for key in computed if not key.startswith("sinks-")
    ]  # the sink's details are its own
    assert len(shared) == 4  # two batches of text, repeats and control


def test_two_settings_of_a_role_in_one_session_do_not_share_trials():
    """Retrieval at other lengths is other work, whatever remembers it."""
    module = build("llama", max_position_embeddings=600)
    model = hl.load(module, tokenizer=planted_tokenizer(97, 600))
    stored: dict[str, Any] = {}

    def remember(key: str, compute: Callable[[], Any]) -> Any:
        return stored.setdefault(key, compute())

    for length in (256, 400):
        Retrieval(lengths=(length,)).measure(Probing(model, n_prompts=1, remember=remember))
    assert len(stored) == 2


def test_scoring_says_what_it_does():
    told: list[str] = []
    hl.score(planted_model(), "sink,induction", n_prompts=5, tell=told.append)
    assert told
    assert all(text.startswith(("sink: ", "induction: ")) for text in told)


@pytest.mark.parametrize("training", [False, True])
def test_scoring_leaves_the_model_as_it_was(training: bool):
    module = build("gpt2", attn_pdrop=0.3, resid_pdrop=0.3)
    module.train(training)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    implementation = module.config._attn_implementation
    model = hl.load(module, tokenizer=tiny_tokenizer())
    first = hl.score(model, "sink,induction,copying", n_prompts=3).frame
    second = hl.score(model, "sink,induction,copying", n_prompts=3).frame
    pd.testing.assert_frame_equal(first, second)
    assert module.training == training
    assert module.config._attn_implementation == implementation
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("role", ALL)
@pytest.mark.parametrize("n_prompts", [0, 1])
def test_too_few_prompts_are_scored_or_refused_in_a_sentence(role: str, n_prompts: int):
    with contextlib.suppress(HeadlabError):
        assert not hl.score(tiny("llama"), role, n_prompts=n_prompts).frame["claimed"].any()


def test_encoder_decoders_are_refused():
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        hl.score(tiny("bart"), "sink")


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt_oss", "deepseek_v3", "gemma3_text"])
def test_every_role_can_be_asked_of_every_kind_of_model(family: str):
    frame = hl.score(tiny(family), n_prompts=2).frame
    unmeasured = frame["score"].isna()
    assert (frame[unmeasured]["note"].str.len() > 0).all()
    assert not frame["claimed"].any()  # two prompts prove nothing


def test_a_model_without_a_tokenizer_can_be_scored_on_random_tokens():
    model = hl.load(build("llama"))
    scores = hl.score(model, "induction,copying", n_prompts=3)
    assert scores.frame["score"].notna().all()
    sink = hl.score(model, "sink", n_prompts=3).frame
    assert sink["score"].isna().all()
    assert sink["note"].str.contains("not measurable.*tokenizer").all()


# -- examples ------------------------------------------------------------------------------------


def test_examples_show_the_row_their_value_was_measured_on():
    report = hl.report(
        planted_model(), "previous_token,duplicate_token,induction,sink", n_prompts=10
    )
    n = 50
    target: dict[str, Callable[[int], int]] = {
        "previous_token": lambda query: query - 1,
        "duplicate_token": lambda query: query - n,
        "induction": lambda query: query - n + 1,
        "sink": lambda query: 0,
    }
    for role, key in target.items():
        shown = [example for example in report.examples if example.role == role]
        (claimed,) = report.scores.claimed(role)
        mine = {example.kind: example for example in shown if example.label == claimed}
        assert set(mine) == {"high", "median", "random"}
        assert mine["high"].value >= mine["median"].value > 0.3
        for example in shown:
            assert len(example.weights) == example.query + 1
            assert example.weights[key(example.query)] == pytest.approx(example.value, abs=1e-4)
            assert sum(example.weights) == pytest.approx(1, abs=1e-2)
            if role in ("duplicate_token", "induction"):
                assert example.tokens[example.query] == example.tokens[example.query - n]


def test_the_default_lengths_of_needles_are_within_the_real_models_context():
    assert max(LENGTHS) + 24 <= smollm2().spec.max_context
