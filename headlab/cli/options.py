"""Options that several commands share, as one dataclass in place of a list in every signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, get_type_hints


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
