"""Options that several commands share, and how a dataclass of them takes the place of a list in every signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Optional, get_type_hints

import typer

EMBEDDED = "smollm2-135m"
Model_ = Annotated[str, typer.Argument(help="Embedded name, hub id, folder or GGUF file.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Revision = Annotated[Optional[str], typer.Option(help="Hub revision.")]  # noqa: UP045  # typer reads it at run time
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Let code from the hub run.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a command's first parameter, a dataclass, into one option per field.

    typer reads options off a signature; this writes it out, and puts the dataclass together again.
    """
    hints = get_type_hints(command, include_extras=True)
    first, *own = inspect.signature(command).parameters.values()
    shared = hints[first.name]
    types = get_type_hints(shared, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=types[field.name])
        for field in fields(shared)
    ]
    parameters += [one.replace(kind=keyword, annotation=hints[one.name]) for one in own]

    @wraps(command)
    def run(**given: Any) -> None:
        command(shared(**{field.name: given.pop(field.name) for field in fields(shared)}), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
