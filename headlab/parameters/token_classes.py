"""Classes of tokens that a describer can name without a language model: by their characters, and by word lists.

Word lists come from headlab's relations and ordered lists: they are short, so a token outside a list may well be of its
class. A class's share of the whole vocabulary is what a random token would give.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from headlab.tasks import data_folder, relations

#: Marks of a word's beginning, in byte-pair and in SentencePiece vocabularies.
_STARTS = ("Ġ", "▁", " ")
#: Classes by word list: which side of which relations.
_LISTS: Mapping[str, tuple[str, ...]] = {
    "first names": ("name_pronoun/sources", "surname_first_name/targets"),
    "surnames": ("surname_first_name/sources", "person_field/sources"),
    "countries": ("country_capital/sources", "country_continent/sources"),
    "cities": ("city_country/sources", "country_capital/targets"),
    "nationalities and languages": ("country_nationality/targets", "country_language/targets"),
    "companies": ("product_company/targets",),
    "products": ("product_company/sources",),
    "animals": ("animal_young/sources",),
    "chemical elements": ("element_symbol/sources",),
    "professions": ("profession_workplace/sources", "agent_noun/targets"),
    "fields of study": ("person_field/targets",),
    "colours": ("thing_colour/targets",),
    "base verbs": ("past_tense/sources",),
    "past tenses": ("past_tense/targets",),
    "present participles": ("present_participle/targets",),
    "adjectives": ("comparative/sources", "adverb/sources"),
    "comparatives and superlatives": ("comparative/targets", "superlative/targets"),
    "adverbs": ("adverb/targets",),
    "number words and ordinals": ("number_ordinal/sources", "number_ordinal/targets"),
    "French words": ("english_french/targets",),
    "Spanish words": ("english_spanish/targets",),
    "German words": ("english_german/targets",),
}
_SEQUENCES: Mapping[str, tuple[str, ...]] = {
    "days and months": ("days", "short days", "months", "short months"),
}
_CODE = re.compile(r"_|[a-z][A-Z]|[(){}\[\];=<>]|::|->|//|\w\.\w")
_PUNCTUATION = frozenset("PS")


def word_of(text: str) -> str:
    """A token's text as words are compared: without spaces around it and in small letters."""
    return text.strip().casefold()


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Tokens as text, with one space in front where the token begins a word."""
    raw = tokenizer.convert_ids_to_tokens([int(token) for token in ids])
    texts = []
    for token, name in zip(ids, raw, strict=True):
        if name is None:
            texts.append("")
            continue
        text = tokenizer.decode([int(token)])
        # SentencePiece drops the space of a text's first token.
        starts = name.startswith(_STARTS) and text.strip() and not text.startswith(" ")
        texts.append(f" {text}" if starts else text)
    return texts


@lru_cache(1 << 18)
def classes_of(text: str) -> frozenset[str]:
    """The classes a token's text falls in."""
    found = {name for name, fits in _FORMS.items() if fits(text)}
    return frozenset(found | _listed().get(word_of(text), frozenset()))


def class_shares(texts: Sequence[str]) -> dict[str, float]:
    """Each class's share of a vocabulary, for every class there is."""
    counts = dict.fromkeys((*_FORMS, *_LISTS, *_SEQUENCES), 0)
    for text in texts:
        for name in classes_of(text):
            counts[name] += 1
    return {name: count / len(texts) for name, count in counts.items()}


def is_listed(name: str) -> bool:
    """Whether a class is a word list, which many words of its kind are missing from."""
    return name not in _FORMS


def _is_punctuation(text: str) -> bool:
    bare = text.strip()
    return bool(bare) and all(unicodedata.category(sign)[0] in _PUNCTUATION for sign in bare)


def _script(text: str) -> str:
    """The script of a text's letters, or nothing where there are none or they are of several."""
    names = {unicodedata.name(sign, "?").split()[0] for sign in text if sign.isalpha()}
    return names.pop() if len(names) == 1 else ""


def _is_camel(text: str) -> bool:
    return bool(_CODE.search(text)) and len(text.strip()) > 1


_FORMS: Mapping[str, Callable[[str], bool]] = {
    "numbers": lambda text: text.strip().isdecimal(),
    "years": lambda text: bool(re.fullmatch(r"\s?(1[5-9]|20)\d\d", text)),
    "punctuation": _is_punctuation,
    "blank space": lambda text: bool(text) and not text.strip(),
    "single letters": lambda text: len(text.strip()) == 1 and text.strip().isalpha(),
    "capitalised words": lambda text: (
        bool(re.fullmatch(r" [^\W\d_][^\W\d_]+", text)) and text.strip().istitle()
    ),
    "words in capitals": lambda text: (
        len(text.strip()) > 1 and text.strip().isalpha() and text.strip().isupper()
    ),
    "parts inside words": lambda text: text.isalpha() and text.islower() and len(text) > 1,
    "code": _is_camel,
    "accented Latin letters": lambda text: _script(text) == "LATIN" and not text.isascii(),
    "letters of another script": lambda text: _script(text) not in ("", "LATIN"),
    "broken characters": lambda text: "\ufffd" in text,
}


@cache
def _listed() -> dict[str, frozenset[str]]:
    """Words and the lists they stand in."""
    held: dict[str, set[str]] = {}
    shipped = {relation.name: relation for relation in relations()}
    for name, sides in _LISTS.items():
        for side in sides:
            which, part = side.split("/")
            for source, target in shipped[which].pairs:
                word = word_of(source if part == "sources" else target)
                held.setdefault(word, set()).add(name)
    ordered = json.loads((data_folder() / "sequences.json").read_text("utf-8"))["sequences"]
    items = {each["name"]: each["items"] for each in ordered}
    for name, lists in _SEQUENCES.items():
        for which in lists:
            for item in items[which]:
                held.setdefault(word_of(item), set()).add(name)
    return {word: frozenset(names) for word, names in held.items()}


__all__ = ["class_shares", "classes_of", "is_listed", "token_texts", "word_of"]
