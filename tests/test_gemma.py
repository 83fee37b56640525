"""Gemma 3 270M: 15 of its 18 layers see the last 512 tokens only, and its vocabulary has 262 144 tokens.

Skipped unless the environment variable HEADLAB_GEMMA holds the path of a .gguf file of the model, of whatever
quantisation. The first run converts it, which takes a minute or two and half a gigabyte of headlab's cache.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pandas as pd
import pytest

import headlab as hl
from headlab.roles.long_context import LongContext
from headlab.tasks import prose

PATH = os.environ.get("HEADLAB_GEMMA", "")
WINDOW = 512
GLOBAL = (5, 11, 17)
#: Roles whose probes are short, so that no window of 512 tokens hides anything from them.
SHORT = (
    "induction,natural_induction,fuzzy_induction,copying,episodic,previous_token,duplicate_token,successor,sink,"
    "delimiter,positional,local,long_range"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PATH, reason="HEADLAB_GEMMA names no .gguf file"),
]


@cache
def gemma() -> hl.Model:
    return hl.load(PATH, device="cpu", dtype="float32")


@cache
def stretch(n: int) -> str:
    """Text that is exactly so many tokens long."""
    tokenizer = gemma().tokenizer
    ids = tokenizer(prose(), add_special_tokens=False, verbose=False)["input_ids"][:n]
    text = tokenizer.decode(ids)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    return str(text)


def scored(roles: Any, **options: Any) -> pd.DataFrame:
    frame = hl.score(gemma(), roles, **options).frame
    bare = frame[frame["score"].isna()]
    assert bare["note"].str.match("not measurable: |out of window: ").all(), bare["note"].unique()
    return frame


def assert_only_global_layers_see(frame: pd.DataFrame) -> None:
    sees = frame["layer"].isin(GLOBAL)
    assert frame[sees]["score"].gt(0).all()
    assert not frame[sees]["note"].str.contains("out of window").any()
    assert frame[~sees]["score"].isna().all()
    assert frame[~sees]["note"].str.startswith("out of window: ").all()


def test_the_windows_are_those_of_the_published_model():
    windows = [layer.window for layer in gemma().spec.layers]
    assert windows == [None if at in GLOBAL else WINDOW for at in range(18)]


def test_short_probes_measure_every_head():
    frame = scored(SHORT, n_prompts=2)
    assert frame["score"].notna().all()
    assert not frame["note"].str.contains("out of window").any()


def test_the_window_ends_between_the_targets_of_induction_and_of_duplicate_tokens():
    """x of 512 tokens, twice: the follower lies 511 tokens back, the last key a window of 512 holds; the token 512."""
    frame = scored(
        "induction,duplicate_token",
        data={key: [{"text": stretch(WINDOW)}] for key in ("induction", "duplicate_token")},
    )
    follower = frame[frame["role"] == "induction"]
    assert follower["score"].gt(0).all()
    assert not follower["note"].str.contains("out of window").any()
    assert_only_global_layers_see(frame[frame["role"] == "duplicate_token"])


def test_a_span_is_seen_as_far_as_the_window_reaches():
    text = stretch(600)
    offsets = gemma().tokenizer(text, return_offsets_mapping=True)["offset_mapping"]

    def back(n: int) -> pd.DataFrame:
        record = {"text": text, "from": list(offsets[-1]), "to": list(offsets[-1 - n])}
        return scored("spans", data={"spans": [record]})

    assert back(WINDOW - 1)["score"].gt(0).all()
    assert_only_global_layers_see(back(WINDOW))


@pytest.mark.parametrize(("tokens", "reached"), [(400, True), (680, False)])
def test_retrieval_out_of_reach_is_not_scored(tokens: int, reached: bool):
    fact = "The password of the old archive is"
    prompt = f"{fact} plum harvest. {stretch(tokens)}\n\n{fact}"
    record = {"prompt": prompt, "answer": "plum harvest"}
    frame = scored("retrieval", data={"retrieval": [record]})
    sees = frame["layer"].isin(GLOBAL)
    assert frame[sees | reached]["score"].notna().all()
    assert frame[sees]["score"].max() == 1  # some head copies every token of the answer
    assert frame["note"].str.startswith("out of window: ").eq(~sees & (not reached)).all()


def test_a_bulk_that_the_window_holds_too_little_of_is_out_of_window():
    # Of the 1948 tokens of a bulk that ends 96 tokens before the text does, a window of 512 holds 416.
    assert_only_global_layers_see(scored([LongContext(length=2048)], n_prompts=2))
