"""``headlab tasks``, ``--data`` and ``--causal``, and the schemas every role offers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import headlab.roles.spans
import headlab.roles.syntactic  # noqa: F401  # registers its role
from headlab.cli.tasks import try_out
from headlab.roles import ROLES
from headlab.roles.base import load_entry_points
from headlab.roles.spans import Spans
from headlab.tasks import RecordError

TEXT = "w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20 w21"
RECORD = {"text": TEXT, "from": [36, 43], "to": [12, 15]}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: dict[str, Any], name: str = "my.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, records)), "utf-8")
        return path

    return write


def refused(done: Any, *parts: str) -> None:
    """One sentence on stderr, exit code 2, nothing on stdout."""
    lines = [line for line in done.err.splitlines() if not line.startswith("loading ")]
    assert done.code == 2
    assert done.out == ""
    assert len(lines) == 1
    assert lines[0].startswith("headlab: ")
    for part in parts:
        assert part in lines[0]


# -- schemas -------------------------------------------------------------------------------------


def with_schema() -> list[str]:
    load_entry_points()
    return [name for name, role in ROLES.items() if role.schema is not None]


@pytest.mark.parametrize("name", with_schema())
def test_every_schema_is_valid_and_its_examples_fit(name: str):
    schema = ROLES[name].schema
    assert schema is not None
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert schema.get("examples"), "a schema shows at least one record"
    for example in schema["examples"]:
        validator.validate(example)
        assert not validator.is_valid(example | {"no such field": 1})
        for field in schema.get("required", ()):
            assert not validator.is_valid({key: example[key] for key in example if key != field})
    assert schema["title"]
    assert all(field.get("description") for field in schema["properties"].values())


def test_schemas_are_printed_as_they_are(run: Callable[..., Any]):
    for name in ("spans", "syntactic"):
        done = run("tasks", "schema", name)
        assert done.code == 0
        assert json.loads(done.out) == ROLES[name].schema
        assert done.err == ""


def test_roles_are_listed_with_the_data_they_take(run: Callable[..., Any]):
    found = {row["role"]: row["data"] for row in json.loads(run("tasks", "list", "--json").out)}
    assert list(found) == list(ROLES)
    assert found["spans"] == found["syntactic"] == "yours"
    for name, role in ROLES.items():
        if not role.needs_records:
            assert found[name] == ("headlab's" if role.schema is None else "either")
    shown = run("tasks", "list").out
    assert all(name in shown for name in ROLES)
    assert "--data spans=FILE" in " ".join(shown.split())


def test_a_role_that_is_not_there_is_said_with_a_guess(run: Callable[..., Any]):
    refused(run("tasks", "schema", "span"), "no role 'span'", "did you mean 'spans'", "induction")
    refused(run("tasks", "schema", "zzz"), "no role 'zzz'")
    refused(run("tasks", "check", "sytactic", "x.jsonl"), "did you mean 'syntactic'")


def test_a_role_without_data_says_so(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    class Fixed(Spans):
        schema = None
        needs_records = False

    monkeypatch.setitem(ROLES, "fixed", Fixed("fixed"))
    refused(run("tasks", "schema", "fixed"), "'fixed' makes its own prompts")
    found = {row["role"]: row["data"] for row in json.loads(run("tasks", "list", "--json").out)}
    assert found["fixed"] == "headlab's"


# -- checking data -------------------------------------------------------------------------------


def test_records_are_checked(run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path):
    good = file(RECORD, RECORD | {"name": "second"})
    assert run("tasks", "check", "spans", good).out == "2 records fit the schema of spans\n"
    done = run("tasks", "check", "spans", good, "--model", tiny_folder)
    assert done.out == f"2 records fit the schema of spans and can be used with {tiny_folder}\n"
    bad = file(RECORD, RECORD | {"to": "w13"}, name="bad.jsonl")
    refused(run("tasks", "check", "spans", bad), "line 2 of", "bad.jsonl", "['to']", "'w13'")
    refused(run("tasks", "check", "spans", good.parent / "no.jsonl"), "no.jsonl cannot be read")


def test_spans_are_checked_by_a_model_s_tokens(
    run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path
):
    cut = file(RECORD, RECORD | {"to": [13, 15]})
    assert run("tasks", "check", "spans", cut).code == 0
    done = run("tasks", "check", "spans", cut, "--model", tiny_folder)
    refused(done, "record 1: a token straddles the edge of '13'")


def test_trying_out_runs_nothing(lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    model = lab("llama")
    monkeypatch.setattr(model.module, "forward", None)
    assert try_out(model, ROLES["spans"], (RECORD,)) == ""
    with pytest.raises(RecordError, match="record 0"):
        try_out(model, ROLES["spans"], (RECORD | {"to": [0, 99]},))
    monkeypatch.setattr(model, "tokenizer", None)
    assert "not measurable: " in try_out(model, ROLES["spans"], (RECORD,))


RELATION = {"name": "next", "pairs": [["w5", "w6"], ["w7", "seven"], ["w8", "w9"]]}


def test_the_schema_of_relations_is_printed_and_they_are_listed(run: Callable[..., Any]):
    from headlab.tasks import RELATION_SCHEMA

    assert json.loads(run("tasks", "schema", "relations").out) == RELATION_SCHEMA
    assert "\nrelations: pairs of words" in run("tasks", "list").out
    assert list(json.loads(run("tasks", "list", "--json").out)[0]) == ["role", "title", "data"]


def test_relations_are_checked_and_their_words_by_a_model_s_tokens(
    run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path
):
    good = file(RELATION, RELATION | {"name": "again"})
    assert run("tasks", "check", "relations", good).out == "2 records fit the schema of relations\n"
    whole = good.parent / "whole.json"
    whole.write_text(json.dumps([RELATION], indent=2), "utf-8")
    for path, names in ((good, ("next", "again")), (whole, ("next",))):
        done = run("tasks", "check", "relations", path, "--model", tiny_folder)
        assert done.code == 0
        assert done.out.splitlines()[1:] == [
            *(
                f"{name}: 2 of 3 pairs remain; left out: 'w7' → 'seven': the tokenizer does not know the target 'seven'"
                for name in names
            ),
            "maps skips relations of fewer than 30 pairs unless --min-pairs says otherwise: "
            + ", ".join(names),
        ]
    twice = file(RELATION | {"pairs": [["w5", "w6"], ["w5", "w7"]]}, name="twice.jsonl")
    refused(run("tasks", "check", "relations", twice), "'next' gives source 'w5' twice")
    none = file(RELATION | {"pairs": [["five", "six"]]}, name="none.jsonl")
    assert run("tasks", "check", "relations", none).code == 0
    done = run("tasks", "check", "relations", none, "--model", tiny_folder)
    refused(done, "no pair of", "none.jsonl", "next: 0 of 1 pairs remain", "the source 'five'")


# -- scoring -------------------------------------------------------------------------------------


def test_data_reaches_the_role(
    run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path
):
    import headlab as hl

    records = [RECORD | {"to": [4 * at, 4 * at + 3]} for at in range(1, 8)]
    path = file(*records)
    done = run("score", tiny_folder, "--roles", "spans", "--data", f"spans={path}", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    wanted = hl.score(hl.load(str(tiny_folder)), "spans", data={"spans": records})
    assert found == json.loads(wanted.to_json())
    assert {row["n"] for row in found["rows"]} == {7}


def test_several_roles_take_several_files(
    run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path
):
    words = {
        "words": ["w5", "w9", "w7"],
        "heads": [1, 2, -1],
        "relations": ["det", "nsubj", "root"],
    }
    one, two = file(RECORD), file(words, words | {"words": ["w5", "w9", "w8"]}, name="trees.jsonl")
    options = ("--data", f"spans={one}", "--data", f"syntactic={two}", "--json")
    done = run("score", tiny_folder, "--roles", "spans,syntactic", *options)
    assert done.code == 0, done.err
    assert [role["name"] for role in json.loads(done.out)["roles"]] == ["spans", "syntactic"]


WRONG: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no role": (["--data", "my.jsonl"], ("'my.jsonl'", "ROLE=FILE")),
    "no file": (["--data", "spans="], ("'spans='", "ROLE=FILE")),
    "twice": (["--data", "spans=a", "--data", "spans=b"], ("'spans' twice",)),
    "absent": (["--roles", "spans", "--data", "spans=no.jsonl"], ("no.jsonl cannot be read",)),
    "unknown role": (["--data", "spams=no.jsonl"], ("'spams'",)),
    "another role": (["--roles", "sink", "--data", "spans={good}"], ("'spans'", "sink")),
    "needs data": (["--roles", "spans"], ("'spans'", "headlab tasks schema spans")),
    "bad record": (["--roles", "spans", "--data", "spans={bad}"], ("line 1", "'from'")),
}


@pytest.mark.parametrize("command", ["score", "report"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_is_refused_before_a_model_is_loaded(
    command: str,
    case: str,
    run: Callable[..., Any],
    file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    options, parts = WRONG[case]
    paths = {"good": file(RECORD), "bad": file({"text": "w5"}, name="bad.jsonl")}
    done = run(command, "no-such/model", *(option.format(**paths) for option in options))
    refused(done, *parts)
    assert "loading" not in done.err
    assert not (tmp_path / "report").exists()


def test_a_record_the_tokenizer_cannot_place_is_refused(
    run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path
):
    path = file(RECORD, RECORD | {"from": [37, 43]})
    done = run("score", tiny_folder, "--roles", "spans", "--data", f"spans={path}")
    refused(done, "record 1: a token straddles the edge")


def test_a_report_is_made_of_one_s_own_data(
    run: Callable[..., Any], file: Callable[..., Path], tiny_folder: Path, tmp_path: Path
):
    """And on asking it holds the causal check; of eight records of one text some head is claimed by all."""
    import headlab as hl

    always = Spans("always", min_score=0.0, min_effect=-1.0)
    ROLES["always"] = always
    try:
        path = file(*(RECORD | {"answer": " w9", "name": f"{at}"} for at in range(8)))
        options = ("--roles", "always", "--data", f"always={path}", "--alpha", "0.5")
        done = run("report", tiny_folder, *options, "--causal", "--out", tmp_path / "out")
        assert done.code == 0, done.err
        made = hl.Report.read(tmp_path / "out")
        without = run("report", tiny_folder, *options, "--out", tmp_path / "plain")
        assert without.code == 0, without.err
    finally:
        del ROLES["always"]
    assert made.scores.names == ("always",)
    assert set(made.scores.frame["n"]) == {8}
    assert made.causal is not None
    assert set(made.causal["role"]) == {"always"}
    assert Spans.behaviour is not None
    assert Spans.behaviour.name in set(made.causal["metric"])
    assert hl.Report.read(tmp_path / "plain").causal is None
