"""The report as one self-contained page: offline, under a strict content security policy."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headlab.report.page import page
from headlab.report.payload import payload, script_json, shown_examples
from headlab.report.scale import Scale
from headlab.roles.scores import visible

if TYPE_CHECKING:
    from headlab.report.model import Report

STYLES = ("base.css", "map.css", "card.css", "table.css")
SCRIPTS = ("base.js", "map.js", "card.js", "table.js", "main.js")


def render(report: Report) -> str:
    """The whole page as text.

    Readable without its script, which only adds selecting, sorting and filtering. The policy admits
    this very script and style by digest and nothing else: no request can leave the page, and text
    that somehow became markup could not run.
    """
    frame = report.scores.frame
    scales = {
        info.name: Scale.of(frame[frame["role"] == info.name], info) for info in report.scores.roles
    }
    examples = shown_examples(report)
    style, script = _style(), _script()
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=Markup(script_json(payload(report, scales, examples))),
            page=page(report, scales, examples),
        )
    )


def summary(report: Report) -> str:
    """The static table a notebook shows: the model, its warnings and the claimed heads."""
    model = report.model
    warnings = "".join(
        f"<li>{html.escape(visible(warning, 300))}</li>" for warning in report.warnings[:20]
    )
    return (
        f"<div><p><b>{html.escape(visible(model.name, 200))}</b> · "
        f"{html.escape(visible(model.family, 80))} · "
        f"{model.n_layers} layers × {model.n_heads} heads</p>"
        f"{f'<ul>{warnings}</ul>' if warnings else ''}{report.scores._repr_html_()}</div>"
    )


@cache
def environment() -> Environment:
    """Renders the package's templates; what reaches a page is escaped, and hides no control character."""
    return Environment(
        loader=PackageLoader("headlab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: Any) -> Any:
    # Whatever text reaches the page, names and warnings too, hides no control or bidi character.
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(
        visible(line, len(line)) if line.strip() else line for line in value.split("\n")
    )


@cache
def _style() -> str:
    return "\n".join(_asset(name) for name in STYLES)


@cache
def _script() -> str:
    # One function around all files: the page adds no global name.
    body = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


def _asset(name: str) -> str:
    path = resources.files("headlab.report").joinpath("assets", name)
    return path.read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    directives: dict[str, Any] = {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())


def digest(text: str) -> str:
    """A script or style as a content security policy names it."""
    hashed = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(hashed).decode()}'"
