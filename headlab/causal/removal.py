"""Taking whole sets of heads out, the same way for many sets: Shapley values, pruning and circuits share it.

``hl.ablate(heads, "mean", reference=…)`` runs the reference anew for every edit; here it is run once for all sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from headlab.attention import Edit, Head, HeadsLike, Trace, ablate, apply, keep, parse_heads, patch
from headlab.errors import HeadError, PlanError

if TYPE_CHECKING:
    from headlab.model import Model

Groups = Mapping[str, tuple[Head, ...]]


class Removal:
    """Makes the edit that takes a set of heads out at z.

    Args:
        model: The model.
        kind: ``"zero"`` sets z to 0; ``"mean"`` to the head's mean over every position of ``reference``; ``"patch"``
            to the head's z in ``source``, position by position (resample ablation, as circuits are tested).
        reference: Prompts for ``"mean"``.
        source: Trace of the other run for ``"patch"``, with ``hl.keep.tensors("z")`` of every head that is to go.

    Raises:
        PlanError: The kind is unknown, or what it takes values from is missing.
    """

    def __init__(
        self,
        model: Model,
        kind: Literal["zero", "mean", "patch"] = "zero",
        *,
        reference: Any = None,
        source: Trace | None = None,
    ) -> None:
        if kind not in ("zero", "mean", "patch"):
            raise PlanError(f"there is no removal {kind!r}; there are 'zero', 'mean' and 'patch'")
        if kind == "mean" and reference is None:
            raise PlanError("removal 'mean' needs reference= prompts to take means over")
        if kind == "patch" and source is None:
            raise PlanError("removal 'patch' needs source=, the trace of the corrupted run")
        self.kind = kind
        self._source = source
        self._means: dict[int, Tensor] = {}
        #: What its edits depend on, fit for JSON.
        self.about: dict[str, Any] = {"kind": kind}
        if kind == "mean":
            ids = model.tokens(reference)
            self.about["reference"] = ids.tolist()
            self._means = _means(model, ids)
        if source is not None:
            self.about["source"] = source.ids.tolist()

    def edits(self, heads: Sequence[Head]) -> tuple[Edit, ...]:
        """The edits that take these heads out; none for no heads."""
        if not heads:
            return ()
        gone = tuple(sorted(set(heads)))
        if self.kind == "zero":
            return (ablate(gone, "zero"),)
        if self._source is not None:
            return (patch(gone, "z", source=self._source),)
        means = self._means

        def put_mean(x: Tensor, where: Any) -> Tensor:
            return means[where.layer][list(where.heads)].to(x).expand_as(x)

        return (apply(gone, put_mean, "z"),)


def groups_of(
    model: Model,
    groups: Literal["heads", "layers"] | Mapping[str, HeadsLike],
    heads: HeadsLike | None = None,
) -> Groups:
    """Named groups of heads that come and go together.

    Args:
        model: The model.
        groups: ``"heads"``: each by itself; ``"layers"``: all heads of a layer; or groups by name.
        heads: Leave only these heads; by default all; not with groups by name.

    Raises:
        HeadError: A head is in two groups, or a name cannot be read.
        PlanError: There are no such groups, or heads are named beside groups by name.
    """
    if isinstance(groups, Mapping):
        if heads is not None:
            raise PlanError("groups= by name say which heads there are; leave heads= out")
        if not groups:
            raise PlanError("groups={} names no group; give at least one")
        named = {name: parse_heads(members, model.spec) for name, members in groups.items()}
        owner: dict[Head, str] = {}
        for name, members in named.items():
            for head in members:
                if head in owner:
                    raise HeadError(
                        f"head {head} is in the groups {owner[head]!r} and {name!r}; give it to one"
                    )
                owner[head] = name
        return named
    chosen = parse_heads("*.*" if heads is None else heads, model.spec)
    if groups == "heads":
        return {str(head): (head,) for head in chosen}
    if groups != "layers":
        raise PlanError(f"groups={groups!r} must be 'heads', 'layers' or groups by name")
    layers: dict[str, tuple[Head, ...]] = {}
    for head in chosen:
        layers[f"L{head.layer}"] = (*layers.get(f"L{head.layer}", ()), head)
    return layers


def _means(model: Model, ids: Tensor) -> dict[int, Tensor]:
    """Mean z of every head over every position of the reference prompts, [head, d_value] per layer."""
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    for row in ids:  # one prompt at a time: z of all layers is kept
        trace = model.trace(row[row >= 0], keep=[keep.tensors("z")], logits="none")
        for layer in range(model.spec.n_layers):
            z = trace.tensor("z", layer)[0]
            total = (z if z.dtype == torch.float64 else z.float()).sum(0)
            sums[layer] = sums[layer] + total if layer in sums else total
            counts[layer] = counts.get(layer, 0) + len(z)
    return {layer: total / counts[layer] for layer, total in sums.items()}
