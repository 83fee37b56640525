"""Probe data of the user's own: JSON Lines, a ``datasets`` dataset or a list, checked against a schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from headlab.errors import PromptError

#: A path to a JSON Lines file, a ``datasets.Dataset``, or records themselves.
RecordsLike: TypeAlias = "str | Path | Iterable[Mapping[str, Any]]"

_SHOWN = 200


class RecordError(PromptError):
    """A record of the user's probe data cannot be used."""


def read_records(
    source: RecordsLike, schema: Mapping[str, Any], what: str
) -> tuple[dict[str, Any], ...]:
    """Records that fit a schema, as plain JSON values.

    Args:
        source: Where they are: one JSON object per line of a file, or mappings.
        schema: JSON Schema (draft 2020-12) of one record.
        what: Whose data it is, for messages.

    Raises:
        RecordError: The file cannot be read, a line is not a JSON object or does not fit, two records are the same, or
            there is no record.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    validator = Draft202012Validator(schema)
    records = []
    first: dict[str, str] = {}
    for where, record in _records(source, what):
        fault = best_match(validator.iter_errors(record))
        if fault is not None:
            field = "".join(f"[{part!r}]" for part in fault.absolute_path)
            raise RecordError(
                f"{where} does not fit the schema of {what}: {field + ' ' if field else ''}{_short(fault.message)}; "
                f"`headlab tasks schema {what}` prints the schema"
            )
        # Prompts are the unit of every interval and p-value: the same one twice would count as evidence twice.
        earlier = first.setdefault(json.dumps(record, sort_keys=True), where)
        if earlier != where:
            raise RecordError(f"{where} is the same as {earlier}; give each record once")
        records.append(record)
    if not records:
        raise RecordError(f"the data for {what} holds no record")
    return tuple(records)


def _records(source: RecordsLike, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(source, str | Path):
        yield from _lines(Path(source))
        return
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        hint = "; choose one of its splits" if hasattr(source, "column_names") else ""
        raise RecordError(
            f"the data for {what} must be a path, a dataset or a list of records, not {source!r:.80}{hint}"
        )
    for number, record in enumerate(source):
        if not isinstance(record, Mapping):
            raise RecordError(f"record {number} for {what} is not a mapping but {record!r:.80}")
        yield f"record {number}", _record(record, f"record {number} for {what}")


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # the path holds a NUL
        raise RecordError(f"{str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            record = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            hint = "; each record stands on one line of its own" if line.strip() in "[{" else ""
            raise RecordError(
                f"{where} is not JSON: {error.msg} at column {error.colno}{hint}"
            ) from error
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RecordError(f"{where} cannot be used: {_short(why)}") from error
        if not isinstance(record, dict):
            hint = "; put each record on a line of its own" if isinstance(record, list) else ""
            raise RecordError(f"{where} is not a JSON object{hint}")
        yield where, _record(record, where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise ValueError(f"it gives {twice!r} twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _record(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A record as JSON has it: numpy's numbers and arrays become Python's, and fields that hold None are left out.

    A dataset fills fields that a record lacks with None.
    """
    try:
        return dict(_plain(value, where))
    except RecursionError as error:
        raise RecordError(f"{where} cannot be used: it is nested too deeply") from error


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        fields = {_plain(str(key), where): _plain(item, where) for key, item in value.items()}
        return {key: item for key, item in fields.items() if item is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where} holds {value!r}, which is not a JSON value")
    if isinstance(value, float) and value.is_integer():
        return int(value)  # to JSON Schema 3.0 is an integer; to Python it is no index
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                f"{where} holds half a character (a lone surrogate), which is not text"
            ) from error
    return value


def _short(text: str) -> str:
    """A message in one line; of a long one its beginning and end, which says what is wrong."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 2]} … {line[-_SHOWN // 2 :]}"
