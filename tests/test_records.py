"""Probe data of the user's own: what is read, what is refused, and with which sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headlab as hl
from headlab.roles.spans import Spans
from headlab.tasks import RecordError, read_records
from headlab.tasks.spans import SPAN_SCHEMA

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["text"],
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "span": {"type": "array", "items": {"type": "integer"}},
        "deep": {},
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "my.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def read(source: Any) -> tuple[dict[str, Any], ...]:
    return read_records(source, SCHEMA, "mine")


# -- files ---------------------------------------------------------------------------------------

A, B = {"text": "a"}, {"text": "b", "span": [1, 2]}
LINES = f"{json.dumps(A)}\n{json.dumps(B)}\n"


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.rstrip("\n"),
        "\ufeff" + LINES,
        LINES.replace("\n", "\r\n"),
        "\n\n  \n" + LINES.replace("\n", "\n\t\n"),
        "\ufeff\r\n" + LINES.replace("\n", "\r\n\r\n"),
    ],
    ids=["plain", "no last newline", "BOM", "Windows", "blank lines", "all of it"],
)
def test_lines_are_read_whatever_their_ends(content: str, file: Callable[..., Path]):
    assert read(file(content)) == (A, B)
    assert read(str(file(content))) == (A, B)


def test_separators_inside_a_text_end_no_line(file: Callable[..., Path]):
    text = "one\u2028two\u0085three\x0c\x1efour"
    assert read(file(json.dumps({"text": text}, ensure_ascii=False))) == ({"text": text},)


def test_a_huge_line_is_read_and_not_quoted_back(file: Callable[..., Path]):
    assert len(read(file(json.dumps({"text": "x" * 3_000_000})))[0]["text"]) == 3_000_000
    with pytest.raises(RecordError, match=r"is not of type 'string'") as caught:
        read(file(json.dumps({"text": list(range(100_000))})))
    assert len(str(caught.value)) < 500


DEEP = "[" * 100_000 + "]" * 100_000
BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "the data for mine holds no record"),
    "blank": ("\n \n", "holds no record"),
    "not JSON": ('{"text": "a"}\n{"text": }\n', "line 2 of .* is not JSON: .* at column 10"),
    "cut": ('{"text": "a', "line 1 of .* is not JSON"),
    "two on a line": ('{"text": "a"} {"text": "b"}', "line 1 of .* is not JSON: Extra data"),
    "an array": ('[{"text": "a"}]', "not a JSON object; put each record on a line of its own"),
    "spread out": ('{\n "text": "a"\n}', "each record stands on one line"),
    "a number": ("3", "line 1 of .* is not a JSON object"),
    "not a number": ('{"text": "a", "number": NaN}', "line 1 of .*: NaN is not a JSON value"),
    "infinity": ('{"text": "a", "number": -Infinity}', "-Infinity is not a JSON value"),
    "too large": ('{"text": "a", "number": 1e999}', "holds inf, which is not a JSON value"),
    "too many digits": ('{"text": "a", "number": ' + "9" * 5000 + "}", "line 1 of .* cannot be used"),
    "twice": ('{"text": "a", "text": "b"}', "line 1 of .*: it gives 'text' twice"),
    "twice inside": ('{"text": "a", "deep": [{"k": 1, "k": 1}]}', "it gives 'k' twice"),
    "deep": ('{"text": "a", "deep": ' + DEEP + "}", "line 1 of .*: it is nested too deeply"),
    "rather deep": (
        '{"text": "a", "deep": ' + DEEP[99_400:-99_400] + "}",
        "line 1 of .*: it is nested too deeply",
    ),
    "half a character": (r'{"text": "\ud800"}', "lone surrogate"),
    "not UTF-8": (b'{"text": "\xff"}', "my.jsonl is not UTF-8 text"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "my.jsonl is not UTF-8 text"),
    "wrong type": ('{"text": 3}', r"line 1 of .* does not fit the schema of mine: \['text'\] 3 is not"),
    "inside": ('{"text": "a", "span": [1, "2"]}', r"\['span'\]\[1\] '2' is not of type 'integer'"),
    "missing": ('{"number": 1}', "'text' is a required property; `headlab tasks schema mine`"),
    "unknown": ('{"text": "a", "txet": "b"}', "'txet' was unexpected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_sentence(case: str, file: Callable[..., Path]):
    content, message = BAD[case]
    with pytest.raises(RecordError, match=message) as caught:
        read(file(content))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path):
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(RecordError, match=f"{path.name} cannot be read"):
            read(path)


@given(st.binary(max_size=60))
def test_no_file_does_worse_than_a_record_error(content: bytes):
    import tempfile

    with tempfile.NamedTemporaryFile() as made:
        made.write(content)
        made.flush()
        with pytest.raises(RecordError):  # no such bytes hold the field the schema asks for
            read(Path(made.name))


# -- lists and datasets --------------------------------------------------------------------------


def test_mappings_of_any_iterable_are_read(file: Callable[..., Path]):
    assert read([A, B]) == read(iter((A, B))) == (A, B)
    given = {"text": "a", "span": np.array([1, 2]), "number": np.float32(0.5), "deep": None}
    (found,) = read([given])
    assert found == {"text": "a", "span": [1, 2], "number": 0.5}
    assert type(found["span"][0]) is int
    json.dumps(found)
    (found,) = read([{"text": "a", "span": (1, 2)}])
    assert found["span"] == [1, 2]


DEEPER: list[Any] = []
for _ in range(2000):
    DEEPER = [DEEPER]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (A, "must be a path, a dataset or a list of records"),
        (7, "must be a path, a dataset or a list of records, not 7"),
        ([A, "b"], "record 1 for mine is not a mapping but 'b'"),
        ([A, {"text": 1}], "record 1 does not fit the schema of mine"),
        ([{"text": "a", "number": float("nan")}], "record 0 for mine holds nan"),
        ([{"text": "a\udcff"}], "record 0 for mine holds half a character"),
        ([A, {"text": "a", "deep": DEEPER}], "record 1 for mine .* nested too deeply"),
        ([], "holds no record"),
    ],
)
def test_other_sources_are_refused(source: Any, message: str):
    with pytest.raises(RecordError, match=message):
        read(source)


def test_a_dataset_is_read_as_it_is(lab: Callable[..., Any], file: Callable[..., Path]):
    datasets = pytest.importorskip("datasets")
    words = [f"w{i}" for i in range(10, 22)]  # three characters and a space each
    texts = [" ".join(words[i:] + words[:i]) for i in range(4)]
    rows: list[dict[str, Any]] = [
        {"text": text, "from": [36, 43], "to": [12, 15]} for text in texts
    ]
    rows[0]["name"] = "first"  # the others hold None in the dataset
    made = datasets.Dataset.from_list(rows)
    assert made[1]["name"] is None
    assert read_records(made, SPAN_SCHEMA, "spans") == tuple(rows)
    path = file("\n".join(map(json.dumps, rows)))
    scores = [
        hl.score(lab("llama"), [Spans()], data={"spans": source}) for source in (made, path, rows)
    ]
    for other in scores[1:]:
        assert other.frame.equals(scores[0].frame)
    split = datasets.DatasetDict({"train": made})
    with pytest.raises(RecordError, match="choose one of its splits"):
        read_records(split, SPAN_SCHEMA, "spans")


def test_a_record_given_twice_would_count_as_evidence_twice_and_is_refused():
    twice = [{"text": "a"}, {"text": "b"}, {"text": "a"}]
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    with pytest.raises(
        RecordError, match="record 2 is the same as record 0; give each record once"
    ):
        read_records(twice, schema, "spans")
    assert len(read_records(twice[:2], schema, "spans")) == 2
