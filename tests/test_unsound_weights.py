"""Heads whose weights are zero, no numbers or unreadable cost no other head its results; padding rows cost no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.composition import composition
from headlab.parameters.singular_vectors import singular_vectors
from headlab.parameters.virtual_weights import channel, top_token_pairs, virtual_ov, virtual_qk
from headlab.parameters.vocabulary import top_tokens

LAYERS = 3


def model_with(head: str | None, value: float = 0.0) -> hl.Model:
    """A llama whose W_O of one head holds a value throughout."""
    module = build("llama", num_hidden_layers=LAYERS)
    if head is not None:
        layer, at = int(head[1]), int(head[3])
        with torch.no_grad():
            width = module.config.head_dim
            module.model.layers[layer].self_attn.o_proj.weight[:, at * width :][:, :width] = value
    return hl.load(module, tokenizer=tiny_tokenizer())


def unreadable(model: hl.Model, layer: int, *names: str) -> Any:
    """Circuits that refuse some matrices of a layer."""
    made = circuits(model)

    def refusing(own: Any) -> Any:
        def call(at: int, *rest: Any) -> Any:
            if at == layer:
                raise UnsupportedError(f"layer {at} is strange")
            return own(at, *rest)

        return call

    for name in names:
        setattr(made, name, refusing(getattr(made, name)))
    return made


@pytest.mark.parametrize(
    ("value", "why"),
    [(0.0, "zero"), (torch.nan, "NaN or infinity"), (torch.inf, "NaN or infinity")],
)
def test_a_head_without_sound_weights_composes_with_none_and_disturbs_none(value, why):
    whole, found = (
        composition(model_with(head, value), draws=40, seed=1) for head in (None, "L1H2")
    )
    assert list(found.notes) == ["L1H2"]
    assert why in found.notes["L1H2"]
    assert "L1H2" in repr(found)
    assert not whole.notes
    lost = np.zeros(whole.scores.shape, bool)
    lost[:, 1, 2] = True  # writes
    lost[2, :, :, 1, 2] = True  # reads as values; its W_QK is sound
    for name in ("scores", "z", "null_mean", "p_value"):
        ours, wanted = getattr(found, name), np.where(lost, np.nan, getattr(whole, name))
        np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    np.testing.assert_array_equal(np.isnan(found.q_value), np.isnan(found.scores))
    assert np.abs(found.frame["z"]).max() < 10


def test_an_unreadable_layer_takes_only_its_own_pairs():
    model = model_with(None)
    whole = composition(model, draws=5)
    lost = np.zeros(whole.scores.shape, bool)
    lost[:2, :, :, 1] = True
    found = composition(unreadable(model, 1, "qk"), draws=5)
    np.testing.assert_allclose(found.scores, np.where(lost, np.nan, whole.scores), rtol=1e-6)
    lost[:, 1] = lost[:, :, :, 1] = True
    found = composition(unreadable(model, 1, "qk", "ov"), draws=5)
    np.testing.assert_allclose(found.scores, np.where(lost, np.nan, whole.scores), rtol=1e-6)
    assert found.notes == {
        f"L1H{head}": "layer 1 is strange" for head in range(model.spec.layers[1].n_heads)
    }
    with pytest.raises(UnsupportedError, match="layer 0 is strange"):
        composition(unreadable(hl.load(build("llama")), 0, "ov"), draws=5)


def test_even_singular_values_have_no_z():
    """One head of full rank and equal singular values: no rotation changes a score, so no deviation is divided by."""
    module = build("gpt2", n_head=1)
    d = module.config.n_embd
    turned = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0))).Q
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_attn.weight[:, 2 * d :] = turned
            block.attn.c_proj.weight.copy_(turned)
    made = circuits(hl.load(module), fold=False)
    found = composition(made, draws=5)
    assert np.isnan(found.z[:, 0, 0, 1, 0]).all()
    assert found.scores[2, 0, 0, 1, 0] == pytest.approx(d**-0.5, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_singular_vectors_leave_out_a_head_without_sound_weights(value):
    whole, found = (
        singular_vectors(model_with(head, value), "1.*", n=2, k=3, draws=20)
        for head in (None, "L1H2")
    )
    assert list(found.notes) == ["L1H2"]
    assert found.heads == whole.heads
    assert np.isnan(found.values[2]).all()
    assert np.isnan(found.effective_rank[2])
    assert found.left[2].isnan().all()
    assert found.right[2].isnan().all()
    rest = [head for head in range(len(whole.heads)) if head != 2]
    np.testing.assert_allclose(found.values[rest], whole.values[rest], rtol=1e-5)
    torch.testing.assert_close(found.right[rest], whole.right[rest])
    kept = whole.frame[whole.frame["head"] != 2].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        found.frame.drop(columns="q_value"), kept.drop(columns="q_value"), rtol=1e-4
    )
    with pytest.raises(UnsupportedError, match="L1H2: W_OV"):
        singular_vectors(model_with("L1H2", value), "L1H2", draws=5)


def test_singular_vectors_leave_out_an_unreadable_layer():
    made = unreadable(model_with(None), 1, "ov")
    found = singular_vectors(made, n=2, k=3, draws=5)
    assert set(found.frame["layer"]) == {0, 2}
    assert set(found.notes.values()) == {"layer 1 is strange"}
    assert not found.left[0].isnan().any()


def test_a_channel_of_a_broken_head_is_refused():
    for value, error in ((torch.nan, UnsupportedError), (0.0, HeadError)):
        with pytest.raises(error, match="L1H2"):
            channel(model_with("L1H2", value), "L1H2", "L2H0", "K")


def padded() -> tuple[hl.Model, hl.Model]:
    """A model whose last seven rows stand for no token, one of them NaN; and the same without these rows."""
    both = []
    for rows in (97, 90):
        module = build("llama")
        with torch.no_grad():
            for own in (module.get_input_embeddings(), module.get_output_embeddings()):
                own.weight[90:] *= 100
                own.weight[95] = torch.nan
                own.weight = torch.nn.Parameter(own.weight[:rows].clone())
        module.config.vocab_size = rows
        both.append(hl.load(module, tokenizer=tiny_tokenizer(90)))
    return both[0], both[1]


def test_padding_rows_are_no_tokens():
    wide, narrow = padded()
    w = torch.randn(4, wide.spec.d_model, generator=torch.Generator().manual_seed(0))
    for space in ("embedding", "unembedding"):
        for ours, wanted in zip(
            top_tokens(wide, w, 90, space), top_tokens(narrow, w, 90, space), strict=True
        ):
            torch.testing.assert_close(ours, wanted)
        with pytest.raises(PlanError, match="k=91 is more than the 90"):
            top_tokens(wide, w, 91, space)
    matrix = virtual_ov(narrow, "L0H0", "L1H0")
    for target in ("embedding", "unembedding"):
        pairs = [top_token_pairs(model, matrix, 9, target=target) for model in (wide, narrow)]
        pd.testing.assert_frame_equal(*pairs)
    with pytest.raises(PlanError, match="from 0 to 89"):
        top_token_pairs(wide, matrix, sources=[90])
    ours, wanted = (singular_vectors(model, "1.*", n=2, draws=20) for model in (wide, narrow))
    pd.testing.assert_frame_equal(ours.frame, wanted.frame)


def test_without_a_tokenizer_every_row_is_a_token_and_nan_in_one_is_refused():
    module = build("llama")
    bare = hl.load(module)
    assert top_tokens(bare, torch.ones(1, bare.spec.d_model), 97).ids.shape == (1, 97)
    matrix = virtual_ov(bare, "L0H0", "L1H0")
    for own, space, name in (
        (module.get_output_embeddings(), "unembedding", "W_U"),
        (module.get_input_embeddings(), "embedding", "W_E"),
    ):
        with torch.no_grad():
            own.weight[95] = torch.nan
        with pytest.raises(UnsupportedError, match=name):
            top_tokens(bare, torch.ones(1, bare.spec.d_model), 3, space)
        with pytest.raises(UnsupportedError, match=name):
            top_token_pairs(bare, matrix, 3, target=space)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("distance", ["abc", (), [[1]], [[1], [2, 3]], 1.0, -3, [2, -1], True, {}])
def test_what_is_no_distance_is_refused_whether_layers_rotate_or_not(lab, family, distance):
    made = circuits(lab(family))
    for call in (
        lambda: composition(made, distance=distance, draws=1),
        lambda: singular_vectors(made, circuit="QK", distance=distance, draws=1),
        lambda: virtual_qk(made, "L1H0", "L0H0", distance=distance),
        lambda: channel(made, "L0H0", "L1H0", "Q", distance=distance),
    ):
        with pytest.raises(PlanError, match="distance="):
            call()


def test_numbers_are_whole_and_bounded_and_numpys_are_as_good(lab):
    model = lab("gpt2")
    two = np.int64(2)
    composition(model, draws=two, seed=two, distance=two)
    assert len(singular_vectors(model, "L0H0", n=two, k=two, draws=two, seed=two).frame) == 4
    assert top_tokens(model, torch.ones(1, model.spec.d_model), two).ids.shape == (1, 2)
    matrix = virtual_ov(model, "L0H0", "L1H0")
    assert len(top_token_pairs(model, matrix, two)) == 2
    for name, values in {
        "draws": (0, True, 1.0, "3", None, 10**30),
        "seed": (-1, 1.5, None, 10**30),
    }.items():
        for value in values:
            for procedure in (composition, singular_vectors):
                with pytest.raises(PlanError, match=f"{name}="):
                    procedure(model, **{name: value})
    for name, value in (("n", 10**30), ("k", 1), ("k", 10**30), ("circuit", []), ("circuit", None)):
        with pytest.raises(PlanError, match=f"{name}="):
            singular_vectors(model, **{name: value})
    assert singular_vectors(model, "L0H0", n=10**5, draws=1).left.shape[1] == matrix.rank


def test_arguments_of_the_wrong_kind_are_named(lab):
    model = lab("gpt2")
    w = np.random.default_rng(0).standard_normal((2, model.spec.d_model))
    for given in (w, w.tolist()):
        assert torch.equal(
            top_tokens(model, given).ids, top_tokens(model, torch.as_tensor(given)).ids
        )
    for given in (None, "a", [[1.0], [1.0, 2.0]], {}, w.astype(str)):
        with pytest.raises(PlanError, match="directions"):
            top_tokens(model, given)
    with pytest.raises(PlanError, match="space="):
        top_tokens(model, w, space=[])
    matrix = virtual_ov(model, "L0H0", "L1H0")
    assert set(top_token_pairs(model, matrix, 3, sources=[5, 6])["source"]) <= {5, 6}
    for given in ("ab", [1.5], [True], [[1]], [], [-1], 3, {}, [None]):
        with pytest.raises(PlanError, match="sources="):
            top_token_pairs(model, matrix, sources=given)
    for given in (None, matrix.dense(), 3):
        with pytest.raises(PlanError, match="FactoredMatrix"):
            top_token_pairs(model, given)
    broken = type(matrix)(matrix.left * torch.nan, matrix.right)
    with pytest.raises(PlanError, match="NaN"):
        top_token_pairs(model, broken)
    for given in (-1, None, 1, torch.nan, "a"):
        with pytest.raises(PlanError, match="tolerance="):
            channel(model, "L0H0", "L1H0", "K", tolerance=given)
