"""Planted models do what their truth says, measured on the models' own eager attention."""

import random
import re

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from headlab import planted
from headlab.errors import HeadError, HeadlabError, PlanError
from headlab.planted import Planted
from headlab.planted.kernels import not_self_kernel, offset_kernel

HEADS = {
    "L0H2": "sink",
    "L1H0": "previous_token",
    "L1H3": "duplicate_token",
    "L2H1": "induction",
}
LAYOUTS = [("llama", None), ("llama", 2), ("llama", 1), ("gpt2", None)]
COLUMN = {"previous_token": 0, "duplicate_token": 1, "induction": 2, "sink": 3}
FIRST_WORD = 6  # after four special tokens and two stops


def make(family: str = "llama", heads: dict[str, str] = HEADS, **more: object) -> Planted:
    return planted.model(family=family, heads=heads, **more)  # type: ignore[arg-type]  # test options


def repeated(model: Planted, n: int = 50, batch: int = 4, seed: int = 0) -> torch.Tensor:
    """[BOS, x, x] with x drawn without replacement."""
    rng = np.random.default_rng(seed)
    words = np.arange(FIRST_WORD, model.module.config.vocab_size)
    halves = [rng.choice(words, n, replace=False) for _ in range(batch)]
    return torch.tensor(np.stack([np.r_[0, half, half] for half in halves]))


def patterns(model: Planted, ids: torch.Tensor) -> torch.Tensor:
    """[batch, layer, head, query, key] from transformers' own eager code."""
    before = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model.module(ids, output_attentions=True).attentions
    model.module.set_attn_implementation(before)
    return torch.stack(attentions, dim=1)


def matrix(model: Planted, n: int = 50, batch: int = 4) -> torch.Tensor:
    """[layer, head, 4]: mean attention to q−1, to the earlier copy, to its successor, to BOS."""
    pattern = patterns(model, repeated(model, n, batch)).mean(dim=0)
    every, second = torch.arange(1, 2 * n + 1), torch.arange(n + 1, 2 * n + 1)
    looks = [(every, every - 1), (second, second - n), (second, second - n + 1), (every, 0 * every)]
    return torch.stack([pattern[..., q, k].mean(dim=-1) for q, k in looks], dim=-1)


def at(name: str) -> tuple[int, int]:
    layer, head = re.fullmatch(r"L(\d+)H(\d+)", name).groups()  # type: ignore[union-attr]
    return int(layer), int(head)


def losses(model: Planted, ids: torch.Tensor) -> torch.Tensor:
    """[batch, n − 1], nats per predicted token."""
    with torch.no_grad():
        logits = model.module(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")


def check_truth(model: Planted, n: int = 50, batch: int = 4) -> None:
    measured = matrix(model, n, batch)
    for name, role in model.truth.items():
        scores = measured[at(name)].clone()
        own = COLUMN[role]
        assert scores[own] >= (0.9 if role in ("previous_token", "sink") else 0.8), (name, scores)
        scores[own] = 0
        assert scores.max() < 0.25, (name, role, scores)
        measured[at(name)] = 0
    assert measured.max() < 0.2


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Planted:
    return make(request.param)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("family", "n_kv_heads"), LAYOUTS)
def test_each_head_does_its_own_job_and_no_other(family, n_kv_heads, seed):
    check_truth(make(family, n_kv_heads=n_kv_heads, seed=seed))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_roles_hold_at_256_tokens_and_beyond(family):
    model = make(family, vocab=600, max_context=1024)
    check_truth(model, n=128, batch=2)
    check_truth(model, n=500, batch=1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("n_heads", [1, 3, 12])
def test_any_number_of_heads(family, n_heads):
    heads = {"L0H0": "sink", "L1H0": "previous_token", "L2H0": "induction"}
    check_truth(make(family, heads, n_heads=n_heads, distractors=1))


def test_the_model_predicts_what_it_copies(model):
    ids = repeated(model)
    loss = losses(model, ids)
    assert loss[:, 51:].mean() < 0.1
    assert loss[:, :50].mean() > 4.0
    prompt = ids[:1, :60]
    with torch.no_grad():
        generated = model.module.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(generated[0, 60:], ids[0, 60:80])


def test_without_an_induction_head_nothing_is_copied():
    model = make(heads={"L1H0": "previous_token", "L1H3": "duplicate_token"})
    loss = losses(model, repeated(model))
    assert abs(loss[:, 51:].mean() - loss[:, :50].mean()) < 0.2


def test_heads_without_a_match_look_like_no_role(model):
    rng = np.random.default_rng(1)
    rows = [np.r_[0, rng.permutation(np.arange(FIRST_WORD, 128))[:63]] for _ in range(4)]
    pattern = patterns(model, torch.tensor(np.stack(rows)))
    to_first = pattern[..., 0].mean(dim=(0, -1))
    sink = at("L0H2")
    assert to_first[sink] > 0.9
    to_first[sink] = 0
    assert to_first.max() < 0.15
    induction = pattern[:, 2, 1, 32:]
    entropy = -(induction * induction.clamp_min(1e-30).log()).sum(-1).mean()
    assert entropy > 0.75 * np.log(48)
    own = torch.diagonal(pattern[:, 1, 3], dim1=-2, dim2=-1)
    assert own.mean() > 0.9  # a token without an earlier copy matches itself


def test_distractors_and_the_rest_are_diffuse(model):
    pattern = patterns(model, repeated(model))[..., 50:, :]
    n = torch.arange(51, 102)
    entropy = -(pattern * pattern.clamp_min(1e-30).log()).sum(-1) / n.log()
    entropy = entropy.mean(dim=(0, -1))
    assert len(model.distractors) == 6
    assert not set(model.distractors) & set(model.truth)
    for layer, head in np.ndindex(*entropy.shape):
        if f"L{layer}H{head}" not in model.truth:
            assert entropy[layer, head] > 0.9


def test_the_norm_of_the_residual_stream_is_steady(model):
    with torch.no_grad():
        states = model.module(repeated(model), output_hidden_states=True).hidden_states[:-1]
    norms = torch.stack(states).norm(dim=-1)
    assert norms.max() / norms.min() < 1.06
    if model.module.config.model_type == "gpt2":
        assert max(state.mean(dim=-1).abs().max() for state in states) < 0.02


def test_the_classes_are_transformers_own_and_survive_saving(model, tmp_path):
    assert type(model.module) in (LlamaForCausalLM, GPT2LMHeadModel)
    assert not model.module.training
    ids = repeated(model, batch=1)
    model.module.save_pretrained(tmp_path)
    again = type(model.module).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.module(ids).logits)


def test_the_tokenizer_adds_bos_and_knows_enough_words(model):
    tokenizer = model.tokenizer
    assert tokenizer("river stone").input_ids == [
        0,
        *tokenizer.convert_tokens_to_ids(["river", "stone"]),
    ]
    assert tokenizer("River, xyzzy", add_special_tokens=False).input_ids[1:] == [5, 2]
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    assert len(words) >= 110
    assert len(tokenizer) == model.module.config.vocab_size == 128
    ids = tokenizer(" ".join(words), add_special_tokens=False).input_ids
    assert sorted(ids) == list(range(FIRST_WORD, 128))
    assert tokenizer.decode(ids) == " ".join(words)


def test_large_vocabularies_have_distinct_words():
    model = make(vocab=1000)
    assert len(model.tokenizer) == 1000
    check_truth(model, batch=2)


def test_same_seed_same_weights_and_global_generators_stay_put():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, again, other = make(seed=3), make(seed=3), make(seed=4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()
    same = zip(first.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(first.module.lm_head.weight, other.module.lm_head.weight)


def test_an_empty_request_plants_nothing():
    model = make(heads={}, distractors=16)
    assert model.truth == {}
    assert len(model.distractors) == 16
    check_truth(model)


def test_defaults_run_as_documented():
    model = planted.model(
        family="llama", heads={"L1H0": "previous_token", "L2H1": "induction"}, distractors=6
    )
    assert model.truth == {"L1H0": "previous_token", "L2H1": "induction"}
    assert planted.model(heads={(1, 0): "sink", "0.1": "sink"}).truth == {
        "L0H1": "sink",
        "L1H0": "sink",
    }


def test_one_of_two_previous_token_heads_can_be_lost():
    heads = {"L0H0": "previous_token", "L1H2": "previous_token", "L2H1": "induction"}
    model = make(heads=heads)
    check_truth(model)
    less = planted.scramble(model, "L1H2", "ov")
    assert less.truth == heads
    check_truth(planted.scramble(model, "L0H0", "qk"))


@pytest.mark.parametrize("head", [*HEADS, "L0H0"])
@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_scrambled_qk_loses_the_role(head, n_kv_heads):
    model = make(n_kv_heads=n_kv_heads)
    scrambled = planted.scramble(model, head, "qk", seed=1)
    lost = {head, "L2H1"} if head == "L1H0" else {head}
    assert scrambled.truth == {name: role for name, role in HEADS.items() if name not in lost}
    assert model.truth == HEADS
    check_truth(scrambled)


def test_scrambled_ov_breaks_copying_but_not_attention(model):
    ids = repeated(model)
    scrambled = planted.scramble(model, "L2H1", "ov")
    assert "L2H1" not in scrambled.truth
    assert torch.equal(patterns(scrambled, ids)[:, 2, 1], patterns(model, ids)[:, 2, 1])
    assert losses(scrambled, ids)[:, 51:].mean() > 4.0

    deaf = planted.scramble(model, "L1H0", "ov")
    assert deaf.truth == {name: role for name, role in HEADS.items() if name != "L2H1"}
    check_truth(deaf)


def test_scrambling_keeps_norms_and_changes_only_the_part_named(model):
    fused = {"qk": ["c_attn.weight"], "ov": ["c_attn.weight", "c_proj.weight"]}
    split = {"qk": ["q_proj.weight", "k_proj.weight"], "ov": ["v_proj.weight", "o_proj.weight"]}
    expected = split if model.module.config.model_type == "llama" else fused
    for part, names in expected.items():
        old = model.module.state_dict()
        new = planted.scramble(model, "L1H3", part).module.state_dict()
        different = [name for name in old if not torch.equal(old[name], new[name])]
        assert [name.split(".", 4)[-1] for name in different] == names
        assert all(".1." in name for name in different)
        for name in different:
            torch.testing.assert_close(old[name].norm(), new[name].norm(), rtol=1e-5, atol=0)
    twice = [planted.scramble(model, "L1H3", "qk", seed=7).module for _ in range(2)]
    same = zip(twice[0].parameters(), twice[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (PlanError, "add one in layers 0–1", {"heads": {"L2H1": "induction"}}),
        (PlanError, "later layer", {"heads": {"L0H1": "induction", "L1H0": "previous_token"}}),
        (PlanError, "add one", {"heads": {"L1H1": "induction", "L1H0": "previous_token"}}),
        (PlanError, "plant one of previous_token", {"heads": {"L0H0": "copying"}}),
        (PlanError, "two roles", {"heads": {"L0H0": "sink", "0.0": "sink"}}),
        (HeadError, "does not name a head", {"heads": {"head one": "sink"}}),
        (HeadError, "layers 0–1 and heads 0–3", {"heads": {"L2H0": "sink"}, "n_layers": 2}),
        (HeadError, "heads 0–1", {"heads": {"L0H2": "sink"}, "n_heads": 2}),
        (PlanError, "'llama'", {"family": "bert"}),
        (PlanError, "use family='llama'", {"family": "gpt2", "n_kv_heads": 2}),
        (PlanError, "does not divide", {"n_heads": 4, "n_kv_heads": 3}),
        (PlanError, "leave 12 free", {"distractors": 13, "n_heads": 4, "n_layers": 4}),
        (PlanError, "at least 0", {"distractors": -1}),
        (PlanError, "at least 16", {"vocab": 5}),
        (PlanError, "at least 8", {"max_context": 2}),
        (PlanError, "at most", {"max_context": 10**6}),
        (
            PlanError,
            "heads L1H0 to L1H1 share one key head",
            {
                "heads": {
                    "L0H0": "previous_token",
                    "L1H0": "induction",
                    "L1H1": "duplicate_token",
                },
                "n_kv_heads": 2,
            },
        ),
    ],
)
def test_what_cannot_be_planted_is_said_in_one_sentence(error, says, options):
    with pytest.raises(error, match=re.escape(says)) as caught:
        make(**options)
    assert "\n" not in str(caught.value)


def test_scramble_refuses_what_is_not_there(model):
    with pytest.raises(HeadError, match="layers 0–3"):
        planted.scramble(model, "L9H0")
    with pytest.raises(HeadlabError, match="'qk' or 'ov'"):
        planted.scramble(model, "L1H0", "mlp")


@pytest.mark.parametrize("n", [64, 3000])
def test_position_kernels_single_out_one_distance(n):
    distance = np.arange(n)
    rope = (0.05 / n) ** (np.arange(8) / 8)
    scores = offset_kernel(rope, n)(distance)
    weights = np.exp(scores - scores.max())
    assert weights[1] / weights.sum() > 0.97
    kernel, spread = not_self_kernel(rope, n)
    scores = kernel(distance)
    assert scores[1:].min() - scores[0] > 3.99
    assert np.ptp(scores[1:]) < spread + 0.01


# -- roles whose words carry a meaning -----------------------------------------------------------

MEANT = {
    "L0H1": "positional",
    "L1H0": "previous_token",
    "L1H3": "contextual",
    "L2H1": "retrieval",
    "L2H3": "temporal",
}


@pytest.mark.parametrize(("family", "n_kv_heads"), [("llama", None), ("llama", 2), ("gpt2", None)])
def test_heads_of_meaning_do_what_their_records_ask(family, n_kv_heads):
    model = make(family, MEANT, n_kv_heads=n_kv_heads, max_context=160)
    tokenizer = model.tokenizer

    def continued(text: str, n: int) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.module.generate(ids, max_new_tokens=n, do_sample=False)
        return tokenizer.decode(made[0, ids.shape[1] :])

    for record in model.records("retrieval", 5):
        assert continued(record["prompt"], 3) == record["answer"]
    told = [record for record in model.records("temporal", 5) if "answers" in record]
    assert len(told) == 5
    for record in told:
        for time, answer in record["answers"].items():
            assert continued(record["template"].format(time=time), 1) == answer
    for record in model.records("contextual", 4):
        ids = tokenizer(" ".join([*record["documents"], record["response"]]), return_tensors="pt")
        pattern = patterns(model, ids.input_ids)[0, 1, 3, -4:, 1:]
        masses = [float(pattern[:, 12 * at : 12 * at + 12].sum(1).min()) for at in range(4)]
        assert masses[record["gold"]] > 0.5
        assert sum(masses) - masses[record["gold"]] < 0.02


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_positional_head_looks_four_tokens_back(family):
    model = make(family, MEANT, max_context=160)
    pattern = patterns(model, repeated(model))[:, 0, 1]
    assert pattern.diagonal(-4, -2, -1).mean() > 0.9


@pytest.mark.parametrize(
    ("head", "part", "lost"),
    [
        ("L2H1", "ov", {"L2H1"}),
        ("L2H3", "ov", {"L2H3"}),
        ("L1H3", "ov", set()),
        ("L1H0", "qk", {"L1H0", "L2H1"}),
    ],
)
def test_the_truth_after_a_scramble_says_what_is_lost(head, part, lost):
    model = make("llama", MEANT, max_context=160)
    left = planted.scramble(model, head, part).truth
    assert set(MEANT) - set(left) == lost


def test_records_differ_with_the_seed_and_only_with_it():
    model = make("llama", MEANT, max_context=160)
    assert model.records("temporal", 8, seed=1) == model.records("temporal", 8, seed=1)
    assert model.records("temporal", 8, seed=1) != model.records("temporal", 8, seed=2)
    with pytest.raises(PlanError, match="no records for 'sink'"):
        model.records("sink")


def test_a_vocabulary_without_the_words_is_refused():
    with pytest.raises(PlanError, match="needs the word"):
        make("llama", {"L0H0": "temporal"}, vocab=40)
