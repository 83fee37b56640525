"""What MAPS and salient operations make of odd input: edits, tokenizers and models that do not fit, numbers of numpy's,
records, and documents that were tampered with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relation_models import words
from tiny_models import VOCAB_SIZE, build, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headlab as hl
from headlab.errors import OutputError, PlanError, PromptError, UnsupportedError
from headlab.parameters.maps import maps
from headlab.parameters.maps_result import Maps
from headlab.parameters.relation_inputs import named_relations
from headlab.parameters.salient import salient_operations
from headlab.tasks import RecordError, Relation

HOSTILE = "red \x1b[31m \u202e name"


def record(**fields: Any) -> dict[str, Any]:
    return {"name": "mine", "pairs": [list(pair) for pair in words().pairs]} | fields


def one_sentence(call: Callable[[], Any], error: type[Exception], said: str = "") -> None:
    with pytest.raises(error, match=said) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 800
    assert "\x1b" not in message


# -- the model ---------------------------------------------------------------------------------------------------------


def test_weights_are_what_they_are_under_any_edit():
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    plain = maps(model, words()), salient_operations(model, "1.0")
    with model.edit(hl.scale("0.*", site="mlp_out", by=-3.0), hl.ablate("0.*")):
        edited = maps(model, words()), salient_operations(model, "1.0")
    assert edited[0].frame.equals(plain[0].frame)
    assert edited[1] == plain[1]


def wide_tokenizer(n: int) -> Any:
    """Words w0 … as in the tiny tokenizer, more than the model has rows."""
    made = Tokenizer(models.WordLevel({f"w{at}": at for at in range(n)}, "w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


def test_tokens_the_model_does_not_have_are_left_out_with_the_reason():
    good = words().pairs
    beyond = (("w1", "w140"), ("w120", "w2"), ("w130", "w149"))
    model = hl.load(build("llama"), tokenizer=wide_tokenizer(150))
    found = maps(model, Relation("wide", "given", "", good + beyond))
    alone = maps(model, Relation("wide", "given", "", good))
    assert found.frame.equals(alone.frame)
    assert found.relation("wide").left_out == (
        ("w1", "w140", "'w140' is token 140, which the model does not have"),
        ("w120", "w2", "'w120' is token 120, which the model does not have"),
        ("w130", "w149", "'w149' is token 149, which the model does not have"),
    )
    only = Relation("wide", "given", "", beyond)
    one_sentence(lambda: maps(model, only, min_pairs=1), PromptError, "w140.* does not have")
    assert len(salient_operations(model, "1.0", n=3)[0].rows) == 3


def test_stand_ins_that_are_no_numbers_are_refused():
    module: Any = build("llama", tie_word_embeddings=False)
    source = int(words().pairs[0][0][1:])
    with torch.no_grad():
        module.model.embed_tokens.weight[source, 3] = torch.nan
    model = hl.load(module, tokenizer=tiny_tokenizer())
    said = rf"token {source} .*holds NaN"
    one_sentence(lambda: maps(model, words(), heads="0.*"), UnsupportedError, said)
    for which in ("salient", "random"):
        one_sentence(
            lambda which=which: salient_operations(model, "0.1", n=97, sources=which),
            UnsupportedError,
            f"such as {source}, hold NaN",
        )
    others = Relation("o", "given", "", words().pairs[1:])
    assert maps(model, others, heads="0.*").frame["score"].notna().all()


def test_rows_of_padding_may_hold_anything():
    module: Any = build("llama", tie_word_embeddings=False, vocab_size=VOCAB_SIZE + 3)
    clean = hl.load(module, tokenizer=tiny_tokenizer())
    before, rows = maps(clean, words()).frame, salient_operations(clean, "1.2", n=5)[0].rows
    with torch.no_grad():
        module.lm_head.weight[VOCAB_SIZE + 1, 2] = torch.nan
    model = hl.load(module, tokenizer=tiny_tokenizer())
    assert maps(model, words()).frame.equals(before)
    assert salient_operations(model, "1.2", n=5)[0].rows == rows
    with torch.no_grad():
        module.lm_head.weight[VOCAB_SIZE - 1, 2] = torch.nan
    broken = hl.load(module, tokenizer=tiny_tokenizer())
    one_sentence(lambda: maps(broken, words()), UnsupportedError, "W_U of .* holds NaN")


# -- numbers and names -------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_as_good_as_python_s(lab: Callable[..., Any]):
    ours = maps(lab("llama"), words(), k=5, min_pairs=20, alpha=0.25, min_effect=0.125)
    options = {"k": np.int64(5), "min_pairs": np.int32(20)}
    options |= {"alpha": np.float32(0.25), "min_effect": np.float32(0.125)}
    assert maps(lab("llama"), words(), **options).to_json() == ours.to_json()
    own = maps(lab("llama"), words(k=np.int64(5)), min_pairs=20, alpha=0.25, min_effect=0.125)
    assert own.to_json() == ours.to_json()
    one, other = (
        salient_operations(lab("llama"), "1.0", n=kind(7), n_targets=kind(2), seed=kind(3))
        for kind in (int, np.int64)
    )
    assert one[0].to_json() == other[0].to_json()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": True}, "k=True must be"),
        ({"k": 10**400}, "k=10000"),
        ({"k": 10**5000}, "k=a number of thousands of digits"),
        ({"min_pairs": 2.5}, "min_pairs=2.5 must be"),
        ({"alpha": np.nan}, "alpha=nan must be"),
        ({"alpha": 10**400}, "alpha=1000"),
        ({"min_effect": "x"}, "min_effect='x' must be"),
        ({"convention": []}, r"no convention \[\]"),
    ],
)
def test_options_that_mean_nothing_are_refused(lab: Callable[..., Any], options: Any, said: str):
    one_sentence(lambda: maps(lab("llama"), words(), **options), PlanError, said)


@pytest.mark.parametrize("n", [-1, 0, "x", 2.5, True, None])
def test_rows_are_asked_for_by_number(lab: Callable[..., Any], n: Any):
    found = maps(lab("llama"), words())
    for relation in (None, "made up"):
        one_sentence(lambda at=relation: found.top(at, n), PlanError, "n=.* must be a whole number")
    assert len(found.top("made up", 10**30)) == len(found.top(None, 10**30)) == 12


def test_a_describer_must_be_a_function(lab: Callable[..., Any]):
    for describe in ("capitals", 3):
        one_sentence(
            lambda each=describe: salient_operations(lab("llama"), "0.0", n=5, describe=each),
            PlanError,
            "describe=.* must be a function",
        )


def test_relations_come_as_lists_in_text_records_and_files(tmp_path: Path):
    def names(given: Any) -> list[str]:
        return [each.name for each in named_relations(given)]

    assert names("antonym, translation") == ["antonym", *names("translation")]
    assert names(["antonym,synonym", words()])[-1] == "made up"
    assert names(record()) == names([record()]) == ["mine"]
    assert names([record(), record(name="two")]) == ["mine", "two"]
    assert names([record(), words()]) == ["mine", "made up"]
    (tmp_path / "a,b.txt").write_text(json.dumps(record()))
    path = str(tmp_path / "a,b.txt")
    assert names(path) == names([path, "antonym"])[:1] == ["mine"]
    (tmp_path / "c.json").write_text(json.dumps(record()))
    assert names(f"antonym, {tmp_path / 'c.json'}") == ["antonym", "mine"]
    for given, said in (
        ({"France": "Paris"}, "one whole relation"),
        ([record(), record(k=0)], "record 1"),
        ("antonym,nothing", "no relation 'nothing'"),
        (None, "relations=None"),
        ([[1]], "no name, path or relation"),
    ):
        one_sentence(lambda each=given: named_relations(each), PromptError, said)


def test_names_act_on_no_terminal(lab: Callable[..., Any]):
    poor = Relation(f"poor {HOSTILE}", "given", "", (("w5", "\x1b]0;owned\x07"),))
    found = maps(lab("llama"), [words(name=HOSTILE), poor])
    for text in (repr(found), found._repr_html_()):
        assert r"\u001b[31m \u202e name" in text
        assert "owned" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    one_sentence(lambda: found.top("other"), PlanError, "mapped were red")
    one_sentence(lambda: found.top(f"poor {HOSTILE}"), PlanError, "was not mapped")
    one_sentence(lambda: maps(lab("llama"), poor), PromptError, "has the most")


# -- documents ---------------------------------------------------------------------------------------------------------


def rows(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda data: change(data["rows"][3])


def every(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """In all rows of one head, so that no other rule is broken."""
    return lambda data: [
        row.update(fields) for row in data["rows"] if (row["layer"], row["head"]) == (0, 2)
    ]


def throughout(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """In the relation and in all its rows."""

    def change(data: dict[str, Any]) -> None:
        for part in (*data["relations"], *data["rows"]):
            part.update({name: value for name, value in fields.items() if name in part})

    return change


TAMPERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "infinite score": rows(lambda row: row.update(score=1e999)),
    "score above 1": rows(lambda row: row.update(score=1.5)),
    "negative p": rows(lambda row: row.update(p_value=-0.1)),
    "huge score": rows(lambda row: row.update(score=10**400)),
    "one number missing": rows(lambda row: row.update(q_value=None)),
    "huge layer": every(layer=2**63),
    "negative head": every(head=-1),
    "layer true": every(layer=True),
    "layer text": every(layer="0"),
    "another head twice": rows(lambda row: row.update(head=0)),
    "unknown relation": rows(lambda row: row.update(relation="other")),
    "unknown direction": rows(lambda row: row.update(direction="sideways")),
    "another n": rows(lambda row: row.update(n=12)),
    "claimed out of nothing": rows(lambda row: row.update(claimed=not row["claimed"])),
    "claimed no bool": rows(lambda row: row.update(claimed=0)),
    "half a character": rows(lambda row: row.update(note="\ud800")),
    "a row twice": lambda data: data["rows"].append(data["rows"][0]),
    "a row lost": lambda data: data["rows"].pop(),
    "no rows": lambda data: data["rows"].clear(),
    "rows no list": lambda data: data.update(rows="x"),
    "row no object": lambda data: data["rows"].append(3),
    "relation without rows": lambda data: data["relations"].append(
        data["relations"][0] | {"name": "other"}
    ),
    "relation twice": lambda data: data["relations"].append(data["relations"][0]),
    "relations lost": lambda data: data["relations"].clear(),
    "name no text": lambda data: data["relations"][0].update(name=3),
    "relations no list": lambda data: data.update(relations=3),
    "blank name": throughout(name=" ", relation=" "),
    "k of 0": throughout(k=0),
    "no pairs": throughout(n=0),
    "left out no triple": lambda data: data["relations"][0].update(left_out=[["a", "b"]]),
    "left out no text": lambda data: data["relations"][0].update(left_out=[["a", "b", 3]]),
    "skipped and mapped": lambda data: data["relations"][0].update(skipped="few"),
    "unknown field": lambda data: data["relations"][0].update(more=1),
    "alpha text": lambda data: data["about"].update(alpha="0.05"),
    "alpha 0": lambda data: data["about"].update(alpha=0),
    "effect infinite": lambda data: data["about"].update(min_effect=1e999),
    "directions text": lambda data: data["about"].update(directions="promotes"),
    "no direction": lambda data: data["about"].update(directions=[]),
    "direction twice": lambda data: data["about"].update(directions=["promotes", "suppresses"] * 2),
    "another direction": lambda data: data["about"].update(
        directions=["promotes", "suppresses", "x"]
    ),
    "vocabulary no number": lambda data: data["about"].update(n_vocab="97"),
    "model no text": lambda data: data["about"].update(model=["m"]),
    "unknown embedding": lambda data: data["about"].update(embedding="x"),
    "no settings": lambda data: data.pop("about"),
    "fingerprint lost": lambda data: data["about"].pop("fingerprint"),
    "alpha lost": lambda data: data["about"].pop("alpha"),
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    return maps(model, words()).to_dict()


@pytest.mark.parametrize("case", TAMPERED)
def test_documents_that_were_tampered_with_are_refused(document: dict[str, Any], case: str):
    assert Maps.from_json(json.dumps(document)).names == ("made up",)
    data = copy.deepcopy(document)
    TAMPERED[case](data)
    one_sentence(lambda: Maps.from_json(json.dumps(data)), OutputError, "these are no maps")


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 9999, '{"format": NaN}', b"\xff", None])
def test_what_is_no_document_is_refused(text: Any):
    one_sentence(lambda: Maps.from_json(text), OutputError, "these are no maps")


# -- relations ---------------------------------------------------------------------------------------------------------

PAIRS = (("a", "b"),)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"k": k}, "has k=") for k in (True, 0, -3, 2.5, "x", 10**400, -(10**5000))),
        ({"kind": "mine"}, "is of kind 'mine'; it can be knowledge"),
        ({"kind": None}, "is of kind None"),
        *(({"name": name}, "name must be text") for name in ("", " ", None, 3, "\ud800")),
        ({"about": 3}, "has 3 as about"),
        *(({"pairs": pairs}, "as pairs") for pairs in (None, "ab", {"a": "b"}, 3)),
        *(({"pairs": [pair]}, "no pair of two") for pair in ("ab", ("a", "b", "c"), (3, "b"))),
        *(({"pairs": [pair]}, "no pair of two") for pair in (None, ("a", None), ("a", "\ud800"))),
        ({"templates": "of {source}"}, "has templates"),
        ({"templates": ("of",)}, "has templates"),
    ],
)
def test_relations_that_are_none_are_refused(fields: dict[str, Any], said: str):
    given = {"name": "mine", "kind": "given", "about": "", "pairs": PAIRS} | fields
    one_sentence(lambda: Relation(**given), RecordError, said)


def test_relations_may_be_given_as_lists():
    given = Relation("mine", "given", "", [["a", "b"]], np.int64(3))  # type: ignore[arg-type]
    assert given == Relation("mine", "given", "", PAIRS, 3)
    assert type(given.k) is int
    assert hash(given)
