"""Methods that learn something, and how that is kept: a safetensors file whose header holds the settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from headlab.arguments import finite_number, is_integer
from headlab.attention import Head, HeadsLike, parse_heads, read_head
from headlab.errors import OutputError, PlanError
from headlab.shards import reading
from headlab.steering.base import Method

if TYPE_CHECKING:
    from headlab.model import Model

_FORMAT = "headlab-steering-1"


@dataclass(frozen=True, eq=False)
class Learned(Method):
    """A method with something learned from one model.

    Attributes:
        heads: The heads it acts on, as text such as ``"L14H0, L18H6"``.
        shape: Layers, query heads of a layer, d_head and d_model of the model it was learned from.
    """

    heads: str
    shape: tuple[int, int, int, int]

    #: Sizes of each tensor, last axis last: ``layers``, ``n_heads``, ``heads`` (those it acts on, in their order),
    #: ``d_head``, ``d_value``, ``d_model``, or the name of a field of heads.
    sizes: ClassVar[dict[str, tuple[str, ...]]] = {}

    def on(self, heads: HeadsLike) -> Self:
        """Refused: what was learned belongs to the heads it was learned at.

        Raises:
            PlanError: Always, unless a method can do it.
        """
        raise PlanError(
            f"{self.name} has learned something of its own heads; fit it at other heads to compare"
        )

    def check_model(self, model: Model) -> tuple[Head, ...]:
        """Its heads, once it is known to fit the model.

        Raises:
            PlanError: The model has another shape than the one it was learned from.
        """
        if shape_of(model) != tuple(self.shape):
            ours, theirs = (
                "{} layers × {} heads, d_head {}, d_model {}".format(*shape)
                for shape in (self.shape, shape_of(model))
            )
            raise PlanError(
                f"{self.name} was learned from a model of {ours}, and {model.name} has {theirs}; fit it on "
                "this model"
            )
        finite_number(self.strength, self.strength_field)
        heads = parse_heads(self.heads, model.spec)
        for name, axes in self.sizes.items():
            self._check_tensor(model, name, axes, heads)
        return heads

    def _check_tensor(
        self, model: Model, name: str, axes: tuple[str, ...], heads: tuple[Head, ...]
    ) -> None:
        """Refuse a tensor of other sizes, or with NaN or infinity in it."""
        known = dict(zip(("layers", "n_heads", "d_head", "d_model"), self.shape, strict=True))
        known["d_value"] = model.spec.layers[heads[0].layer].d_value
        wanted = []
        for axis in axes:
            if axis in known:
                wanted.append(known[axis])
                continue
            text = getattr(self, axis)
            rows = parse_heads(text, model.spec)
            if "*" not in text and list(rows) != [read_head(part) for part in text.split(",")]:
                raise PlanError(
                    f"{self.name} has {axis} {text!r:.60}, out of order; its rows belong to {head_names(rows)!r:.60}"
                )
            wanted.append(len(rows))
        tensor = getattr(self, name)
        fine = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if not fine or list(tensor.shape[-len(wanted) :]) != wanted:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise PlanError(f"{name} of {self.name} must be numbers of shape {wanted}, not {found}")
        if not bool(tensor.isfinite().all()):
            raise PlanError(f"{name} of {self.name} holds NaN or infinity")

    def save(self, path: str | Path) -> Path:
        """Write it to a ``.safetensors`` file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        path = Path(path)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        settings = {name: x for name, x in values.items() if name not in tensors}
        about = {"format": _FORMAT, "method": self.name, "settings": json.dumps(settings)}
        content = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, about)
        partial = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        return path


def load(path: str | Path) -> Learned:
    """Read what :meth:`Learned.save` wrote; nothing is unpickled.

    Raises:
        OutputError: The file holds no steering method.
    """
    with reading(path, "steering method"):
        with safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.get("format") != _FORMAT:
            raise OutputError(f"{path} holds no steering method")
        method = Method.all.get(about["method"])
        if method is None or not issubclass(method, Learned):
            raise OutputError(f"{path} holds the unknown method {about['method']!r:.60}")
        settings: dict[str, Any] = {
            key: tuple(x) if isinstance(x, list) else x
            for key, x in json.loads(about["settings"]).items()
        }
        shape = settings.get("shape")
        if not isinstance(shape, tuple) or len(shape) != 4 or not all(map(is_integer, shape)):
            raise OutputError(f"{path} tells no shape of a model")
        if not isinstance(settings.get("heads"), str):
            raise OutputError(f"{path} names no heads")
        found: Learned = method(**settings, **tensors)
        return found


def shape_of(model: Model) -> tuple[int, int, int, int]:
    """Layers, query heads of a layer (the most there are), d_head and d_model."""
    layers = model.spec.layers
    return (
        len(layers),
        max(layer.n_heads for layer in layers),
        max(layer.d_head for layer in layers),
        model.spec.d_model,
    )


def head_names(heads: tuple[Head, ...]) -> str:
    """Heads as text that :func:`~headlab.parse_heads` reads."""
    return ", ".join(map(str, heads))
