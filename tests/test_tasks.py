"""Probe data is what it says: positions, distinctness, spans, lengths, depths, determinism."""

from __future__ import annotations

import copy
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_model import smollm2
from tiny_models import SPECIAL_IDS, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headlab.errors import PromptError
from headlab.tasks import (
    NEEDLES,
    Needle,
    NeedleTrial,
    needle_trials,
    plain_tokens,
    prose,
    prose_windows,
    random_tokens,
    repeated_tokens,
)
from headlab.tasks.needles import bare_length, draw_needles, prompt_trial, token_span

# -- tokenizers of several makes -----------------------------------------------------------------


@cache
def smol(chat: bool) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer with or without its chat template."""
    tokenizer = smollm2().tokenizer
    if chat:
        assert tokenizer.chat_template is not None
        return tokenizer
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    return plain


@cache
def trained(make: str) -> PreTrainedTokenizerFast:
    """A tokenizer of another make, trained on the essays."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    if make == "byte_level":  # GPT-2: offsets leave the leading space out
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
        backend.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    elif make == "metaspace":  # Llama and T5: the leading space belongs to the token
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
        # SentencePiece keeps punctuation apart from letters.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
        )
        backend.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special)
    else:  # BERT
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special)
    needles = [part for needle in NEEDLES for part in (needle.fact, needle.question)]
    backend.train_from_iterator([prose()[:60_000], *needles], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tokenizer_of(make: str) -> PreTrainedTokenizerFast:
    if make.startswith("smollm2"):
        return smol(make == "smollm2 chat")
    return trained(make)


MAKES = ["smollm2 chat", "smollm2", "byte_level", "metaspace", "wordpiece"]


# -- random tokens -------------------------------------------------------------------------------

REPEATS = {"after BOS": 1, "without BOS": None}


@pytest.mark.parametrize("bos", REPEATS.values(), ids=REPEATS.keys())
def test_every_query_of_the_second_copy_has_exactly_one_target_of_each_kind(bos: int | None):
    n = 13
    made = repeated_tokens(np.arange(10, 90), 5, n, 0, bos)
    assert made.start == (0 if bos is None else 1)
    assert made.n == n
    assert made.repeated.shape == made.control.shape == (5, made.start + 2 * n)
    second = made.second_copy.tolist()
    assert second == list(range(made.start + n + 1, made.start + 2 * n))
    for row in made.repeated.tolist():
        if bos is not None:
            assert row[0] == bos
        for query in second:
            earlier = [at for at in range(query) if row[at] == row[query]]
            assert earlier == [query - n]
            # What followed last time: known, in the first copy or the first token of the second.
            assert row[earlier[0] + 1] == (
                row[query + 1] if query + 1 < len(row) else row[query - n + 1]
            )
            assert row[query - 1] == row[earlier[0] - 1]  # the prefix matches


@pytest.mark.parametrize("bos", REPEATS.values(), ids=REPEATS.keys())
def test_controls_share_the_first_half_and_repeat_nothing(bos: int | None):
    n = 20
    made = repeated_tokens(np.arange(10, 60), 30, n, 3, bos)
    half = made.start + n
    assert torch.equal(made.control[:, :half], made.repeated[:, :half])
    for row, control in zip(made.repeated.tolist(), made.control.tolist(), strict=True):
        assert row[made.start : half] == row[half:]
        assert len(set(control)) == len(control)
        assert not set(control[half:]) & set(row)


def test_random_tokens_are_distinct_within_a_row_and_set_by_the_seed():
    plain = np.arange(5, 45)
    rows = random_tokens(plain, 40, 40, 7)
    assert all(sorted(row) == list(plain) for row in rows.tolist())
    assert np.array_equal(rows, random_tokens(plain, 40, 40, 7))
    assert not np.array_equal(rows, random_tokens(plain, 40, 40, 8))
    assert len({tuple(row) for row in rows.tolist()}) == 40


def test_random_tokens_are_uniform_over_positions():
    rows = random_tokens(np.arange(20), 4000, 5, 0)
    counts = np.stack([np.bincount(rows[:, at], minlength=20) for at in range(5)])
    expected = 4000 / 20
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_too_few_tokens_are_refused_in_one_sentence():
    with pytest.raises(PromptError, match=r"vocabulary has 9 plain tokens.* probe of 10"):
        random_tokens(np.arange(9), 1, 10, 0)
    with pytest.raises(PromptError):
        repeated_tokens(np.arange(19), 1, 10, 0, 1)


def test_plain_tokens_leave_out_every_special_and_added_token():
    tokenizer = smollm2().tokenizer
    plain = plain_tokens(tokenizer, smollm2().spec.n_vocab)
    assert len(plain) > 49_000
    assert not set(plain.tolist()) & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    added = tokenizer.get_added_vocab()
    assert {"<|im_start|>", "<|im_end|>"} <= set(added)
    assert not set(plain.tolist()) & set(added.values())
    tiny = plain_tokens(tiny_tokenizer(), 97)
    assert tiny.tolist() == list(range(4, 97))
    assert not set(tiny.tolist()) & set(SPECIAL_IDS.values())


def test_plain_tokens_exist_in_both_the_tokenizer_and_the_embedding():
    assert plain_tokens(tiny_tokenizer(), 60).tolist() == list(range(4, 60))
    assert plain_tokens(tiny_tokenizer(), 128).tolist() == list(range(4, 97))
    assert plain_tokens(None, 12).tolist() == list(range(12))


# -- prose ---------------------------------------------------------------------------------------


class Numbered:
    """A tokenizer to which every word of a text is a token of its own: word i is token i."""

    is_fast = False

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        assert options.get("add_special_tokens") is False
        return {"input_ids": list(range(len(text.split())))}


@pytest.mark.parametrize("bos", [None, 9999])
def test_windows_are_unbroken_do_not_overlap_and_start_with_bos(bos: int | None):
    windows = prose_windows(Numbered(), "word " * 500, 24, 20, 5, bos)
    assert windows.shape == (24, 20)
    body = windows
    if bos is not None:
        assert (windows[:, 0] == bos).all()
        body = windows[:, 1:]
    assert (body[:, 1:] - body[:, :-1] == 1).all()
    assert len(set(body.flatten().tolist())) == body.numel()
    assert body.max() < 500
    assert torch.equal(windows, prose_windows(Numbered(), "word " * 500, 24, 20, 5, bos))
    assert not torch.equal(windows, prose_windows(Numbered(), "word " * 500, 24, 20, 6, bos))


def test_windows_of_the_essays_are_stretches_of_the_essays():
    model, text = smollm2(), prose()
    windows = prose_windows(model.tokenizer, text, 20, 384, 0, 1)
    assert windows.shape == (20, 384)
    assert (windows[:, 0] == 1).all()
    assert not torch.isin(windows[:, 1:], torch.tensor(model.tokenizer.all_special_ids)).any()
    found = [text.find(model.text(window[1:])) for window in windows]
    assert min(found) >= 0
    assert len(set(found)) == 20


def test_a_text_too_short_for_its_windows_is_refused():
    prose_windows(Numbered(), "word " * 190, 10, 20, 0, 1)
    with pytest.raises(PromptError, match="189 tokens, but 10 windows of 19"):
        prose_windows(Numbered(), "word " * 189, 10, 20, 0, 1)


def test_there_are_twenty_thousand_tokens_of_prose():
    ids = smollm2().tokenizer(prose(), add_special_tokens=False, verbose=False)["input_ids"]
    assert len(ids) >= 20_000


def test_a_folder_of_texts_is_read_in_the_order_of_names(tmp_path: Path):
    for name, text in (("b.txt", " second\n"), ("a.txt", "first é"), ("c.md", "x"), ("d.txt", " ")):
        (tmp_path / name).write_text(text, "utf-8")
    assert prose(tmp_path) == "first é\n\nsecond"


def test_folders_without_text_are_refused_by_name(tmp_path: Path):
    for what in ("empty", "blank", "other", "absent", "binary"):
        folder = tmp_path / what
        if what != "absent":
            folder.mkdir()
        if what == "blank":
            (folder / "a.txt").write_text(" \n\t", "utf-8")
        if what == "other":
            (folder / "a.md").write_text("text", "utf-8")
        if what == "binary":
            (folder / "a.txt").write_bytes(b"\xff\xfe\x00\x01")
        with pytest.raises(PromptError, match=re.escape(str(folder))) as caught:
            prose(folder)
        assert "\n" not in str(caught.value)


def test_prose_sees_that_a_text_was_changed(tmp_path: Path):
    (tmp_path / "a.txt").write_text("first", "utf-8")
    assert prose(tmp_path) == "first"
    (tmp_path / "a.txt").write_text("second", "utf-8")
    assert prose(tmp_path) == "second"


# -- needles -------------------------------------------------------------------------------------

SENTENCE = re.compile(r"(?<=[.!?])\s+")


def content(trial: NeedleTrial, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(trial.ids, clean_up_tokenization_spaces=False)


def answer_text(trial: NeedleTrial, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(
        trial.ids[slice(*trial.span)], clean_up_tokenization_spaces=False
    ).strip()


@cache
def longest_bare(make: str) -> int:
    return max(bare_length(tokenizer_of(make), needle) for needle in NEEDLES)


@cache
def trials_of(make: str) -> tuple[NeedleTrial, ...]:
    """Needles at several lengths and depths."""
    lengths = (max(256, longest_bare(make)), 700)
    return needle_trials(tokenizer_of(make), prose(), lengths, (0.0, 0.3, 0.5, 0.9, 1.0), 40, 0)


@pytest.mark.parametrize("make", MAKES)
def test_spans_decode_to_the_exact_answer_for_every_needle(make: str):
    tokenizer = tokenizer_of(make)
    length = longest_bare(make) + 30
    trials = needle_trials(tokenizer, prose(), (length,), (0.0, 0.5, 1.0), len(NEEDLES), 0)
    assert {trial.needle for trial in trials} == set(NEEDLES)
    for trial in trials:
        assert answer_text(trial, tokenizer) == trial.needle.answer
        start, stop = trial.span
        # One token less on either side is not the answer any more.
        for low, high in ((start + 1, stop), (start, stop - 1)):
            rest = tokenizer.decode(trial.ids[low:high], clean_up_tokenization_spaces=False)
            assert trial.needle.answer not in rest


@pytest.mark.parametrize("make", MAKES)
def test_prompts_reach_their_length_within_a_sentence(make: str):
    tokenizer = tokenizer_of(make)
    sentences = SENTENCE.split(prose())
    longest = max(
        len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
        for sentence in sentences
    )
    for trial in trials_of(make):
        assert trial.length - longest <= len(trial.ids) <= trial.length


@pytest.mark.parametrize("make", ["smollm2 chat", "smollm2"])
def test_needles_lie_at_their_depth_within_a_sentence(make: str):
    tokenizer = tokenizer_of(make)
    for trial in trials_of(make):
        text = content(trial, tokenizer)
        if make == "smollm2 chat":
            text = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        context, _, task = text.partition("\n\nBased on the content")
        assert trial.needle.question in task
        before, _, after = context.partition(trial.needle.fact)
        n_before = len(SENTENCE.split(before.strip())) if before.strip() else 0
        n_after = len(SENTENCE.split(after.strip())) if after.strip() else 0
        assert abs(n_before - trial.depth * (n_before + n_after)) <= 1
        if trial.depth in (0.0, 1.0):
            assert (n_before if trial.depth == 0 else n_after) == 0


def test_deep_needles_stand_where_their_depth_says_in_tokens_too():
    trials = needle_trials(smol(False), prose(), (1024,), (0.1, 0.5, 0.9), 30, 1)
    for trial in trials:
        assert trial.span[0] / trial.length == pytest.approx(trial.depth, abs=0.12)


def test_a_chat_template_puts_the_prompt_into_a_users_turn_once():
    for trial in trials_of("smollm2 chat"):
        text = content(trial, smol(True))
        assert text.count("<|im_start|>user\n") == 1
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert trial.ids.count(1) == text.count("<|im_start|>")
    for trial in trials_of("smollm2"):
        assert content(trial, smol(False)).endswith("\nAnswer:")
        assert not set(trial.ids) & set(smol(False).all_special_ids)


def test_trials_spread_evenly_over_lengths_depths_and_needles_whatever_the_seed():
    lengths, depths = (256, 300, 400), (0.2, 0.8)
    for seed in range(3):
        trials = needle_trials(smol(False), prose(), lengths, depths, 27, seed)
        cells = Counter((trial.length, trial.depth) for trial in trials)
        assert len(cells) == 6
        assert max(cells.values()) - min(cells.values()) <= 1
        needles = Counter(trial.needle for trial in trials)
        assert max(needles.values()) - min(needles.values()) <= 1


def test_needle_trials_are_set_by_the_seed():
    def make(seed: int) -> tuple[NeedleTrial, ...]:
        return needle_trials(smol(True), prose(), (300,), (0.3, 0.7), 6, seed)

    assert make(4) == make(4)
    assert make(4) != make(5)
    assert len({trial.ids for trial in make(4)}) == 6


def test_no_text_and_no_question_gives_an_answer_away():
    text = prose().lower()
    for needle in NEEDLES:
        assert needle.answer.lower() not in text
        words = set(re.findall(r"\w+", needle.answer.lower()))
        # Parroting the question must not count as recalling the needle.
        assert not words & set(re.findall(r"\w+", needle.question.lower()))
        assert re.findall(r"\w+", needle.fact.lower()).count(min(words)) == 1


def test_there_are_several_hundred_needles_of_every_kind_with_answers_between_spaces():
    assert len(set(NEEDLES)) == len(NEEDLES) == 400
    assert len({needle.answer for needle in NEEDLES}) > 250
    kinds = Counter(
        "name"
        if needle.question.startswith("Who")
        else "number"
        if needle.answer.isdigit()
        else "other"
        for needle in NEEDLES
    )
    assert kinds == {"name": 80, "number": 80, "other": 240}
    for needle in NEEDLES:
        assert f" {needle.answer} " in needle.fact
        assert not re.search(r"[{}]", needle.fact + needle.question)


def test_needles_are_drawn_evenly_over_templates_and_set_by_the_seed():
    assert draw_needles(90, 3) == draw_needles(90, 3)
    assert len(set(draw_needles(90, 3)) & set(draw_needles(90, 4))) < 20
    openings = Counter(needle.question.split()[0] for needle in draw_needles(80, 5))
    assert openings == Counter(needle.question.split()[0] for needle in draw_needles(80, 6))


def test_a_needle_must_hold_its_answer_once():
    with pytest.raises(PromptError, match="exactly once"):
        Needle("The fox ate plums and plums.", "What?", "plums")
    with pytest.raises(PromptError, match="exactly once"):
        Needle("The fox ate.", "What?", "plums")


@pytest.mark.parametrize("make", ["smollm2 chat", "smollm2", "byte_level"])
@pytest.mark.parametrize(
    "answer", ["naïve 🦊 foxes", "(plums)", "42", "“smoked eels”", "日本の茶", "x"]
)
def test_answers_of_many_bytes_and_punctuation_are_found_exactly(make: str, answer: str):
    needle = Needle(f"The keeper of Orlen serves {answer} , every evening.", "What?", answer)
    (trial,) = needle_trials(tokenizer_of(make), prose(), (256,), (0.5,), 1, 0, (needle,))
    assert answer_text(trial, tokenizer_of(make)) == answer


@pytest.mark.parametrize("answer", ["?!", "—"])
def test_an_answer_without_a_word_is_refused(answer: str):
    with pytest.raises(PromptError, match="holds no word"):
        Needle(f"The fox said {answer} twice.", "What?", answer)
    with pytest.raises(PromptError, match="holds no word"):
        prompt_trial(smol(False), f"The fox said {answer} twice.", answer)


@pytest.mark.parametrize("make", MAKES)
def test_a_whole_prompt_is_taken_as_it_is_and_its_answer_found(make: str):
    tokenizer = tokenizer_of(make)
    prompt = "the ferry brings honey and the mill sells honey . what does the mill sell ?"
    for nth, start in enumerate((prompt.index("honey"), prompt.rindex("honey"))):
        trial = prompt_trial(tokenizer, prompt, "honey", start)
        assert list(trial.ids) == tokenizer(prompt)["input_ids"]  # no chat template around it
        assert answer_text(trial, tokenizer) == "honey"
        before = tokenizer.decode(trial.ids[: trial.span[0]], clean_up_tokenization_spaces=False)
        assert before.count("honey") == nth
        assert trial.needle is None
    assert prompt_trial(tokenizer, prompt, "ferry brings").answer == "ferry brings"


@pytest.mark.parametrize(
    ("answer", "start", "said"),
    [
        ("jam", None, "does not stand in the prompt"),
        ("plum", None, "stands in the prompt 2 times; say which with answer_start"),
        ("plum", 1, "does not stand at character 1 of the prompt"),
        ("lum", 1, "straddles the edge of 'lum'"),
        ("pear", None, "straddles the edge of 'pear'"),
    ],
)
def test_an_answer_that_cannot_be_found_in_a_prompt_is_refused(answer, start, said):
    with pytest.raises(PromptError, match=said):
        prompt_trial(smol(False), "plum, fig, plum, pearls.", answer, start)


def test_straddling_tokens_are_refused():
    needle = Needle("The keeper of Orlen sells pottery every evening.", "What?", "potter")
    with pytest.raises(PromptError, match="straddles the edge of 'potter'"):
        needle_trials(smol(False), prose(), (256,), (0.5,), 1, 0, (needle,))
    needle = Needle("The keeper of Orlen sells pottery every evening.", "What?", "ottery")
    with pytest.raises(PromptError, match="straddles"):
        needle_trials(smol(False), prose(), (256,), (0.5,), 1, 0, (needle,))


@st.composite
def tokenised(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], int, int]:
    """A text cut into tokens, some of them empty, and a span that begins and ends with a letter."""
    text = draw(st.text(alphabet="ab ", min_size=2, max_size=14))
    cuts = sorted({0, len(text), *draw(st.sets(st.integers(0, len(text))))})
    offsets = list(pairwise(cuts))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(offsets)))
        offsets.insert(at, (0, 0))  # a special token
    letters = [at for at, letter in enumerate(text) if letter != " "]
    if not letters:
        return "ab", [(0, 2)], 0, 2
    start = draw(st.sampled_from(letters))
    stop = draw(st.sampled_from([at + 1 for at in letters if at >= start]))
    return text, offsets, start, stop


@given(tokenised())
def test_a_token_span_covers_the_characters_and_nothing_but_blanks_before_or_is_refused(
    case: tuple[str, list[tuple[int, int]], int, int],
):
    text, offsets, start, stop = case
    touching = [
        at
        for at, (low, high) in enumerate(offsets)
        if any(start <= character < stop for character in range(low, high))
    ]
    low, high = offsets[touching[0]][0], offsets[touching[-1]][1]
    exact = high == stop and text[low:high].lstrip(" ") == text[start:stop].lstrip(" ")
    if exact and low <= start and text[low:start].strip() == "":
        assert token_span(offsets, start, stop, text) == (touching[0], touching[-1] + 1)
    else:
        with pytest.raises(PromptError, match="straddles"):
            token_span(offsets, start, stop, text)


def test_characters_no_token_covers_are_refused():
    with pytest.raises(PromptError, match="no token covers 'b'"):
        token_span([(0, 1), (2, 3), (0, 0)], 1, 2, "abc")


def test_a_text_or_a_length_too_short_is_refused():
    with pytest.raises(PromptError, match="too short for a prompt of 600"):
        needle_trials(smol(False), "One sentence. And another.", (600,), (0.5,), 1, 0)


def test_a_length_that_cannot_hold_the_question_is_refused():
    # Nothing may be longer than was asked for: a window or a context may depend on it.
    with pytest.raises(PromptError):
        needle_trials(smol(True), prose(), (32,), (0.5,), 1, 0)


def test_needles_need_a_tokenizer_with_offsets():
    for tokenizer in (None, Numbered()):
        with pytest.raises(PromptError, match="character offsets"):
            needle_trials(tokenizer, prose(), (256,), (0.5,), 1, 0)
