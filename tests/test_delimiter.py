"""Delimiter heads: tokens by their text, the closed-form null, and heads that must or must not be claimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from real_model import planted_model, smollm2
from tiny_models import build, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import headlab as hl
from headlab.roles import Probing
from headlab.roles.delimiter import (
    KINDS,
    LENGTH,
    Delimiter,
    delimited_texts,
    separators,
    text_kind,
    token_kinds,
)

# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (".", "sentence_end"),
        (" ?", "sentence_end"),
        ("...", "sentence_end"),
        ('."', "sentence_end"),
        (".\n\n", "sentence_end"),
        (".,", "sentence_end"),
        ("。", "sentence_end"),
        (",", "comma"),
        (" ;", "comma"),
        (":\n", "comma"),
        (",'", "comma"),
        ("、", "comma"),
        ("\n", "line_break"),
        (" \n\n ", "line_break"),
    ],
)
def test_a_token_is_a_delimiter_by_its_text(text: str, kind: str):
    assert KINDS[text_kind(text)] == kind


@pytest.mark.parametrize(
    "text",
    ["", " ", "\t", "'", "’", '"', "(", "-", "—", "…a", "a.", "1.", "U.S.", ".5", "the", "+", "$"],
)
def test_a_token_is_no_delimiter_by_its_text(text: str):
    assert text_kind(text) == -1


def test_special_tokens_separate_unless_they_stand_for_a_word():
    tokenizer = tiny_tokenizer()
    assert separators(tokenizer) == {0, 1, 2}  # <unk> is a word
    tokenizer.mask_token = "w9"
    assert separators(tokenizer) == {0, 1, 2}
    tokenizer.unk_token = "<eos>"  # as GPT-2 does: the unknown token also ends texts
    assert separators(tokenizer) == {0, 1, 2, 3} - {tokenizer.convert_tokens_to_ids("<unk>")}


# -- a small model on words and marks ------------------------------------------------------------

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", ".", ",", *(f"w{at}" for at in range(6, 97))]


@cache
def marked(family: str, wrapped: bool = False) -> hl.Model:
    """A tiny random model whose text is words, commas and full stops."""
    backend = Tokenizer(models.WordLevel({w: at for at, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if wrapped:
        ends = [("[CLS]", 1), ("[SEP]", 2)]
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    )
    return hl.load(build(family), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("marked")
    rng = np.random.default_rng(0)
    drawn = rng.choice(WORDS[4:], 4000, p=[0.06, 0.06, *[0.88 / 91] * 91])
    (made / "marked.txt").write_text(" ".join(drawn), "utf-8")
    return made


@torch.no_grad()
def attentions(family: str, ids: np.ndarray) -> list[np.ndarray]:
    """transformers' own patterns, in float64."""
    module = build(family)
    module.set_attn_implementation("eager")
    found = module(input_ids=torch.from_numpy(ids), output_attentions=True).attentions
    return [layer.double().numpy() for layer in found]


@pytest.mark.parametrize(
    ("family", "wrapped"), [("llama", False), ("gemma2", False), ("bert", True)]
)
def test_score_and_null_are_their_formulas(family: str, wrapped: bool, folder: Any):
    model = marked(family, wrapped)
    probing = Probing(model, n_prompts=2, haystack=folder)
    found = Delimiter().measure(probing)
    texts = delimited_texts(probing)
    assert texts.shape == (2, LENGTH)
    assert (texts[:, -1] == 2).all() == wrapped
    for layer, pattern in enumerate(attentions(family, texts)):
        window = model.spec.layers[layer].window or LENGTH
        for prompt, head in ((0, 0), (1, 2)):
            masses, nulls = [], []
            for row in range(1, LENGTH):
                last = LENGTH if family == "bert" else row + 1
                keys = [key for key in range(1, last) if row - key < window]
                marks = [key for key in keys if texts[prompt, key] in (0, 1, 2, 4, 5)]
                others = [key for key in keys if key not in marks]
                if marks and others:
                    weights = pattern[prompt, head, row]
                    masses.append(weights[marks].sum())
                    nulls.append(weights[others].mean() * len(marks))
            assert len(masses) > 50
            assert found.values[prompt, layer, head] == pytest.approx(np.mean(masses), rel=1e-4)
            assert found.null[prompt, layer, head] == pytest.approx(np.mean(nulls), rel=1e-4)


def test_details_add_up_to_the_score(folder: Any):
    scores = hl.score(marked("bert", True), [Delimiter()], n_prompts=3, haystack=folder)
    parts = scores.details.pivot_table(index=["layer", "head"], columns="detail", values="value")
    assert set(parts.columns) == {"to_special", "to_sentence_end", "to_comma"}
    whole = scores.frame.set_index(["layer", "head"])["score"]
    assert np.allclose(parts.sum(axis=1), whole, atol=1e-6)


# -- what is claimed -----------------------------------------------------------------------------


@contextmanager
def reading(model: hl.Model, head: str, wanted: tuple[int, ...]) -> Iterator[None]:
    """One head made to attend to tokens of some ids; best in the last layer, where no other reads what it does."""
    ids: list[torch.Tensor] = []
    embeddings = model.module.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda module, args: ids.append(args[0]))

    def toward(scores: torch.Tensor, where: Any) -> torch.Tensor:
        liked = torch.isin(ids[-1], torch.tensor(wanted))
        liked[:, 0] = False
        return scores + 30.0 * liked[:, None, None, :]

    try:
        with model.edit(hl.apply(head, toward, "scores")):
            yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("family", "wrapped", "ids", "main"),
    [
        ("llama", False, (4, 5), {"to_sentence_end", "to_comma"}),
        ("llama", False, (4,), {"to_sentence_end"}),
        ("gpt_oss", False, (5,), {"to_comma"}),
        ("bert", True, (2,), {"to_special"}),
    ],
)
def test_a_head_that_reads_delimiters_is_claimed_and_no_other(
    family: str, wrapped: bool, ids: tuple[int, ...], main: set[str], folder: Any
):
    model = marked(family, wrapped)
    with reading(model, "L1H1", ids):
        scores = hl.score(model, [Delimiter()], n_prompts=12, haystack=folder)
    assert scores.claimed("delimiter") == ["L1H1"]
    parts = scores.details.query("layer == 1 and head == 1").set_index("detail")["value"]
    assert set(parts[parts > 0.2].index) == main


def test_a_head_that_reads_other_words_is_not_claimed(folder: Any):
    model = marked("llama")
    with reading(model, "L1H1", tuple(range(6, 20))):
        scores = hl.score(model, [Delimiter()], n_prompts=12, haystack=folder)
    assert scores.claimed("delimiter") == []


def test_the_planted_heads_are_no_delimiter_heads():
    """The sink least of all: the first position is not counted."""
    scores = hl.score(planted_model(), [Delimiter()], n_prompts=12)
    assert scores.claimed("delimiter") == []
    assert scores.frame["score"].notna().all()


def random_model(kind: Any, config: Any, seed: int) -> hl.Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return hl.load(kind(config).eval(), tokenizer=smollm2().tokenizer)


@pytest.mark.parametrize("scale", [1 / 24, 0.12])
def test_randomly_initialised_heads_are_claimed_for_nothing(scale: float):
    shared = {"vocab_size": 49152, "initializer_range": scale, "bos_token_id": 1, "eos_token_id": 2}
    llama = LlamaConfig(
        hidden_size=144, intermediate_size=384, num_hidden_layers=5, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True, **shared,
    )  # fmt: skip
    gpt2 = GPT2Config(n_embd=144, n_layer=5, n_head=9, n_positions=512, **shared)
    for model in (random_model(LlamaForCausalLM, llama, 0), random_model(GPT2LMHeadModel, gpt2, 1)):
        scores = hl.score(model, [Delimiter()], n_prompts=12)
        assert scores.claimed("delimiter") == []
        assert scores.frame["score"].notna().all()


# -- what cannot be measured ---------------------------------------------------------------------


def test_a_text_without_delimiters_is_not_measurable(tmp_path: Any):
    (tmp_path / "words.txt").write_text(" ".join(["w7 w8 w9"] * 800), "utf-8")
    frame = hl.score(marked("llama"), [Delimiter()], n_prompts=3, haystack=tmp_path).frame
    assert (frame["note"] == "not measurable: the text holds no delimiter").all()
    assert frame["score"].isna().all()


def test_a_model_without_a_tokenizer_is_not_measurable():
    frame = hl.score(hl.load(build("llama")), [Delimiter()], n_prompts=3).frame
    assert frame["note"].str.startswith("not measurable").all()


def test_records_are_read_and_one_without_a_delimiter_does_not_count():
    words = " ".join(WORDS[6:] * 2)
    records = [
        {"text": words.replace(" w9 ", " , ")},
        {"text": words.replace(" w9 ", " . ")},
        {"text": words},
    ]
    scores = hl.score(marked("llama"), [Delimiter()], data={"delimiter": records})
    assert (scores.frame["n"] == 2).all()
    assert (scores.frame["note"].str.contains("1 of 3 texts hold no delimiter")).all()
    short = [*records[:1], {"text": "w8 , w9"}]
    with pytest.raises(hl.tasks.RecordError, match="record 1"):
        hl.score(marked("llama"), [Delimiter()], data={"delimiter": short})


@pytest.mark.parametrize("family", ["mistral", "llama4_text", "gemma3_text", "roberta"])
def test_windows_and_chunks_are_scored_on_the_rows_that_see_a_delimiter(family: str, folder: Any):
    found = Delimiter().measure(Probing(marked(family), n_prompts=2, haystack=folder))
    assert not np.isnan(found.values).any()
    assert ((found.values >= 0) & (found.values <= 1)).all()


@pytest.mark.slow
def test_the_real_models_marks_are_found_where_they_stand():
    probing = Probing(smollm2(), n_prompts=6)
    texts = delimited_texts(probing)
    kinds = token_kinds(smollm2(), texts)
    for ids, found in zip(texts, kinds, strict=True):
        text = [smollm2().tokenizer.decode([token]) for token in ids]
        for mark, kind in ((".", 1), (",", 2), ("\n", 3)):
            places = [at for at, token in enumerate(text) if token in (mark, mark * 2)]
            assert (found[places] == kind).all()
        assert found[0] == 0
        letters = [at for at, token in enumerate(text) if any(c.isalnum() for c in token)]
        assert (found[letters[1:]] == -1).all()
