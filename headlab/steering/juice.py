"""JuICE (Li et al. 2025): in a conflict between context and memory, run twice and add what some heads said at first.

At every step the model runs once as it is, and what the chosen heads compute there is kept; in a second run the same
outputs are added to those heads, a_l times for heads to enhance and −a_s times for heads to suppress:

z_h ← z_h + a_l z_h¹ (enhance),  z_h ← z_h − a_s z_h¹ (suppress),

at all positions. Adding to z is adding W_O^h z to the output projection's result, where the authors' code adds. JuNE,
the paper's single-run form, takes z_h of the same run, so that it scales the head: :class:`JuNE`. With one head and
nothing before it steered, the two are the same.

Heads are found on a few items under three kinds of prompt (:mod:`headlab.tasks.conflicts`): without context, with a
sentence that contradicts, and with a coherent passage that does. A head's score under a kind is the mean rise of the
target's probability over coefficients c when c times its output is added; a head is kept where all three are positive,
and ranked by their sum. Read in the authors' code (GaotangLi/JUICE), as are the coefficients and the five heads of each
list. The code runs two whole passes per token; here each run has a cache of its own, with the same result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from headlab.arguments import count, finite_number
from headlab.attention import Edit, Head, HeadsLike, Where, apply, parse_heads, scale
from headlab.causal import Sweep, metrics
from headlab.errors import HeadError, PlanError
from headlab.prompts import Prompt
from headlab.steering.base import Method

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Coefficients that heads to enhance and heads to suppress are found with.
ENHANCING, SUPPRESSING = (1.0, 3.0, 5.0, 10.0, 30.0), (-1.0, -2.0, -5.0)
#: Models that JuICE is in force on: one run before each pass is all there is.
_IN_FORCE: WeakSet[nn.Module] = WeakSet()
#: Heads of each list.
N_HEADS = 5


@dataclass(frozen=True)
class JuNE(Method):
    """Scale heads up and down in a single run.

    Attributes:
        enhance: Heads whose output is multiplied by 1 + a_l.
        suppress: Heads whose output is multiplied by 1 − a_s.
        a_l: How much is added.
        a_s: How much is taken away.

    Raises:
        PlanError: Neither list has heads, or a factor is not finite.
    """

    enhance: HeadsLike | None = None
    suppress: HeadsLike | None = None
    a_l: float = 1.0
    a_s: float = 1.0

    name: ClassVar[str] = "june"
    strength_field: ClassVar[str] = "a_l"
    strengths: ClassVar[tuple[float, ...]] = (1.0, 3.0, 5.0)

    def __post_init__(self) -> None:
        if not self.enhance and not self.suppress:
            raise PlanError("name heads to enhance= or to suppress=")
        finite_number(self.a_l, "a_l")
        finite_number(self.a_s, "a_s")

    def factors(self, model: Model) -> dict[Head, float]:
        """How much of each head's own output is added to it.

        Raises:
            HeadError: A head does not exist, or is in both lists.
        """
        up = parse_heads(self.enhance, model.spec) if self.enhance else ()
        down = parse_heads(self.suppress, model.spec) if self.suppress else ()
        if both := set(up) & set(down):
            raise HeadError(
                f"head {min(both)} is to be enhanced and suppressed; leave it in one list"
            )
        return dict.fromkeys(up, float(self.a_l)) | dict.fromkeys(down, -float(self.a_s))

    def edits(self, model: Model) -> Sequence[Edit]:
        """One scaling per list."""
        factors = self.factors(model)
        return [scale((head,), "z", by=1 + factor) for head, factor in factors.items()]

    def at(self, strength: float) -> Self:
        """Both factors at this strength."""
        strength = finite_number(strength, "strength")
        return self._with(a_l=strength, a_s=strength)

    def on(self, heads: HeadsLike) -> Self:
        """Other heads, enhanced and suppressed in the proportion of the two lists."""
        raise PlanError(
            f"{self.name} has two lists of heads; make one with others in them to compare"
        )


@dataclass(frozen=True)
class JuICE(JuNE):
    """Add to heads what they computed in a run of the model as it is.

    It holds in whole runs of the model from the beginning of a prompt: trace, logits, generate and stream. The first
    run is of the model without any steering, whatever else is in force; every token costs two passes.
    """

    name: ClassVar[str] = "juice"

    def edits(self, model: Model) -> Sequence[Edit]:
        """Refused: it is more than edits.

        Raises:
            PlanError: Always.
        """
        raise PlanError("JuICE runs the model twice, which edits cannot; use hl.steer")

    @contextmanager
    def apply(self, model: Model) -> Iterator[Model]:
        """Put it in force until the block ends.

        Raises:
            PlanError: JuICE is in force already.
        """
        factors = self.factors(model)
        if model.module in _IN_FORCE:
            raise PlanError("JuICE is in force already; put all heads into the lists of one")
        first = _FirstRun(model, tuple(factors))

        def add(z: Tensor, where: Where) -> Tensor:
            factor = torch.tensor([factors[Head(where.layer, head)] for head in where.heads])
            return z + factor.to(z)[:, None] * first.z(where).to(z)

        with model.edit(apply(tuple(factors), add, "z")), first.watching():
            yield model


class _FirstRun:
    """Runs the model as it is before every forward pass, with a cache of its own, and keeps z of some heads."""

    def __init__(self, model: Model, heads: tuple[Head, ...]) -> None:
        self._model = model
        self._keep = apply(heads, self._note, "z")
        self._z: dict[int, Tensor] = {}
        self._running = False
        self._cache: Any = None

    def z(self, where: Where) -> Tensor:
        """z of this layer's heads in the first run, for the rows being run."""
        z = self._z.get(where.layer)
        if z is None or z.shape[:2] != where.positions.shape:
            raise PlanError(
                "JuICE holds only where whole forward passes of the model are run: its trace, logits, generate and "
                "stream"
            )
        return z

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look on until the block ends."""
        module = self._model.module
        handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(lambda *_: None if self._running else self._z.clear()),
        ]
        _IN_FORCE.add(module)
        try:
            yield
        finally:
            _IN_FORCE.discard(module)
            for handle in handles:
                handle.remove()

    def _note(self, z: Tensor, where: Where) -> Tensor:
        self._z[where.layer] = z
        return z

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running:
            return
        self._running = True
        try:
            with self._model.plain(), self._model.edit(self._keep):
                module(*args, **self._with_own_cache(kwargs))
        finally:
            self._running = False

    def _with_own_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        for name in ("cache", "past_key_values"):  # the argument was renamed in transformers 5.24
            given = kwargs.get(name)
            if given is None:
                continue
            if given.get_seq_length() == 0:
                self._cache = copy.deepcopy(given)
                vars(self._cache).pop(
                    "update", None
                )  # streaming's, which would write into the cache copied
            elif self._cache is None or self._cache.get_seq_length() != given.get_seq_length():
                raise PlanError(
                    "JuICE must see a prompt from its beginning, and this cache was filled before it was in force"
                )
            return kwargs | {name: self._cache}
        return kwargs


def conflict_heads(
    model: Model,
    prompts: Mapping[str, Prompt],
    targets: Sequence[str | int],
    *,
    heads: HeadsLike = "*.*",
    coefficients: Sequence[float] = ENHANCING,
    tell: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Score heads by whether adding c times their output raises a target's probability under every kind of prompt.

    Args:
        model: The model.
        prompts: Prompts by kind, as many of each; the paper takes 4 items.
        targets: What is to be raised, one token for each item.
        heads: Heads to try.
        coefficients: c: positive ones find heads to enhance, negative ones heads to suppress.
        tell: Told, in a few words, what is being done.

    Returns:
        One row per head, best first: ``layer``, ``head``, a column with the mean rise for each kind, ``total``, their
        sum, and ``kept``: whether all are above 0.

    Raises:
        PlanError: There are no prompts or coefficients.
    """
    import pandas as pd

    if not prompts or not len(coefficients):
        raise PlanError("finding heads needs prompts by kind, and coefficients")
    chosen = parse_heads(heads, model.spec)
    # A single head with nothing steered before it: what it computes is what it would compute in a first run.
    variants = [[scale((head,), "z", by=1 + c)] for head in chosen for c in coefficients]
    rises: dict[str, np.ndarray] = {}
    for kind, texts in prompts.items():
        tell(f"trying {len(chosen)} heads on prompts of kind {kind}")
        sweep = Sweep(model, texts, metrics.probability(list(targets)), tell=tell)
        values = np.asarray(sweep.run(variants)) - sweep.clean
        rises[kind] = values.reshape(len(chosen), len(coefficients), -1).mean((1, 2))
    frame = pd.DataFrame(
        {"layer": [head.layer for head in chosen], "head": [head.head for head in chosen], **rises}
    )
    frame["total"] = sum(rises.values())
    frame["kept"] = np.all([rise > 0 for rise in rises.values()], 0)
    order = ["kept", "total"]
    return frame.sort_values(order, ascending=False, kind="stable").reset_index(drop=True)


def best_heads(frame: pd.DataFrame, n: int = N_HEADS) -> tuple[Head, ...]:
    """The best kept heads of :func:`conflict_heads`, at most ``n``.

    Raises:
        HeadError: No head was kept.
    """
    kept = frame[frame["kept"]].head(count(n, "n"))
    if not len(kept):
        raise HeadError("no head raises the target under every kind of prompt")
    return tuple(
        Head(int(layer), int(head)) for layer, head in zip(kept["layer"], kept["head"], strict=True)
    )
