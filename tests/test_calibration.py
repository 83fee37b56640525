"""What a claim is worth where nothing is: random models, every role; and p-values when nothing but chance is at work.

Five randomly initialised models of 3 layers and 8 heads read SmolLM2's tokens. Three roles start from right answers,
which no random model gives: for retrieval and the contextual role the models are made to have answered rightly. What
a model says of a year cannot be forced, so the temporal role's choice of facts is tested by itself, on simulated
logits: a model that passes it by chance has heads that do what the role says.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

import headlab as hl
from headlab.attention import keep
from headlab.roles import Measurement, Probing, Role, RoleInfo, retrieval, year_effects
from headlab.roles.base import Arrays
from headlab.roles.contextual import Contextual
from headlab.roles.evidence import decide
from headlab.roles.retrieval import Retrieval
from headlab.roles.scoring import judge, measure, prepare, read_data, select
from headlab.statistics import sign_flip_p
from headlab.tasks import NeedleTrial, prose
from headlab.tasks.prose import data_folder
from headlab.tasks.temporal import TimePair, TimePrompts, temporal_facts, temporal_pairs

pytestmark = pytest.mark.slow

ALPHA = 0.05
LAYERS, HEADS, N_PROMPTS = 3, 8, 20
#: Roles whose control changes what the tokens say and nothing else. The others set attention against even attention,
#: or places against other places, and there random heads do differ from their null, if by little. So do they for the
#: duplicate-token role: what a token's query and its own key make of each other is the same in every prompt.
BY_CONTENT = (
    "retrieval", "induction", "natural_induction", "fuzzy_induction", "copying", "episodic", "successor",
    "contextual", "long_context", "spans", "syntactic",
)  # fmt: skip
SHAPE = {
    "hidden_size": 96, "intermediate_size": 192, "max_position_embeddings": 1100, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2,
}  # fmt: skip
GPT_SHAPE = {"n_embd": 96, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 1100}
WINDOWS = {
    "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 192,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
#: Family, configuration, and the weights' standard deviation: SmolLM2's, at which attention is all but even, and one
#: at which it is not.
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("llama", SHAPE, 1 / 24),
    "llama-peaked": ("llama", SHAPE, 0.12),
    "gpt2": ("gpt2", GPT_SHAPE, 1 / 24),
    "gpt2-peaked": ("gpt2", GPT_SHAPE, 0.12),
    "gemma2-sliding": ("gemma2", SHAPE | WINDOWS, 0.12),
}
#: Heads that share their keys, and layers, are hardly independent of each other; these are what is counted.
KEY_HEADS = {name: LAYERS * (HEADS if name.startswith("gpt2") else 2) for name in MODELS}


@cache
def opened(name: str) -> hl.Model:
    family, shape, scale = MODELS[name]
    tokens = {"vocab_size": smollm2().spec.n_vocab, "bos_token_id": 1, "eos_token_id": 2}
    tied = {"initializer_range": scale, "tie_word_embeddings": True}
    config = AutoConfig.for_model(family, **shape, **tokens, **tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return hl.load(module, tokenizer=smollm2().tokenizer)


@cache
def data() -> dict[str, list[dict[str, Any]]]:
    """Spans of one to three words anywhere in a text, asked from its last words; and sentences with their trees."""
    rng = np.random.default_rng(0)
    words = prose().split()
    spans = []
    for start in range(0, 40 * 2 * N_PROMPTS, 80):
        chosen = words[start : start + 80]
        edges = np.cumsum([0, *(len(word) + 1 for word in chosen)])
        first, n = int(rng.integers(1, 70)), int(rng.integers(1, 4))
        to = [int(edges[first]), int(edges[first + n]) - 1]
        last = [int(edges[75]), int(edges[80]) - 1]
        spans.append({"text": " ".join(chosen), "from": last, "to": to})
    lines = (data_folder() / "dependencies.jsonl").read_text("utf-8").splitlines()
    return {"spans": spans, "syntactic": [json.loads(line) for line in lines][:N_PROMPTS]}


class Answered(Retrieval):
    """Retrieval of a model that is made to have answered every question rightly."""

    def measure(self, probing: Probing) -> Measurement:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                retrieval, "answered", lambda _, trials: [read(probing, t) for t in trials]
            )
            return super().measure(probing)


def read(probing: Probing, trial: NeedleTrial) -> Arrays:
    """The rows that predict a response which is the answer, as the role reads those of a response of the model's."""
    start, stop = trial.span
    ids = [*trial.ids, *trial.ids[start:stop]]
    rows = list(range(len(trial.ids) - 1, len(ids) - 1))
    first = {"first": (start, start + 1)}
    plan = keep.statistics("argmax", "segment_mass", segments=first, queries=rows)
    trace = probing.model.trace([ids], keep=plan, logits="none")
    seen = (trace.statistic("segment_mass", "first")[0, ..., 0] > 0).any(-1)
    attended = trace.statistic("argmax")[0].numpy().astype(np.int32)
    return {"new": np.array(trial.ids[start:stop]), "attended": attended, "seen": seen.numpy()}


@cache
def roles() -> tuple[Role, ...]:
    answering = {"retrieval": Answered(), "contextual": Contextual(response="given")}
    return tuple(answering.get(role.info.name, role) for role in select("all", data()))


ROLES = tuple(role.info.name for role in roles())


@cache
def measured(name: str, seed: int = 0, but: tuple[str, ...] = ()) -> Mapping[str, Measurement]:
    probing = prepare(opened(name), seed, N_PROMPTS, None)
    chosen = tuple(role for role in roles() if role.info.name not in but)
    given = {role: records for role, records in data().items() if role not in but}
    return measure(probing, chosen, read_data(chosen, given))


@cache
def scores(name: str) -> hl.Scores:
    return judge(roles(), measured(name), ALPHA, 0)


def differences(name: str, role: str) -> np.ndarray:
    """Value − null, [prompt, head], of the heads that could be measured."""
    found = measured(name)[role]
    difference = (found.values - found.null).reshape(len(found.values), -1)
    return difference[:, ~np.isnan(difference).all(0)]


def p_values(name: str, role: str) -> np.ndarray:
    frame = scores(name).frame
    return frame[frame["role"] == role]["p_value"].dropna().to_numpy()


def at_most(share: float, n: int) -> float:
    """Three standard errors above a share of n independent cases."""
    return share + 3 * math.sqrt(share * (1 - share) / n)


# -- claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_a_random_model_are_claimed_no_oftener_than_stated(name: str):
    claimed = {role: len(scores(name).claimed(role)) for role in ROLES}
    assert all(count <= ALPHA * LAYERS * HEADS for count in claimed.values()), claimed


def test_every_role_is_measured_on_random_models():
    """All heads but those that a sliding window keeps from it; the temporal role asks for knowledge of the model."""
    assert set(data()) < set(ROLES)
    for name in MODELS:
        frame = scores(name).frame
        lost = frame[frame["score"].isna() & (frame["role"] != "temporal")]
        if name != "gemma2-sliding":
            assert lost.empty, lost[["role", "note"]].drop_duplicates()
        assert lost["note"].str.startswith("out of window").all()
        assert (lost["layer"] != 1).all()
        told = frame[frame["role"] == "temporal"]["note"]
        assert told.str.contains("the model follows").all()


def test_a_random_model_retrieves_nothing():
    frame = hl.score(opened("llama"), roles="retrieval", n_prompts=4).frame
    assert frame["note"].str.startswith("not measurable: the model recalled the needle in").all()
    assert not frame["claimed"].any()


# -- p-values ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_p_values_are_uniform_once_value_and_null_are_exchanged_at_random():
    """Exchanged prompt by prompt, and for every head anew, so that the heads' p-values are independent."""
    rng = np.random.default_rng(1)
    found: dict[str, np.ndarray] = {}
    for role in ROLES:
        parts = []
        for name in MODELS:
            difference = differences(name, role)
            difference = difference[:, difference.any(0)]
            exchanged = difference * rng.choice([-1.0, 1.0], difference.shape)
            parts.append(randomised_p(exchanged, rng))
        found[role] = np.concatenate(parts)
    sizes = {role: p.size for role, p in found.items()}
    assert all(size >= 50 for role, size in sizes.items() if role != "temporal"), sizes
    assert stats.kstest(np.concatenate(list(found.values())), "uniform").pvalue > 0.01
    apart = {role: stats.kstest(p, "uniform").pvalue for role, p in found.items() if p.size}
    assert min(apart.values()) > 0.01 / len(apart), apart


def randomised_p(difference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """p-values in which ties with the observed mean count by a random share, so that they are uniform with ties."""
    at_least, above = sign_flip_p(difference, 0), 1 - sign_flip_p(-difference, 0)
    return above + rng.random(difference.shape[1]) * (at_least - above)


@pytest.mark.long
def test_the_heads_of_a_role_together_are_claimed_in_one_case_of_twenty():
    """Exchanged for all heads of a model at once, which keeps what they have in common."""
    rng, hits = np.random.default_rng(2), []
    for role in roles():
        bare = replace(role.info, min_score=-np.inf, min_effect=-np.inf)
        for name in MODELS:
            found = measured(name)[role.info.name]
            values, null = found.values[:14], found.null[:14]  # exact, and quick
            if np.isnan(values).all():
                continue
            for _ in range(6):
                turn = rng.random((len(values), 1, 1)) < 0.5
                exchanged = Measurement(np.where(turn, null, values), np.where(turn, values, null))
                hits.append(decide(bare, exchanged, ALPHA, 0)["claimed"].any())
    assert len(hits) >= 500
    assert np.mean(hits) <= at_most(ALPHA, len(hits))


def test_random_heads_are_no_oftener_significant_than_chance_where_the_control_exchanges_content():
    shares = {}
    for role in BY_CONTENT:
        p = np.concatenate([p_values(name, role) for name in MODELS])
        shares[role] = float((p <= ALPHA).mean())
    assert max(shares.values()) <= at_most(ALPHA, sum(KEY_HEADS.values())), shares
    assert np.mean(list(shares.values())) <= 1.2 * ALPHA, shares


def test_two_runs_of_a_probe_differ_no_more_than_their_prompts_do():
    """Prompts of another seed, the same model: were prompts no independent units, p-values would be too small."""
    name, shares = "llama-peaked", {}
    other = measured(name, 1, ("retrieval", "temporal", "contextual", "long_context", *data()))
    for role, found in other.items():
        one, two = measured(name)[role].values, found.values
        n = min(len(one), len(two))
        difference = (one[:n] - two[:n]).reshape(n, -1)
        p = sign_flip_p(np.concatenate([difference, -difference], 1), 0)
        shares[role] = float((p <= ALPHA).mean())
    assert max(shares.values()) <= at_most(ALPHA, KEY_HEADS[name]), shares
    assert np.mean(list(shares.values())) <= 1.2 * ALPHA, shares


@pytest.mark.parametrize("common", [0.0, 0.6], ids=["independent", "correlated"])
def test_of_claimed_heads_no_larger_share_is_false_than_stated(common: float):
    """Twenty true heads among 270, the size of SmolLM2; normal noise, part of which all heads have in common."""
    rng = np.random.default_rng(3)
    info = RoleInfo("toy", "Toy", "?", "s", "n", "d", "r", -np.inf, -np.inf, "own row")
    false, power = [], []
    for seed in range(100):
        shared = rng.normal(size=(12, 1, 1))
        values = math.sqrt(common) * shared + math.sqrt(1 - common) * rng.normal(size=(12, 30, 9))
        true = rng.permutation(270).reshape(30, 9) < 20
        values += 1.6 * true
        found = decide(info, Measurement(values, np.zeros_like(values)), ALPHA, seed)
        claimed = found["claimed"].to_numpy().reshape(30, 9)
        false.append((claimed & ~true).sum() / max(1, claimed.sum()))
        power.append(claimed[true].mean())
    assert np.mean(power) > 0.5
    assert np.mean(false) <= ALPHA + 3 * np.std(false) / math.sqrt(len(false))


def test_random_logits_follow_the_year_in_one_model_of_twenty():
    """Logits that answer to the digits of the year, each token's in its own way; facts share objects and years."""
    prompts, vocabulary = TimePrompts(smollm2().tokenizer, 1), smollm2().spec.n_vocab
    asked = [temporal_pairs(prompts, temporal_facts(), seed) for seed in range(6)]
    groups = [list(islice(pairs, 60)) for pairs in asked]  # more than are looked at
    probing, passed = Probing(opened("llama")), []
    for draw in range(150):
        rng = np.random.default_rng([4, draw])
        by_digit = rng.standard_normal((vocabulary, 4, 10), np.float32)

        def lead(_: Any, pairs: Sequence[TimePair], table: np.ndarray = by_digit) -> np.ndarray:
            first, second = table[np.array([pair.objects for pair in pairs]).T]
            years = np.array([[[*map(int, time)] for time in pair.times] for pair in pairs])
            each = np.arange(len(pairs))[:, None, None], np.arange(4), years
            return (first[each] - second[each]).sum(-1)  # [pair, time]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(year_effects, "differences", lead)
            passed.append(bool(year_effects.followed(probing, groups[draw % 6]).pairs))
    assert 0 < np.mean(passed) <= at_most(ALPHA, len(passed)), np.mean(passed)
