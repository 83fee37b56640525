"""Probe data of the user's own: JSON Lines, a ``datasets`` dataset or a list, checked against a schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from headlab.errors import PromptError

#: A path to a JSON Lines file, a ``datasets.Dataset``, or records themselves.
RecordsLike: TypeAlias = "str | Path | Iterable[Mapping[str, Any]]"


class RecordError(PromptError):
    """A record of the user's probe data cannot be used."""


def read_records(
    source: RecordsLike, schema: Mapping[str, Any], what: str
) -> tuple[dict[str, Any], ...]:
    """Records that fit a schema.

    Args:
        source: Where they are: one JSON object per line of a file, or mappings.
        schema: JSON Schema (draft 2020-12) of one record.
        what: Whose data it is, for messages.

    Raises:
        RecordError: The file cannot be read, a line is not a JSON object or does not fit, or there is no record.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    validator = Draft202012Validator(schema)
    records = []
    for where, record in _records(source, what):
        fault = best_match(validator.iter_errors(record))
        if fault is not None:
            field = "".join(f"[{part!r}]" for part in fault.absolute_path)
            message = fault.message if len(fault.message) < 200 else fault.message[:200] + "…"
            raise RecordError(
                f"{where} does not fit the schema of {what}: {field + ' ' if field else ''}{message}; "
                f"`headlab tasks schema {what}` prints the schema"
            )
        records.append(record)
    if not records:
        raise RecordError(f"the data for {what} holds no record")
    return tuple(records)


def _records(source: RecordsLike, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(source, str | Path):
        yield from _lines(Path(source))
        return
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise RecordError(
            f"the data for {what} must be a path, a dataset or a list of records, not {source!r:.80}"
        )
    for number, record in enumerate(source):
        if not isinstance(record, Mapping):
            raise RecordError(f"record {number} for {what} is not a mapping but {record!r:.80}")
        # A dataset fills fields that a record lacks with None.
        yield (
            f"record {number}",
            {key: value for key, value in record.items() if value is not None},
        )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(
                f"{where} is not JSON: {error.msg} at column {error.colno}"
            ) from error
        if not isinstance(record, dict):
            raise RecordError(f"{where} is not a JSON object")
        yield where, record
