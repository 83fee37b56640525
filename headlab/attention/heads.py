"""Naming heads: ``L18H6``, ``18.6``, ``(18, 6)``, and sets such as ``"18.6, 17.*"``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import index
from typing import Any, NamedTuple, TypeAlias

from headlab.errors import HeadError
from headlab.models.spec import ModelSpec

_HEAD = re.compile(r"^(?:L(\d+|\*)H(\d+|\*)|(\d+|\*)\.(\d+|\*))$", re.IGNORECASE)
_ONE_HEAD = re.compile(r"L([0-9]{1,9})H([0-9]{1,9})|([0-9]{1,9})\.([0-9]{1,9})", re.IGNORECASE)


class Head(NamedTuple):
    """One query head, counted from zero; prints as ``L18H6``."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


HeadsLike: TypeAlias = "str | tuple[int, int] | Head | Iterable[str | tuple[int, int] | Head]"


def parse_heads(what: HeadsLike, spec: ModelSpec) -> tuple[Head, ...]:
    """Turn any way of naming heads into heads of this model, sorted, each once.

    Args:
        what: ``"L18H6"``, ``"18.6"``, ``(18, 6)``, a comma-separated set in which ``*`` stands for every layer
            or head (``"18.6, 17.*, *.0"``), or a collection of any of these.
        spec: The model the heads belong to.

    Raises:
        HeadError: What was given cannot be read, names a head the model does not have, or names none.
    """
    heads = tuple(sorted(set(_expand(what, spec))))
    if not heads:
        raise HeadError(f"no head was named; {_valid(spec)}")
    return heads


def read_head(what: Any) -> Head:
    """One head from ``"L18H6"``, ``"18.6"`` or ``(18, 6)``, of no model in particular.

    Raises:
        HeadError: It names none.
    """
    if isinstance(what, str):
        match = _ONE_HEAD.fullmatch(what.strip())
        if match:
            layer, head = (int(group) for group in match.groups() if group is not None)
            return Head(layer, head)
    elif isinstance(what, tuple) and len(what) == 2 and all(map(_is_int, what)):
        return Head(index(what[0]), index(what[1]))
    raise HeadError(f"{what!r:.60} does not name a head; write 'L18H6', '18.6' or (18, 6)")


def _expand(what: HeadsLike, spec: ModelSpec) -> list[Head]:
    if isinstance(what, str):
        return [head for part in what.split(",") if part.strip() for head in _parse(part, spec)]
    if isinstance(what, tuple) and len(what) == 2 and all(_is_int(part) for part in what):
        layer, head = (index(part) for part in what)  # type: ignore[arg-type]  # just checked
        return [_checked(layer, head, spec)]
    if isinstance(what, Iterable):
        return [head for part in what for head in _expand(part, spec)]  # type: ignore[arg-type]  # a tuple of heads
    raise HeadError(f"{what!r} does not name heads; write L18H6, 18.6, (18, 6) or '18.6, 17.*'")


def _parse(text: str, spec: ModelSpec) -> list[Head]:
    match = _HEAD.match(text.strip())
    if match is None:
        raise HeadError(
            f"{text.strip()!r} does not name a head; write L18H6, 18.6 or a set like '18.6, 17.*'"
        )
    layer, head = (group for group in match.groups() if group is not None)
    layers = range(spec.n_layers) if layer == "*" else [int(layer)]
    return [
        _checked(at, which, spec)
        for at in layers
        for which in (range(_n_heads(at, spec)) if head == "*" else [int(head)])
    ]


def _checked(layer: int, head: int, spec: ModelSpec) -> Head:
    if not (0 <= layer < spec.n_layers and 0 <= head < _n_heads(layer, spec)):
        raise HeadError(f"head L{layer}H{head} does not exist: {_valid(spec)}")
    return Head(layer, head)


def _n_heads(layer: int, spec: ModelSpec) -> int:
    return spec.layers[layer].n_heads if 0 <= layer < spec.n_layers else spec.n_heads


def _valid(spec: ModelSpec) -> str:
    return f"{spec.name} has layers 0–{spec.n_layers - 1} and heads 0–{spec.n_heads - 1}"


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__")
