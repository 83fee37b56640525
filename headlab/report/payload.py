"""The data the page's script reads: compact, rounded for the eye, safe in a script element."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from headlab.report.scale import Scale
from headlab.roles.scores import Example, visible

if TYPE_CHECKING:
    from headlab.report.model import Report

HEADS_PER_ROLE = 8
EXAMPLES_PER_HEAD = 9
TOKENS_PER_EXAMPLE = 256

# A longer example keeps its first tokens and the surroundings of its query and strongest keys.
_FIRST, _BEFORE, _AFTER, _STRONGEST, _AROUND = 8, 72, 8, 16, 4

_COLUMNS = {
    "score": "score",
    "low": "ci_low",
    "high": "ci_high",
    "null": "null_mean",
    "effect": "effect",
    "p": "p_value",
    "q": "q_value",
}


def payload(
    report: Report, scales: dict[str, Scale], examples: Sequence[Example]
) -> dict[str, Any]:
    """All the script needs; every number is JSON, missing and infinite ones are None.

    Heads are listed once, as ``[layer, head]``; everything per head is a list in that order.
    """
    frame = report.scores.frame
    pairs = sorted(set(zip(frame["layer"].tolist(), frame["head"].tolist(), strict=True)))
    heads = pd.MultiIndex.from_tuples(pairs, names=["layer", "head"])
    index = {pair: position for position, pair in enumerate(pairs)}
    notes = _Table()
    tokens = _Table()
    names = report.scores.names
    model = report.model
    return {
        "alpha": report.scores.alpha,
        "nHeads": model.n_heads,
        "nKvHeads": model.n_kv_heads,
        "windows": list(model.windows),
        "stacks": list(model.stacks),
        "heads": [list(pair) for pair in pairs],
        "roles": [_role(report, name, scales[name], heads, index, notes) for name in names],
        "notes": notes.items,
        "examples": [
            _example(example, names.index(example.role), index, tokens) for example in examples
        ],
        "tokens": tokens.items,
        "causal": _causal(report),
        "details": _details(report, index),
    }


def script_json(data: Any) -> str:
    """JSON that cannot end a script element or be read as markup, whatever strings it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text  # json.dumps has escaped all that is not ASCII, U+2028 included


def shown_examples(report: Report) -> tuple[Example, ...]:
    """Examples the page has room for: of the best heads of each role, so many of each."""
    kept: list[Example] = []
    known = set(
        zip(*(report.scores.frame[name].tolist() for name in ("layer", "head")), strict=True)
    )
    for name in report.scores.names:
        of_role: dict[tuple[int, int], list[Example]] = {}
        for example in report.examples:
            if example.role == name and (example.layer, example.head) in known:
                of_role.setdefault((example.layer, example.head), []).append(example)
        rows = report.scores.ranked(name)
        ranked = list(zip(rows["layer"].tolist(), rows["head"].tolist(), strict=True))
        order = {pair: position for position, pair in enumerate(ranked)}
        best = sorted(of_role, key=lambda pair: order.get(pair, len(order)))[:HEADS_PER_ROLE]
        for pair in best:
            kept.extend(_spread(of_role[pair]))
    return tuple(kept)


def condensed(example: Example) -> list[tuple[int, int]]:
    """Half-open spans of tokens to show, in order; a long example's dull stretches are left out."""
    length = len(example.tokens)
    if length <= TOKENS_PER_EXAMPLE:
        return [(0, length)]
    keep = set(range(_FIRST))
    keep.update(range(example.query - _BEFORE, example.query + _AFTER + 1))
    keys = range(len(example.weights))
    for key in sorted(keys, key=lambda key: -example.weights[key])[:_STRONGEST]:
        keep.update(range(key - _AROUND, key + _AROUND + 1))
    spans: list[tuple[int, int]] = []
    for position in sorted(position for position in keep if 0 <= position < length):
        if spans and position <= spans[-1][1]:
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return spans


class _Table:
    """Strings by number, each stored once."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.items)
            self.items.append(text)
        return self._numbers[text]


def _spread(examples: list[Example]) -> list[Example]:
    # Fill the page's places evenly over the kinds, so that none crowds out the others.
    kinds = ("high", "median", "random")
    of_kind = {kind: [example for example in examples if example.kind == kind] for kind in kinds}
    each = EXAMPLES_PER_HEAD // len(kinds)
    return [example for kind in kinds for example in of_kind[kind][:each]]


def _role(
    report: Report,
    name: str,
    scale: Scale,
    heads: pd.MultiIndex,
    index: dict[tuple[int, int], int],
    notes: _Table,
) -> dict[str, Any]:
    info = report.scores.role(name)
    ranked = report.scores.ranked(name)
    pairs = zip(ranked["layer"].tolist(), ranked["head"].tolist(), strict=True)
    rows = ranked.set_index(["layer", "head"]).reindex(heads)
    present = rows["note"].notna()
    return {
        "name": name,
        "title": visible(info.title, 80),
        "question": visible(info.question, 500),
        "axis": [_rounded(scale.low), _rounded(scale.high)],
        "scale": _rounded(scale.effect),
        "decimals": scale.decimals,
        "order": [index[pair] for pair in pairs],
        **{key: [_rounded(value) for value in rows[column]] for key, column in _COLUMNS.items()},
        "n": [
            int(value) if known else None for value, known in zip(rows["n"], present, strict=True)
        ],
        "claimed": [int(value is True or value == 1) for value in rows["claimed"]],
        "note": [
            notes.number(_note(value)) if known else None
            for value, known in zip(rows["note"], present, strict=True)
        ],
    }


def _example(
    example: Example, role: int, index: dict[tuple[int, int], int], tokens: _Table
) -> dict[str, Any]:
    """Tokens as numbers and weights in ten-thousandths; a gap of n tokens is the number −n."""
    length = len(example.tokens)
    row = list(example.weights) + [0.0] * (length - len(example.weights))
    shown: list[int] = []
    weights: list[int] = []
    end = 0
    for start, stop in [*condensed(example), (length, length)]:
        if start > end:
            shown.append(end - start)
            weights.append(_weight(sum(row[end:start])))
        shown.extend(tokens.number(visible(token)) for token in example.tokens[start:stop])
        weights.extend(_weight(weight) for weight in row[start:stop])
        end = stop
    return {
        "role": role,
        "head": index[example.layer, example.head],
        "kind": example.kind,
        "query": example.query,
        "keys": len(example.weights),
        "value": _rounded(example.value),
        "tokens": shown,
        "weights": weights,
    }


def _details(report: Report, index: dict[tuple[int, int], int]) -> list[dict[str, Any]]:
    """Further numbers of the best heads of each role, and of their layers (``head`` is None)."""
    shown: list[dict[str, Any]] = []
    for number, name in enumerate(report.scores.names):
        rows = report.scores.details[report.scores.details["role"] == name]
        best = report.scores.ranked(name).head(HEADS_PER_ROLE)
        heads = set(zip(best["layer"], best["head"], strict=True))
        layers = {layer for layer, _ in heads}
        for key, part in rows.groupby(["layer", "head", "detail"], sort=False):
            layer, head, detail = int(part["layer"].iloc[0]), int(part["head"].iloc[0]), key[2]
            if (layer, head) not in heads and not (head == -1 and layer in layers):
                continue
            profile = part["at"].notna().all()
            shown.append(
                {
                    "role": number,
                    "layer": layer,
                    "head": index.get((layer, head)),
                    "name": visible(str(detail), 80).replace("_", " "),
                    "meaning": visible(str(part["meaning"].iloc[0]), 300),
                    "at": [_rounded(at) for at in part["at"]] if profile else None,
                    "values": [_rounded(value) for value in part["value"]],
                }
            )
    return shown


def _causal(report: Report) -> list[dict[str, Any]]:
    if report.causal is None:
        return []
    names = list(report.scores.names)
    return [
        {
            "role": names.index(row["role"]) if row["role"] in names else None,
            "heads": visible(row["heads"], 500),
            "metric": visible(row["metric"], 200),
            "effect": _rounded(row["effect"]),
            "control": _rounded(row["control_effect"]),
            "confirmed": bool(row["confirmed"]),
        }
        for row in report.causal.to_dict("records")
    ]


def _note(text: str) -> str:
    return visible(text, 500) if text else ""


def _weight(weight: float) -> int:
    return round(10_000 * weight)


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
