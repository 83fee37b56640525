"""Naming the two ends of paths: senders, which are heads, and receivers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headlab.attention.heads import Head, HeadsLike, parse_heads
from headlab.causal.graph import HEAD_INPUTS, LOGITS
from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True)
class Receivers:
    """Where paths end.

    Attributes:
        text: As they were named.
        heads: By layer, the heads whose q, k and v are patched.
        mlps: Layers whose MLP's input is.
        logits: Whether paths end at the logits; there is no other receiver then.
    """

    text: str
    heads: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    mlps: set[int] = field(default_factory=set)
    logits: bool = False

    @property
    def first(self) -> int:
        """The first layer with a receiver."""
        return min([*self.heads, *self.mlps])

    @property
    def last(self) -> int:
        """The last layer with a receiver."""
        return max([*self.heads, *self.mlps])

    def early(self, sender: Head, parallel: bool) -> list[str]:
        """Receivers that do not come after a sender."""
        heads = [
            str(Head(layer, head))
            for layer, inputs in self.heads.items()
            if layer <= sender.layer
            for head in sorted({head for members in inputs.values() for head in members})
        ]
        return heads + [
            f"mlp{layer}"
            for layer in sorted(self.mlps)
            if layer < sender.layer or (parallel and layer == sender.layer)
        ]

    def late(self, sender: Head, parallel: bool) -> bool:
        """Whether any receiver comes after a sender."""
        mlps = any(
            layer > sender.layer or (layer == sender.layer and not parallel) for layer in self.mlps
        )
        return self.logits or mlps or any(layer > sender.layer for layer in self.heads)


def read_receivers(given: str | Sequence[str], model: Model) -> Receivers:
    """Read what was named as receivers."""
    if not isinstance(given, str) and not all(isinstance(part, str) for part in given):
        raise PlanError(f"receivers={given!r:.80} must be text such as 'L9H6:q, mlp5' or 'logits'")
    listed = given.split(",") if isinstance(given, str) else ",".join(given).split(",")
    names = [name.strip() for name in listed if name.strip()]
    found = Receivers(", ".join(names), logits=names == [LOGITS])
    if found.logits:
        return found
    if LOGITS in names or not names:
        raise PlanError(
            f"receivers={given!r:.80}: name logits alone, since they read all others, or heads and MLPs without it"
        )
    for name in names:
        node, colon, letters = name.partition(":")
        if not colon and node.startswith("mlp") and node[3:].isdigit():
            if int(node[3:]) >= model.spec.n_layers:
                raise PlanError(
                    f"receiver {name!r} does not exist: {model.name} has MLPs mlp0 to mlp{model.spec.n_layers - 1}"
                )
            found.mlps.add(int(node[3:]))
            continue
        if not colon or not letters or set(letters) - set(HEAD_INPUTS):
            raise PlanError(
                f"receiver {name!r} cannot be read; write a head with an input, as in 'L9H6:q' or 'L9H6:kv', "
                "'mlp5', or 'logits'"
            )
        for head in parse_heads(node, model.spec):
            inputs = found.heads.setdefault(head.layer, {})
            for letter in letters:
                if head.head not in inputs.setdefault(letter, []):
                    inputs[letter].append(head.head)
    return found


def read_senders(given: HeadsLike, to: Receivers, model: Model, parallel: bool) -> list[Head]:
    """The senders, in order of layers."""
    every = isinstance(given, str) and given.strip() == "all"
    heads = parse_heads("*.*" if every else given, model.spec)
    if every:
        heads = tuple(head for head in heads if to.late(head, parallel))
        if not heads:
            raise PlanError(
                f"no head of {model.name} comes before {to.text}, so no path leads there"
            )
    for head in heads:
        early = [] if every else to.early(head, parallel)
        if early:
            raise PlanError(
                f"there is no path from {head} to {early[0]}: a receiver must lie after every sender; name "
                "earlier senders, or 'all' for those that come before some receiver"
            )
    return list(heads)
