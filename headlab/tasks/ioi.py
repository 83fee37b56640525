"""Indirect object identification (Wang et al. 2023): "When Mary and John met at the market, John handed a map to".

The answer is the name that stands once. Templates, names and things are headlab's own words, after the paper's kind of
sentence. The corrupted prompt is the paper's ABC one: three other names, one in each place, so that nothing tells
who receives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from headlab.errors import PromptError
from headlab.tasks.needles import token_span
from headlab.tasks.prose import data_folder

_LEAST_NAMES = 6


@dataclass(frozen=True)
class IOIPrompt:
    """One prompt and its corruption, of the same length and differing in the names only.

    Attributes:
        ids: Token ids of the prompt; its last predicts the answer.
        corrupted: The same with three other names.
        text: The prompt.
        corrupted_text: The corrupted prompt.
        io: Token of the indirect object's name, the answer.
        subject: Token of the name that stands twice.
        spans: Positions [start, stop) of ``"IO"``, ``"S1"``, ``"S1+1"`` (the token after the subject's first),
            ``"S2"`` and ``"END"``.
        template: Number of the template; mean ablation must be per template and order.
        order: ``"ABBA"`` where the indirect object comes first, ``"BABA"`` where the subject does.
    """

    ids: tuple[int, ...]
    corrupted: tuple[int, ...]
    text: str
    corrupted_text: str
    io: int
    subject: int
    spans: Mapping[str, tuple[int, int]]
    template: int
    order: Literal["ABBA", "BABA"]


def ioi_prompts(
    tokenizer: Any, n_prompts: int, seed: int, bos: int | None = None
) -> tuple[IOIPrompt, ...]:
    """Distinct prompts, spread evenly over templates and both orders.

    Args:
        tokenizer: Must give character offsets and have enough of the names as single tokens.
        n_prompts: How many prompts.
        seed: Seed of names, places and objects.
        bos: Beginning-of-sequence token to put first, or None.

    Raises:
        PromptError: There is no such tokenizer.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError(
            "IOI prompts need a tokenizer that gives character offsets (a fast tokenizer)"
        )
    data = _data()
    names = single_token_names(tokenizer)
    if len(names) < _LEAST_NAMES:
        raise PromptError(
            f"the tokenizer has {len(names)} of the names as single tokens, but IOI needs {_LEAST_NAMES}"
        )
    rng = np.random.default_rng(seed)
    kinds = [(at, order) for at in range(len(data["templates"])) for order in ("ABBA", "BABA")]
    rng.shuffle(kinds)
    found: dict[str, IOIPrompt] = {}
    while len(found) < n_prompts:
        at, order = kinds[len(found) % len(kinds)]
        at = int(at)
        io, subject, *others = rng.choice(sorted(names), 5, replace=False).tolist()
        filled = {
            "place": str(rng.choice(data["places"])),
            "object": str(rng.choice(data["objects"])),
        }
        template = data["templates"][at]
        prompt = _prompt(tokenizer, names, template, filled, (io, subject), others, order, bos, at)
        found.setdefault(prompt.text, prompt)
    return tuple(found.values())


def single_token_names(tokenizer: Any) -> dict[str, int]:
    """The names that are one token in the middle of a sentence, with it."""
    known = {}
    for name in _data()["names"]:
        ids = tokenizer(f"Then {name} and", add_special_tokens=False)["input_ids"]
        without = tokenizer("Then and", add_special_tokens=False)["input_ids"]
        if len(ids) == len(without) + 1 and tokenizer.decode(ids[-2:-1]).strip() == name:
            known[name] = int(ids[-2])
    return known


def _prompt(
    tokenizer: Any,
    names: Mapping[str, int],
    template: str,
    filled: Mapping[str, str],
    people: tuple[str, str],
    others: list[str],
    order: Any,
    bos: int | None,
    at: int,
) -> IOIPrompt:
    io, subject = people
    first, second = (io, subject) if order == "ABBA" else (subject, io)
    text, places = _fill(template, {"A": first, "B": second, "S": subject} | dict(filled))
    other, _ = _fill(template, dict(zip("ABS", others, strict=True)) | dict(filled))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    corrupted = list(tokenizer(other, add_special_tokens=False)["input_ids"])
    if len(corrupted) != len(ids):
        raise PromptError(f"the names of {text!r} and {other!r} differ in tokens")
    shift = int(bos is not None)
    spans = {}
    for who, (start, stop) in places.items():
        low, high = token_span(encoded["offset_mapping"], start, stop, text)
        spans[who] = (low + shift, high + shift)
    named = {
        "IO": spans["A" if order == "ABBA" else "B"],
        "S1": spans["B" if order == "ABBA" else "A"],
        "S2": spans["S"],
        "END": (len(ids) + shift - 1, len(ids) + shift),
    }
    named["S1+1"] = (named["S1"][1], named["S1"][1] + 1)
    begin = [] if bos is None else [bos]
    return IOIPrompt(
        (*begin, *ids), (*begin, *corrupted), text, other, names[io], names[subject], named, at, order
    )  # fmt: skip


def _fill(template: str, words: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """The text, and the characters of each name."""
    text, places = "", {}
    for part in template.replace("}", "{").split("{"):
        start = len(text)
        text += words.get(part, part)
        if part in ("A", "B", "S"):
            places[part] = (start, len(text))
    return text, places


@cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((data_folder() / "ioi.json").read_text("utf-8"))
    return loaded
