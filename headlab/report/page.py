"""What the template shows: numbers of the static page as text, shapes as SVG coordinates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from headlab.report.files import plain
from headlab.report.payload import condensed
from headlab.report.scale import Scale, count, duration, small
from headlab.roles.scores import Example, head_label, visible

if TYPE_CHECKING:
    from headlab.report.model import Report

STATIC_ROWS = 10
STATIC_CLAIMED = 40
STATIC_EXAMPLES = 2
OVERLAPS = 60
ABLATIONS = 200
STRIP_WIDTH = 120
SHADES = 8
STRONGEST = 4

_LABELS = {
    "headlab": "headlab",
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "python": "Python",
    "platform": "Platform",
    "command": "Command",
    "configuration": "Configuration",
    "seeds": "Seeds",
    "fingerprint": "Model fingerprint",
    "fingerprint_method": "How it was made",
    "tokenizer_sha256": "Tokenizer SHA-256",
    "token_ids_sha256": "Token ids SHA-256",
    "wall_seconds": "Wall time",
    "date": "Date",
}


def page(
    report: Report, scales: Mapping[str, Scale], examples: Sequence[Example]
) -> dict[str, Any]:
    """Context of ``templates/report.html.j2``."""
    frame = report.scores.frame
    claimed = frame[frame["claimed"]]
    stable = {row["role"]: row for row in report.scores.stability().to_dict("records")}
    return {
        "model": report.model,
        "facts": _facts(report),
        "alpha": f"{report.scores.alpha:g}",
        "n_heads": len(frame[["layer", "head"]].drop_duplicates()),
        "n_claimed": len(claimed[["layer", "head"]].drop_duplicates()),
        "n_measured": int(frame["score"].notna().sum()),
        "n_unmeasured": int(frame["score"].isna().sum()),
        "wall": _wall(report.reproducibility.get("wall_seconds")),
        "date": str(report.reproducibility.get("date") or "")[:10],
        "warnings": [_text(warning) for warning in report.warnings],
        "roles": [
            _role(report, name, scales[name], examples, stable[name])
            for name in report.scores.names
        ],
        "examples": _example_counts(report, examples),
        "overlaps": _overlaps(report, claimed),
        "causal": _causal(report),
        "checks": [_check(name, value) for name, value in report.checks.items()],
        "reproducibility": list(_reproducibility(report.reproducibility)),
        "schema_version": report.schema_version,
        "strip_width": STRIP_WIDTH,
    }


def _facts(report: Report) -> list[str]:
    model = report.model
    kv = f" ({model.n_kv_heads} key/value)" if model.n_kv_heads != model.n_heads else ""
    windows = sorted({window for window in model.windows if window is not None})
    facts = [
        _text(model.family),
        f"{model.n_layers} layers × {model.n_heads} heads{kv}",
        f"head width {model.d_head}",
        f"{count(model.n_parameters)} parameters",
        f"{_text(model.dtype)} on {_text(model.device)}",
    ]
    if windows:
        sliding = sum(window is not None for window in model.windows)
        sizes = ", ".join(f"{window:,}" for window in windows)
        facts.insert(2, f"{sliding} layers with a sliding window of {sizes}")
    return facts


def _role(
    report: Report,
    name: str,
    scale: Scale,
    examples: Sequence[Example],
    stable: Mapping[Any, Any],
) -> dict[str, Any]:
    info = report.scores.role(name)
    rows = report.scores.ranked(name)
    claimed = report.scores.claimed(name)
    shown = rows.head(max(STATIC_ROWS, min(len(claimed), STATIC_CLAIMED)))
    best = [example for example in examples if example.role == name and example.kind == "high"]
    return {
        "name": name,
        "title": visible(info.title, 80),
        "question": info.question,
        "info": info,
        "least": _least(info.min_score, info.min_effect),
        "claimed": claimed,
        "stable": _stable(stable),
        "n_rows": len(rows),
        "n_measured": int(rows["score"].notna().sum()),
        "map": _map(report, rows, scale),
        "rows": [_row(row, scale) for row in shown.to_dict("records")],
        "examples": [_example(example, scale) for example in _one_per_head(best)],
    }


def _stable(row: Mapping[Any, Any]) -> str:
    parts = []
    if math.isfinite(row["rank_correlation"]):
        parts.append(
            f"rank correlation of their scores {row['rank_correlation']:.2f}".replace("-", "−")
        )
    if math.isfinite(row["agreement"]):
        parts.append(f"{row['agreement']:.0%} of their best heads in common")
    return ", ".join(parts)


def _least(score: float, effect: float) -> str:
    parts = [
        f"{name} ≥ {value:g}"
        for name, value in (("score", score), ("effect", effect))
        if math.isfinite(value)
    ]
    return " and ".join(parts)


def _map(report: Report, rows: pd.DataFrame, scale: Scale) -> dict[str, Any]:
    """A small map as one SVG path per colour class, in cells of 1 × 1."""
    paths: dict[str, list[str]] = {}
    rings: list[str] = []
    for row in rows.to_dict("records"):
        x, y = row["head"], row["layer"]
        paths.setdefault(_class(row, scale), []).append(f"M{x} {y}h1v1h-1z")
        if row["claimed"]:
            rings.append(f"M{x} {y}h1v1h-1z")
    return {
        "width": max(report.model.n_heads, int(rows["head"].max()) + 1 if len(rows) else 1),
        "height": max(report.model.n_layers, int(rows["layer"].max()) + 1 if len(rows) else 1),
        "paths": [(name, "".join(parts)) for name, parts in sorted(paths.items())],
        "rings": "".join(rings),
    }


def _class(row: Mapping[Any, Any], scale: Scale) -> str:
    if not math.isfinite(row["effect"]):
        return "na"
    step = scale.step(row["effect"])
    return "z" if step == 0 else f"{'p' if step > 0 else 'n'}{abs(step)}"


def _row(row: Mapping[Any, Any], scale: Scale) -> dict[str, Any]:
    return {
        "label": head_label(row["layer"], row["head"]),
        "strip": _strip(row, scale),
        "score": scale.text(row["score"]),
        "interval": _interval(row["ci_low"], row["ci_high"], scale),
        "null": scale.text(row["null_mean"]),
        "effect": scale.text(row["effect"]),
        "p": small(row["p_value"]),
        "q": small(row["q_value"]),
        "n": f"{row['n']:,}",
        "claimed": row["claimed"],
        "note": _text(row["note"]),
    }


def _interval(low: float, high: float, scale: Scale) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "–"
    return f"{scale.text(low)} to {scale.text(high)}"


def _strip(row: Mapping[Any, Any], scale: Scale) -> dict[str, float] | None:
    """Score, interval and null on the role's axis, in pixels; None for a head without a score."""
    if not math.isfinite(row["score"]):
        return None
    columns = {"score": "score", "low": "ci_low", "high": "ci_high", "null": "null_mean"}
    values = {key: row[column] for key, column in columns.items() if math.isfinite(row[column])}
    # The dot's radius is kept free on either side.
    return {key: 4 + scale.place(value, STRIP_WIDTH - 8) for key, value in values.items()}


def _one_per_head(examples: Sequence[Example]) -> list[Example]:
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.label, example)
    return list(first.values())[:STATIC_EXAMPLES]


def _example(example: Example, scale: Scale) -> dict[str, Any]:
    spans = condensed(example)
    parts: list[dict[str, Any]] = []
    end = 0
    for start, stop in [*spans, (len(example.tokens), len(example.tokens))]:
        if start > end:
            parts.append({"gap": start - end})
        parts.extend(_token(example, position) for position in range(start, stop))
        end = stop
    keys = sorted(range(len(example.weights)), key=lambda key: -example.weights[key])[:STRONGEST]
    return {
        "label": example.label,
        "value": scale.text(example.value),
        "position": example.query,
        "query": visible(example.tokens[example.query]),
        "parts": parts,
        "strongest": [
            (visible(example.tokens[key]), key, f"{example.weights[key]:.3f}") for key in keys
        ],
    }


def _token(example: Example, position: int) -> dict[str, Any]:
    known = position < len(example.weights)
    weight = example.weights[position] if known else 0.0
    shade = min(SHADES, math.ceil(SHADES * math.sqrt(weight))) if weight >= 0.0005 else 0
    return {
        "gap": 0,
        "text": visible(example.tokens[position]),
        "shade": shade,
        "query": position == example.query,
        "after": not known,
    }


def _example_counts(report: Report, shown: Sequence[Example]) -> dict[str, int]:
    heads = {(example.role, example.label) for example in shown}
    return {"shown": len(shown), "kept": len(report.examples), "heads": len(heads)}


def _overlaps(report: Report, claimed: pd.DataFrame) -> dict[str, Any]:
    titles = {info.name: visible(info.title, 80) for info in report.scores.roles}
    by_head: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in claimed.to_dict("records"):
        entry = {"name": row["role"], "title": titles[row["role"]], "q": small(row["q_value"])}
        by_head.setdefault((row["layer"], row["head"]), []).append(entry)
    several = [(head, roles) for head, roles in by_head.items() if len(roles) > 1]
    several.sort(key=lambda item: (-len(item[1]), item[0]))
    rows = [{"label": head_label(*head), "roles": roles} for head, roles in several[:OVERLAPS]]
    counts = report.scores.overlap()
    some = [name for name in counts.index if counts.loc[name, name] > 0]
    table = [
        {"title": titles[one], "counts": [int(counts.loc[one, other]) for other in some]}
        for one in some
    ]
    return {
        "rows": rows,
        "total": len(several),
        "roles": [titles[name] for name in some],
        "table": table,
    }


def _causal(report: Report) -> dict[str, Any] | None:
    if report.causal is None:
        return None
    titles = {info.name: visible(info.title, 80) for info in report.scores.roles}

    def number(value: float) -> str:
        return f"{value:.3g}".replace("-", "\N{MINUS SIGN}") if math.isfinite(value) else "–"

    rows = [
        {
            "role": titles.get(row["role"], _text(row["role"])),
            "heads": _text(row["heads"]),
            "method": _text(row["method"]),
            "metric": _text(row["metric"]),
            "baseline": number(row["baseline"]),
            "effect": number(row["effect"]),
            "interval": f"{number(row['ci_low'])} to {number(row['ci_high'])}",
            "control": number(row["control_effect"]),
            "range": f"{number(row['control_low'])} to {number(row['control_high'])}",
            "n": f"{row['n']:,}",
            "confirmed": row["confirmed"],
            "note": _text(row["note"]),
        }
        for row in report.causal.head(ABLATIONS).to_dict("records")
    ]
    return {"rows": rows, "total": len(report.causal)}


def _check(name: str, value: float | str | bool) -> dict[str, str]:
    label = _text(name).replace("_", " ")
    if isinstance(value, bool):
        state = "passed" if value else "failed"
        return {"name": label, "value": state, "state": state}
    if isinstance(value, float | int):
        text = f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
        return {"name": label, "value": text, "state": ""}
    return {"name": label, "value": _text(str(value)), "state": ""}


def _reproducibility(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    known = [name for name in _LABELS if name in block]
    for name in [*known, *(name for name in block if name not in _LABELS)]:
        value = plain(block[name])
        label = _LABELS.get(name, _text(name).replace("_", " "))
        if isinstance(value, dict | list):
            yield {"label": label, "lines": json.dumps(value, indent=2, ensure_ascii=False)}
        elif name == "wall_seconds":
            yield {"label": label, "text": _wall(value) or "–"}
        else:
            yield {"label": label, "text": "–" if value is None else _text(str(value), 2000)}


def _wall(seconds: Any) -> str:
    return duration(float(seconds)) if isinstance(seconds, int | float) else ""


def _text(value: Any, limit: int = 500) -> str:
    return visible(str(value), limit) if value else ""
