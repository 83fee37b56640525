"""Relations: headlab's own data, relations of the user's, and which of their words are single tokens."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from real_model import smollm2
from tiny_models import tiny_tokenizer
from tiny_tokenizers import byte_level, with_dummy_prefix
from tokenizers import normalizers

from headlab.errors import PromptError
from headlab.planted.words import tokenizer as planted_tokenizer
from headlab.tasks import (
    GENERAL_TEMPLATES,
    RELATION_SCHEMA,
    RecordError,
    Relation,
    given_relations,
    relations,
    token_pairs,
    word_tokens,
)

KINDS = ("knowledge", "language", "translation", "algorithmic")


def table(name: str) -> dict[str, str]:
    (relation,) = relations(name)
    return dict(relation.pairs)


def of(*pairs: tuple[str, str], name: str = "mine") -> Relation:
    return Relation(name, "given", "", pairs)


# -- headlab's own -------------------------------------------------------------------------------


def test_there_are_relations_of_every_kind():
    shipped = relations()
    assert len(shipped) >= 40
    assert len({each.name for each in shipped}) == len(shipped)
    for kind in KINDS:
        assert len(relations(kind)) >= 3
        assert {each.kind for each in relations(kind)} == {kind}
    assert {each.name for each in relations("country_capital, translation")} == {
        "country_capital",
        *(each.name for each in relations("translation")),
    }
    with pytest.raises(PromptError, match=r"no relation 'capitol'.*country_capital.*knowledge"):
        relations(["capitol"])
    with pytest.raises(PromptError, match="no relation was asked for"):
        relations([])


@pytest.mark.parametrize("relation", relations(), ids=lambda each: each.name)
def test_each_is_well_formed(relation: Relation):
    assert relation.about.endswith(".")
    assert 36 <= len(relation) <= 160
    for word in (word for pair in relation.pairs for word in pair):
        assert word == word.strip() != ""
    same = [source for source, target in relation.pairs if source == target]
    assert bool(same) == ("copying" in relation.name)
    assert len(same) in (0, len(relation))
    assert relation.k is None  # the convention of the model decides
    assert relation.templates[:-1] == GENERAL_TEMPLATES
    for template in relation.templates:  # a source at the very beginning would be another token
        assert template.count(" {source}") == template.count("{source}") == 1
        assert template == template.strip()


def test_files_fit_the_schema_users_are_given():
    Draft202012Validator.check_schema(RELATION_SCHEMA)
    given_relations(RELATION_SCHEMA["examples"])
    folder = Path(__file__).parent.parent / "data" / "operations"
    read = {path.stem: given_relations(path)[0] for path in folder.glob("*.json")}
    assert read == {each.name: each for each in relations()}


def test_what_follows_a_rule_follows_it():
    for source, target in table("next_letter").items():
        assert ord(target) == ord(source) + 1
    for name in ("next_number", "next_year"):
        assert all(int(t) == int(s) + 1 for s, t in table(name).items())
    assert all(t == s[0] for s, t in table("first_letter").items())
    assert all(t == s[-1] for s, t in table("last_letter").items())
    assert all(t == s.upper() for s, t in table("upper_case").items())
    assert all(t == s.capitalize() != s for s, t in table("capitalised").items())
    assert all(t.endswith("ing") for t in table("present_participle").values())
    assert all(t.endswith("s") for t in table("third_person").values())
    assert all(t.endswith("ly") or t == "well" for t in table("adverb").values())
    irregular = {"worse", "less", "more"}
    assert all(t.endswith("er") or t in irregular for t in table("comparative").values())
    irregular = {"worst", "least", "most", "best"}
    assert all(t.endswith("est") or t in irregular for t in table("superlative").values())
    for source, target in table("negation").items():
        assert target.endswith(source)
        assert target.removesuffix(source) in ("un", "in", "im", "il", "ir", "dis")
    for target in table("element_symbol").values():
        assert len(target) <= 2
        assert set(target) <= set(string.ascii_letters)
        assert target == target.capitalize()
    assert set(table("name_pronoun").values()) == {"he", "she"}


def test_relations_that_share_facts_agree():
    cities, capitals = table("city_country"), table("country_capital")
    both = {c: capital for c, capital in capitals.items() if capital in cities and c != "Britain"}
    assert len(both) > 30
    assert all(cities[capital] == country for country, capital in both.items())
    assert set(table("past_tense")) >= set(table("present_participle"))
    first = table("comparative")
    assert sum(word in first for word in table("superlative")) > 80
    assert table("masculine_feminine")["king"] == "queen"


@pytest.mark.slow
def test_most_relations_keep_thirty_pairs_on_the_embedded_model():
    made = {each.name: token_pairs(each, smollm2().tokenizer) for each in relations()}
    enough = [name for name, pairs in made.items() if len(pairs) >= 30]
    assert len(enough) >= 24
    assert {relations(name)[0].kind for name in enough} == set(KINDS)
    sources = {int(token) for pairs in made.values() for token in pairs.sources}
    assert len(sources) < 1500
    pairs = made["country_capital"]
    texts = smollm2().tokenizer.convert_ids_to_tokens(pairs.targets.tolist())
    assert texts[:3] == ["ĠParis", "ĠBerlin", "ĠRome"]
    # The tokenizer writes every digit by itself, and says so.
    assert len(made["next_year"]) == 0
    assert "'1890' is 5 tokens" in made["next_year"].said()


# -- tokens --------------------------------------------------------------------------------------


def test_words_of_several_tokens_are_left_out_and_said():
    relation = of(("king", "queen"), ("man", "woman"), ("woman", "man"))
    pairs = token_pairs(relation, byte_level())
    assert pairs.words == (("king", "queen"),)
    assert byte_level().convert_ids_to_tokens(pairs.sources.tolist()) == ["Ġking"]
    assert byte_level().convert_ids_to_tokens(pairs.targets.tolist()) == ["Ġqueen"]
    assert [pair for pair, _ in pairs.left_out] == [("man", "woman"), ("woman", "man")]
    assert "the target 'woman' is 4 tokens" in pairs.said()
    assert "the source 'woman' is 4 tokens" in pairs.said()
    assert pairs.said().startswith("mine: 1 of 3 pairs remain; left out: 'man' → 'woman'")
    assert pairs.said(1).endswith("; and 1 more")
    assert repr(pairs) == "TokenPairs('mine', 1 of 3 pairs)"


def test_ends_take_the_last_token_of_the_source_and_the_first_of_the_target():
    tokens = byte_level()
    relation = of(("carpet", "woman"), ("king", "queen"))
    pairs = token_pairs(relation, tokens, multi_token="ends")
    whole = tokens(" carpet", add_special_tokens=False)["input_ids"]
    assert len(whole) > 1
    assert pairs.sources.tolist() == [whole[-1], *tokens(" king")["input_ids"]]
    assert tokens.convert_ids_to_tokens(pairs.targets.tolist()) == ["Ġwo", "Ġqueen"]
    assert pairs.left_out == ()


def test_tokenizers_without_marks_for_spaces_will_do():
    planted = planted_tokenizer(128, 32)
    pairs = token_pairs(of(("King", "queen"), ("Zanzibar", "sea"), ("wolf", "bear")), planted)
    assert planted.convert_ids_to_tokens(pairs.sources.tolist()) == ["king", "wolf"]
    assert planted.convert_ids_to_tokens(pairs.targets.tolist()) == ["queen", "bear"]
    assert pairs.left_out[0][1] == "the tokenizer does not know the source 'Zanzibar'"
    dummy = with_dummy_prefix()  # and a space of one's own in front would be a token more
    assert len(dummy(" king")["input_ids"]) == 2
    pairs = token_pairs(of(("king", "queen"), ("man", "king")), dummy)
    assert dummy.convert_ids_to_tokens(pairs.sources.tolist()) == ["▁king", "▁man"]
    assert word_tokens(tiny_tokenizer(), "w7") == [7]
    assert word_tokens(tiny_tokenizer(), "seven") == []


def test_words_that_become_one_token_are_told_apart_no_more():
    planted = planted_tokenizer(128, 32)
    pairs = token_pairs(of(("king", "queen"), ("King", "doctor"), ("wolf", "Wolf")), planted)
    assert pairs.words == (("king", "queen"),)
    assert [why for _, why in pairs.left_out] == [
        "its source is the same token as 'king'",
        "both words are the same token",
    ]
    assert len(token_pairs(of(("king", "king")), planted)) == 1  # copying is meant


def test_words_that_are_nothing_to_a_tokenizer_are_left_out():
    """é has no byte in a small byte-level vocabulary, and a normaliser may drop zero-width characters."""
    dropping = with_dummy_prefix()
    backend = dropping.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace("\u200b", ""), backend.normalizer]
    )
    for tokens, word in ((byte_level(), "é"), (dropping, "\u200b"), (byte_level(), "\ud800")):
        assert word_tokens(tokens, word) == []
    pairs = token_pairs(of(("é", "king"), ("king", "queen")), byte_level())
    assert pairs.words == (("king", "queen"),)
    assert pairs.left_out[0][1] == "the tokenizer does not know the source 'é'"


def test_no_tokenizer_or_policy_is_said():
    with pytest.raises(PromptError, match="need a model with a tokenizer"):
        token_pairs(of(("a", "b")), None)
    with pytest.raises(PromptError, match="multi_token is 'first'; it can be 'skip' or 'ends'"):
        token_pairs(of(("a", "b")), byte_level(), multi_token="first")  # type: ignore[arg-type]


# -- the user's ----------------------------------------------------------------------------------

RECORD = {"name": "royal", "pairs": [["king", " queen "], ["prince", "princess"]]}


def test_relations_are_read_from_lines_lists_and_one_object(tmp_path: Path):
    path = tmp_path / "mine"
    wanted = Relation("royal", "given", "", (("king", "queen"), ("prince", "princess")))
    other = RECORD | {"name": "other", "k": 3, "templates": ["Next to the {source} sits the"]}
    for text in (json.dumps(RECORD), json.dumps(RECORD, indent=2), json.dumps([RECORD])):
        path.write_text("\ufeff" + text, "utf-8")
        assert given_relations(path) == given_relations(str(path)) == (wanted,)
    assert given_relations(RECORD) == given_relations([RECORD]) == (wanted,)
    for text in (f"{json.dumps(RECORD)}\n{json.dumps(other)}\n", json.dumps([RECORD, other])):
        path.write_text(text, "utf-8")
        first, second = given_relations(path)
        assert (first, second.k) == (wanted, 3)
        assert second.templates == (*GENERAL_TEMPLATES, "Next to the {source} sits the")


WRONG: dict[str, tuple[Any, str]] = {
    "empty relation": (RECORD | {"pairs": []}, r"record 0.*\['pairs'\]"),
    "one side": (RECORD | {"pairs": [["king"]]}, r"\['pairs'\]\[0\].*\['king'\] is too short"),
    "blank side": (RECORD | {"pairs": [["king", " "]]}, r"\['pairs'\]\[0\]\[1\]"),
    "not text": (RECORD | {"pairs": [["king", 3]]}, r"\['pairs'\]\[0\]\[1\] 3 is not of type"),
    "source twice": (
        RECORD | {"pairs": [["king", "queen"], ["king ", "duke"]]},
        "'royal' gives source 'king' twice, with 'queen' and 'duke'; keep one",
    ),
    "name twice": ([RECORD, RECORD | {"k": 2}], "two relations are called 'royal'"),
    "no name": ({"pairs": [["a", "b"]]}, "'name' is a required property"),
    "unknown field": (RECORD | {"sources": []}, "'sources' was unexpected"),
    "k of 0": (RECORD | {"k": 0}, r"\['k'\] 0 is less than the minimum"),
    "template without source": (RECORD | {"templates": ["The"]}, r"\['templates'\]\[0\]"),
    "no records": ([], "the data for relations holds no record"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("form", ["records", "file"])
def test_what_cannot_be_used_is_said_in_one_sentence(case: str, form: str, tmp_path: Path):
    given, said = WRONG[case]
    source: Any = given
    if form == "file":
        source = tmp_path / "mine.json"
        source.write_text(json.dumps(given, indent=1), "utf-8")
    with pytest.raises(RecordError, match=said) as error:
        given_relations(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"source": "king", "target": "queen"}\n{"source": "a", "target": "b"}\n',
        '["king", "queen"]\n["a", "b"]\n',
        '[["king", "queen"], ["a", "b"]]',
    ],
)
def test_a_pair_on_each_line_is_said_to_be_no_relation(tmp_path: Path, text: str):
    path = tmp_path / "pairs.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(RecordError, match=r"one record \(a line .*\) is one whole relation"):
        given_relations(path)
    path.write_text(json.dumps(RECORD | {"k": 0}), "utf-8")
    with pytest.raises(RecordError, match="less than the minimum") as error:
        given_relations(path)
    assert "one whole relation" not in str(error.value)


def test_files_that_are_not_json_are_said(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"name": "royal",\n "name": "two", "pairs": [["a", "b"]]}', "utf-8")
    with pytest.raises(RecordError, match="gives 'name' twice"):
        given_relations(path)
    path.write_text("king,queen\n", "utf-8")
    with pytest.raises(RecordError, match=r"line 1 of .*mine\.jsonl is not JSON"):
        given_relations(path)
    with pytest.raises(RecordError, match=r"no\.json cannot be read"):
        given_relations(tmp_path / "no.json")
    with pytest.raises(RecordError, match="relation 'x' holds no pair"):
        Relation("x", "given", "", ())
    with pytest.raises(RecordError, match="no word on one side"):
        of(("king", ""))
