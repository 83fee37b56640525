"""Circuits as JSON, read back only where every part of them makes sense.

    {"format": "headlab-circuit-1", "kind": "edges", "metric": "logit difference", "method": "EAP-IG",
     "model": {"name": "…", "fingerprint": "…", "n_heads": [9, 9, …], "parallel": false},
     "edges": [{"source": "L0H1", "target": "L2H3", "input": "k", "score": 0.2}, …]}

A circuit of heads has ``"heads": [{"head": "L2H3", "score": 0.2}, …]`` instead of edges.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headlab.causal.circuits.circuit import Circuit
from headlab.causal.graph import Edge
from headlab.errors import OutputError, PlanError

if TYPE_CHECKING:
    from headlab.causal.circuits.circuit import Kind

FORMAT = "headlab-circuit-1"
_PARTS = {"edges": ("source", "target", "input"), "heads": ("head",)}
#: More heads than any model has: n_heads of a file cannot make work without end.
MOST_HEADS = 100_000
_LARGEST = sys.float_info.max  # JSON allows whole numbers beyond it
_TOP = {"format": str, "kind": str, "model": dict, "metric": str, "method": str}
_MODEL = {"name": str, "fingerprint": str, "n_heads": list, "parallel": bool}
_NAMES = {str: "text", dict: "an object", list: "a list", bool: "true or false"}


def to_json(circuit: Circuit, indent: int | None = None) -> str:
    """A circuit as JSON text; numbers come back bit for bit."""
    names = _PARTS[circuit.kind]
    items = [
        dict(zip(names, item if isinstance(item, tuple) else (item,), strict=True))
        | {"score": float(score)}
        for item, score in circuit.scores.items()
    ]
    document = {
        "format": FORMAT,
        "kind": circuit.kind,
        "metric": circuit.metric,
        "method": circuit.method,
        "model": {
            "name": circuit.model,
            "fingerprint": circuit.fingerprint,
            "n_heads": list(circuit.n_heads),
            "parallel": circuit.parallel,
        },
        circuit.kind: items,
    }
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Circuit:
    """The circuit in a JSON text.

    Raises:
        OutputError: It is not one; the message says what is wrong and where.
    """
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except (ValueError, TypeError, RecursionError) as error:
        raise OutputError(f"a circuit must be JSON text, but it cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise OutputError(f"a circuit must be a JSON object, not {_kind_of(document)}")
    if document.get("format") != FORMAT:
        raise OutputError(
            f"the circuit has the format {document.get('format')!r:.60}, but this headlab reads {FORMAT!r}; write it "
            "anew with Circuit.to_json"
        )
    _has(document, _TOP, "the circuit")
    kind: Kind = document["kind"]
    if kind not in _PARTS:
        raise OutputError(f"the circuit's kind is {kind!r:.60}; it must be 'edges' or 'heads'")
    _has(document, {kind: list}, "the circuit")
    facts = document["model"]
    _has(facts, _MODEL, "the circuit's model")
    n_heads = facts["n_heads"]
    if not n_heads or not all(type(number) is int and number > 0 for number in n_heads):
        raise OutputError(
            "the circuit's model needs n_heads, a whole number above 0 for each layer"
        )
    if sum(n_heads) > MOST_HEADS:
        raise OutputError(f"the circuit's model has more than {MOST_HEADS} heads, which none has")
    scores = _scores(document[kind], kind)
    try:
        return Circuit(
            kind,
            scores,
            facts["name"],
            facts["fingerprint"],
            tuple(n_heads),
            facts["parallel"],
            document["metric"],
            document["method"],
        )
    except PlanError as error:
        raise OutputError(f"the circuit cannot be read: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no name stands twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r:.60} stands twice in one object")
        found[name] = value
    return found


def _scores(items: list[Any], kind: Kind) -> dict[Any, float]:
    scores: dict[Any, float] = {}
    for at, item in enumerate(items):
        where = f"entry {at} of the circuit's {kind}"
        if not isinstance(item, dict):
            raise OutputError(f"{where} must be an object, not {_kind_of(item)}")
        _has(item, dict.fromkeys(_PARTS[kind], str), where)
        score = item.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or abs(score) > _LARGEST:
            raise OutputError(f"{where} needs a score, a finite number")
        parts = [item[name] for name in _PARTS[kind]]
        name = Edge(*parts) if kind == "edges" else parts[0]
        if name in scores:
            raise OutputError(f"{where}, {name}, is there twice; leave one out")
        scores[name] = float(score)
    return scores


def _has(document: dict[str, Any], wanted: Mapping[str, type], where: str) -> None:
    for name, kind in wanted.items():
        if type(document.get(name)) is not kind:
            found = _kind_of(document[name]) if name in document else "nothing"
            raise OutputError(f"{where} needs {name!r}, {_NAMES[kind]}, but has {found}")


def _kind_of(value: object) -> str:
    return _NAMES.get(type(value), "nothing" if value is None else "a number")


__all__ = ["FORMAT", "from_json", "to_json"]
