"""The parts of MAPS: the first tokens of a row, and what a score would be by chance."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import VOCAB_SIZE

import headlab as hl
from headlab.parameters.maps import maps
from headlab.parameters.relation_significance import (
    NEIGHBOURS,
    LikeTokens,
    poisson_binomial_tail,
    wilson_interval,
)
from headlab.parameters.row_ends import largest, matrices_to_vocabulary, row_ends
from headlab.tasks.relations import Relation, token_pairs

# -- top tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_vocab", [3, 64, 97, 1300, 5000])
@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("values", ["distinct", "tied", "all tied"])
def test_the_largest_are_those_of_a_stable_sort(n_vocab, k, values):
    rng = np.random.default_rng(n_vocab + k)
    scores = rng.standard_normal((7, n_vocab))
    if values == "tied":
        scores = rng.integers(-3, 4, (7, n_vocab)).astype(float)
        scores[0] = np.where(rng.random(n_vocab) < 0.01, 5.0, -5.0)
    if values == "all tied":
        scores = np.zeros((7, n_vocab))
    for sign in (1, -1):
        expected = np.argsort(-sign * scores, axis=1, kind="stable")[:, :k]
        found = largest(torch.from_numpy(scores), k, sign)
        np.testing.assert_array_equal(found.numpy(), expected)


def test_chunks_of_rows_and_of_heads_give_the_same_as_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(23, 5, generator=generator, dtype=torch.float64)
    W_O = torch.randn(4, 5, 12, generator=generator, dtype=torch.float64)
    W_U = torch.randn(12, 900, generator=generator, dtype=torch.float64)
    rows = np.einsum("nd,hdm,mv->hnv", z.numpy(), W_O.numpy(), W_U.numpy())
    monkeypatch.setattr("headlab.parameters.row_ends._ROW_BYTES", 4 * 900 * 8)
    monkeypatch.setattr("headlab.parameters.row_ends._MATRIX_BYTES", 3 * 5 * 900 * 8)
    for given in (W_U, W_U.float()):  # converted column by column
        matrices = list(matrices_to_vocabulary(W_O, given, z))
        assert len(matrices) == 4
        for matrix, dense in zip(matrices, rows, strict=True):
            found = row_ends(z, matrix, 6)
            for name, sign in (("promotes", -1), ("suppresses", 1)):
                if given is W_U:
                    expected = np.argsort(sign * dense, axis=1, kind="stable")[:, :6]
                    np.testing.assert_array_equal(found[name].numpy(), expected)
                else:
                    np.testing.assert_allclose((z @ matrix).numpy(), dense, rtol=1e-4, atol=1e-4)


# -- chance ------------------------------------------------------------------------------------------------------------


def test_the_tail_is_that_of_all_outcomes_of_the_coins():
    chances = np.random.default_rng(0).random((3, 7))
    for row in chances:
        counts = np.zeros(8)
        for coins in product((0, 1), repeat=7):
            counts[sum(coins)] += np.prod(np.where(coins, row, 1 - row))
        found = poisson_binomial_tail(np.tile(row, (8, 1)), np.arange(8))
        np.testing.assert_allclose(found, counts[::-1].cumsum()[::-1], rtol=1e-12)


def test_a_tail_far_out_keeps_its_digits():
    equal = np.full((1, 200), 0.001)
    found = poisson_binomial_tail(equal, np.array([60]))
    np.testing.assert_allclose(found, stats.binom.sf(59, 200, 0.001), rtol=1e-9)
    assert found[0] < 1e-120
    assert 0 < poisson_binomial_tail(np.full((1, 400), 1e-3), np.array([400]))[0] < 1e-300


def test_the_interval_is_wilsons():
    hits = np.array([0, 1, 17, 39, 40])
    low, high = wilson_interval(hits, 40)
    for at, hit in enumerate(hits):
        wanted = stats.binomtest(int(hit), 40).proportion_ci(method="wilson")
        np.testing.assert_allclose([low[at], high[at]], wanted, atol=1e-9)


def promoted(model: hl.Model, pairs, k: int) -> np.ndarray:
    """[pair, vocab]: whether a token is among the first k of the first head's row, in plain numpy."""
    attention, width = model.module.model.layers[0].self_attn, model.spec.d_head
    value, out = attention.v_proj.weight[:width].T, attention.o_proj.weight[:, :width].T
    with torch.no_grad():
        rows = model.weights.W_E[pairs.sources] @ value @ out @ model.weights.W_U
    top = np.argsort(-rows.numpy(), axis=1, kind="stable")[:, :k]
    inside = np.zeros(rows.shape, dtype=bool)
    np.put_along_axis(inside, top, True, axis=1)
    return inside


@pytest.fixture(scope="module")
def small(lab):
    """A head, the hits of every token for it, and its row, of a relation whose targets repeat."""
    sources = [f"w{at}" for at in range(4, 24)]
    targets = [f"w{at}" for at in (30, 31, 32, 33, 34)] * 4
    relation = Relation("small", "given", "", tuple(zip(sources, targets, strict=True)))
    model = lab("llama")
    pairs = token_pairs(relation, model.tokenizer)
    found = maps(model, relation, heads="0.0", min_pairs=5, k=20)
    return promoted(model, pairs, 20), pairs, found.frame.iloc[0], model


def test_p_values_are_those_of_drawn_targets(small):
    inside, pairs, row, model = small
    rng, rows = np.random.default_rng(1), np.arange(20)
    hits = round(row["score"] * 20)
    assert hits == inside[rows, pairs.targets].sum() > 0
    draws = 20_000
    shuffled = rng.choice(pairs.targets.numpy(), (draws, 20))
    like = LikeTokens(model.tokenizer, VOCAB_SIZE)
    stand_ins = [like.tokens(int(target)) for target in pairs.targets]
    matched = np.stack([rng.choice(some, draws) for some in stand_ins], 1)
    shares = [(inside[rows, drawn].sum(1) >= hits).mean() for drawn in (shuffled, matched)]
    means = [inside[rows, drawn].mean() for drawn in (shuffled, matched)]
    assert row["p_value"] == pytest.approx(max(shares), abs=0.015)  # four standard errors
    assert row["null_mean"] == pytest.approx(max(means), abs=0.005)


def test_shuffling_with_replacement_has_a_permutations_mean_and_no_smaller_variance():
    rng = np.random.default_rng(3)
    for _ in range(20):
        inside = rng.random((6, 6)) < rng.random(6)  # [pair, target]: some targets are easier
        orders = np.array(list(permutations(range(6))))
        sums = inside[np.arange(6), orders].sum(1)
        chances = inside.mean(1)
        assert sums.mean() == pytest.approx(chances.sum())
        assert (chances * (1 - chances)).sum() >= sums.var() * 5 / 6 - 1e-12


def test_stand_ins_are_neighbours_by_id_of_the_same_kind():
    class Tokenizer:
        all_special_ids = (0,)
        added_tokens_decoder = {0: "<s>"}  # noqa: RUF012

        def convert_ids_to_tokens(self, ids):
            return [self.text(token) for token in ids]

        def convert_tokens_to_string(self, tokens):
            return "".join(tokens).replace("Ġ", " ")

        @staticmethod
        def text(token):
            if token == 999:
                return None
            letters = "a" * (token + 1) if token % 3 else "7" * (token + 1)
            return letters if token % 2 else "Ġ" + letters

    like = LikeTokens(Tokenizer(), 1000)

    def kind(token):
        return token % 2, token % 3 > 0

    for target in (4, 500, 501, 999 - 1, 7):
        found = like.tokens(target)
        same = [token for token in range(1, 999) if kind(token) == kind(target)]
        at = same.index(target)
        assert found.tolist() == same[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]
    assert like.tokens(0).size == like.tokens(999).size == 0
    top = np.array([[[5, 0]], [[6, 7]]])  # two heads, one pair whose target is special
    np.testing.assert_array_equal(like.chances(top, np.array([0])), [[1.0], [0.0]])
