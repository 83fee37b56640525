"""Every role on every kind of model: none raises, and what cannot be measured says why instead of scoring 0.

The models are tiny and random, but they can read: their tokenizer is a byte-level BPE learned from headlab's essays,
and their context holds every probe at its default length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import BOS, EOS, PAD, UNK, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import headlab as hl
from headlab.roles import ROLES, Probing, confirmation
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.year_effects import last_logits
from headlab.tasks import prose

VOCAB, CONTEXT = 2000, 2048
#: Families, and the layers of each that see fewer than a dozen tokens.
NARROW: dict[str, tuple[int, ...]] = {
    "llama": (),
    "gpt2": (),
    "bert": (),
    "mistral": (0, 1),
    "gemma3_text": (0,),
    "gpt_oss": (0,),
    "llama4_text": (0,),  # its first layer attends within chunks
}
#: Roles whose target lies further back than any of those layers sees, wherever the row.
FAR = (
    "induction",
    "fuzzy_induction",
    "duplicate_token",
    "episodic",
    "long_range",
    "long_context",
    "spans",
)
#: Roles that look at attention to what stands next to the row or anywhere, so that every layer has a score.
NEAR = ("previous_token", "copying", "sink", "delimiter", "positional", "local", "syntactic")

TEXT = "The keeper of the lamp wrote a name into the book. "
SPANS = [
    {
        "text": TEXT + name + " sailed at noon. " + TEXT * 2 + "Who sailed?",
        "from": [3 * len(TEXT) + len(name) + 17, 3 * len(TEXT) + len(name) + 28],
        "to": [len(TEXT), len(TEXT) + len(name)],
        "answer": " " + name,
    }
    for name in ("Ada", "Tom", "Ivy", "Sam")
]
SENTENCES = [
    {
        "words": ["The", noun, "saw", "a", "ship", "."],
        "heads": [1, 2, -1, 4, 2, 2],
        "relations": ["det", "nsubj", "root", "det", "dobj", "punct"],
    }
    for noun in ("keeper", "sailor", "man", "bird")
]
DATA: dict[str, Any] = {"spans": SPANS, "syntactic": SENTENCES}


@cache
def reader() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that nothing is unknown; a beginning-of-sequence token is put before each text."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([prose()], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        **names,
    )


@cache
def model(family: str) -> hl.Model:
    context = "n_positions" if family == "gpt2" else "max_position_embeddings"
    tokenizer = reader()
    return hl.load(
        build(family, vocab_size=len(tokenizer), **{context: CONTEXT}), tokenizer=tokenizer
    )


@cache
def scored(family: str) -> pd.DataFrame:
    return hl.score(model(family), list(ROLES), n_prompts=2, data=DATA).frame


@pytest.mark.parametrize("family", NARROW)
def test_a_head_without_a_score_says_why(family: str):
    frame = scored(family)
    assert set(frame["role"]) == set(ROLES)
    bare = frame[frame["score"].isna()]
    assert bare["note"].str.match("not measurable: |out of window: ").all(), bare["note"].unique()
    assert not frame["claimed"].any()  # two prompts prove nothing


@pytest.mark.parametrize("family", NARROW)
def test_heads_are_out_of_window_exactly_where_no_row_can_see_the_target(family: str):
    frame = scored(family)
    narrow = frame["layer"].isin(NARROW[family])
    far = frame["role"].isin(FAR)
    if family == "bert":
        far &= frame["role"] != "long_context"  # defined for models that read from left to right
    blind = frame[far & narrow]
    assert blind["score"].isna().all()
    assert blind["note"].str.startswith("out of window: ").all()
    seeing = frame[(far & ~narrow) | frame["role"].isin(NEAR)]
    assert seeing["score"].notna().all(), seeing[seeing["score"].isna()]
    assert not seeing["note"].str.startswith("out of window").any()


@pytest.mark.parametrize("family", NARROW)
def test_the_behaviour_of_every_role_that_can_be_measured_can_be_too(family: str):
    measured = scored(family).groupby("role")["score"].count()
    for name, role in ROLES.items():
        if role.behaviour is not None and measured[name]:
            records = DATA.get(name)
            probing = Probing(model(family), n_prompts=2, records=records and tuple(records))
            found = np.asarray(role.behaviour.measure(probing))
            assert found.ndim == 1, name
            assert len(found), name
            assert not np.isinf(found).any(), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
def test_logits_behind_prompts_of_uneven_length_are_those_of_their_last_positions(family: str):
    seen = []
    opened = model(family)
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12), (13, 14, 15), (16,)]
    handle = opened.module.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(inputs[0].shape[:2]))
    )
    try:
        found = last_logits(opened, prompts)
    finally:
        handle.remove()
    assert seen == [(4, 1)]  # no other position's logits were computed
    for row, ids in zip(found, prompts, strict=True):
        torch.testing.assert_close(row, opened.logits([list(ids)])[0, -1], atol=1e-5, rtol=1e-5)


def test_log_probabilities_do_not_depend_on_how_many_prompts_run_at_once(monkeypatch):
    ids = torch.randint(UNK + 1, VOCAB, (5, 9), generator=torch.Generator().manual_seed(0))
    whole = next_token_log_probability(model("llama"), ids)
    wanted = torch.log_softmax(model("llama").logits(ids), -1)[:, :-1]
    torch.testing.assert_close(whole, wanted.gather(-1, ids[:, 1:, None])[..., 0])
    monkeypatch.setattr(confirmation, "_LOGITS", 2 * 9 * VOCAB)
    torch.testing.assert_close(next_token_log_probability(model("llama"), ids), whole)
