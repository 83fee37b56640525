"""What a way of steering is, and how it is put in force.

    with hl.steer(model, hl.steering.Pasta(spans=["Paris"], heads="14.*")):
        model.generate("…")

A method is a small frozen dataclass that says which edits of which heads it makes. Several compose: they act in the
order given, and those of an outer block before those of an inner one. Within a layer the order is that of
:data:`headlab.attention.edits.SITES` whatever the order given, since a later site is computed from an earlier one; at
one site, edits act one after the other. When the block ends, by an exception too, nothing of them is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headlab.arguments import finite_number
from headlab.attention import Edit, HeadsLike
from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.steering.marks import SpansLike


@dataclass(frozen=True)
class Method(ABC):
    """A way of steering: a frozen dataclass whose fields are its settings.

    Subclasses have a field ``heads``, set the class variables, and give :meth:`edits`. What must be learned is learned
    by a class method ``fit(model, …)`` that returns an instance. One of your own that weighs down the first token:

        @dataclass(frozen=True)
        class Lighter(hl.steering.Method):
            heads: str = "*.*"
            factor: float = 0.5
            strength_field: ClassVar[str] = "factor"
            strengths: ClassVar[tuple[float, ...]] = (0.5, 0.1)

            def edits(self, model):
                def lighten(bias, where):                    # [batch, head, 1 or query, key]
                    first = (where.keys == 0)[:, None, None]     # positions of keys, whatever the padding
                    return bias + math.log(self.factor) * first
                return [hl.apply(self.heads, lighten, "bias")]
    """

    #: What the command line calls it; by default the class's name.
    name: ClassVar[str]
    #: Every method that gives itself a name, by it.
    all: ClassVar[dict[str, type[Method]]] = {}
    #: The field that says how strongly it steers.
    strength_field: ClassVar[str]
    #: Strengths that a sweep tries by default, weakest first.
    strengths: ClassVar[tuple[float, ...]]

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "name" in cls.__dict__:
            Method.all[cls.name] = cls
        else:  # a user's own
            cls.name = cls.__name__

    @abstractmethod
    def edits(self, model: Model) -> Sequence[Edit]:
        """The edits it makes to this model.

        Raises:
            HeadError: It names a head that does not exist.
            PlanError: It does not fit the model.
        """

    def apply(self, model: Model) -> AbstractContextManager[Model]:
        """Put it in force until the block ends; :func:`steer` does it for several."""
        return model.edit(*self.edits(model))

    @property
    def strength(self) -> float:
        """How strongly it steers, in its own units."""
        return float(getattr(self, self.strength_field))

    def at(self, strength: float) -> Self:
        """The same at another strength."""
        return self._with(**{self.strength_field: finite_number(strength, "strength")})

    def on(self, heads: HeadsLike) -> Self:
        """The same at other heads: the control by random heads.

        Raises:
            PlanError: What it has learned belongs to its heads.
        """
        return self._with(heads=heads)

    def marking(self, spans: SpansLike) -> Self:
        """The same for other marked spans; a method that marks no text is returned as it is."""
        return self

    def randomised(self, seed: int) -> Self | None:
        """The same with random directions of the same norms in place of what it learned; None where it has none."""
        return None

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)


@contextmanager
def steer(model: Model, *methods: Method) -> Iterator[Model]:
    """Steer a model until the block ends.

    Methods at one site of a layer act in the order given; sites come in their own order, ``q`` before ``bias`` before
    ``z`` and so on, and biases add up whatever the order.

    Args:
        model: The model; everything run through it meanwhile is steered, generation with a KV cache included.
        methods: What to do, in this order.

    Raises:
        HeadError: A method names a head that does not exist.
        PlanError: A method does not fit the model, or something is no method.
    """
    if not methods:
        raise PlanError(
            "name at least one method, as hl.steer(model, hl.steering.Pasta(spans=['Paris']))"
        )
    for method in methods:
        if not isinstance(method, Method):
            raise PlanError(
                f"hl.steer takes methods such as hl.steering.Pasta(…), not {method!r:.60}; edits go into model.edit"
            )
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(method.apply(model))
        yield model
