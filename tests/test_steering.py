"""Steering in general: what is in force when, in which order, what is left, and how what was learned is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_capture import N, ids_of
from torch import Tensor

import headlab as hl
from headlab.attention import Edit
from headlab.errors import HeadError, OutputError, PlanError
from headlab.steering import Learned, Method

Lab = Callable[..., Any]


@dataclass(frozen=True)
class Scaled(Method):
    """z times a factor."""

    heads: str = "*.*"
    factor: float = 0.5
    site: str = "z"

    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (0.5, 2.0)

    def edits(self, model: hl.Model) -> Sequence[Edit]:
        return (hl.scale(self.heads, self.site, by=self.factor),)


@dataclass(frozen=True)
class Shifted(Scaled):
    """z plus a number."""

    def edits(self, model: hl.Model) -> Sequence[Edit]:
        return (hl.add(self.heads, self.factor, self.site),)


@dataclass(frozen=True, eq=False)
class Direction(Learned):
    """A vector added to z."""

    vector: Tensor
    factor: float = 1.0
    layers: tuple[int, ...] = (0, 1)

    name: ClassVar[str] = "test_direction"
    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (1.0,)

    def edits(self, model: hl.Model) -> Sequence[Edit]:
        return (hl.add(self.check_model(model), self.factor * self.vector, "z"),)


def direction(model: hl.Model) -> Direction:
    spec = model.spec
    shape = (spec.n_layers, spec.n_heads, spec.d_head, spec.d_model)
    return Direction("L0H1, L1H0", shape, torch.linspace(-1, 1, spec.d_head))


def test_methods_act_in_the_order_given_and_outer_blocks_first(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    twice, plus = Scaled(factor=2.0), Shifted(factor=0.3)
    with model.edit(hl.apply("*.*", lambda z, where: 2.0 * z + 0.3, "z")):
        scaled_first = model.logits(ids)
    with model.edit(hl.apply("*.*", lambda z, where: 2.0 * (z + 0.3), "z")):
        shifted_first = model.logits(ids)
    assert float((scaled_first - shifted_first).abs().max()) > 1e-3
    with hl.steer(model, twice, plus):
        torch.testing.assert_close(model.logits(ids), scaled_first, atol=1e-5, rtol=0)
    with hl.steer(model, plus), hl.steer(model, twice):
        torch.testing.assert_close(model.logits(ids), shifted_first, atol=1e-5, rtol=0)
    with hl.steer(model, plus), model.edit(hl.scale("*.*", by=2.0)):
        torch.testing.assert_close(model.logits(ids), shifted_first, atol=1e-5, rtol=0)


def test_sites_come_in_their_own_order_whatever_the_order_given(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    z, q = Scaled(factor=0.4), Scaled(factor=1.7, site="q")
    with hl.steer(model, z, q):
        one = model.logits(ids)
    with hl.steer(model, q, z):
        assert torch.equal(model.logits(ids), one)


def test_the_model_is_bit_equal_after_the_block(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    before, weights = model.logits(ids), [p.clone() for p in model.module.parameters()]
    with hl.steer(model, Scaled(), hl.steering.Pasta(spans=[(2, 5)], heads="1.*")) as steered:
        assert steered is model
        assert not torch.equal(model.logits(ids), before)
        model.generate(ids, max_new_tokens=3)
    with pytest.raises(PlanError, match="finite"), hl.steer(model, Scaled()):
        Scaled().at(model.logits(ids).sum() * float("nan"))
    assert not model.edited
    assert torch.equal(model.logits(ids), before)
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), weights, strict=True))


def test_a_method_that_does_not_fit_leaves_nothing_of_those_before_it(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    before = model.logits(ids)
    with (
        pytest.raises(HeadError, match="9"),
        hl.steer(model, Scaled(), Scaled(heads="9.0")),
    ):
        pass
    assert not model.edited
    assert torch.equal(model.logits(ids), before)


def test_what_is_no_method_is_refused(lab: Lab) -> None:
    model = lab("llama")
    with pytest.raises(PlanError, match="at least one method"), hl.steer(model):
        pass
    with pytest.raises(PlanError, match="takes methods such as"), hl.steer(model, hl.scale("0.0")):  # type: ignore[arg-type]
        pass
    with pytest.raises(PlanError, match="finite"):
        Scaled().at(float("nan"))


def test_strength_heads_and_spans_are_changed_on_a_copy() -> None:
    method = hl.steering.Pasta(spans=["a"], heads="0.1", alpha=0.1)
    assert method.at(0.5) == hl.steering.Pasta(spans=["a"], heads="0.1", alpha=0.5)
    assert method.on("1.0").heads == "1.0"
    assert method.marking([["b"]]).spans == [["b"]]
    assert method.strength == 0.1
    assert Scaled().marking([["b"]]) == Scaled()
    assert Scaled().randomised(0) is None


# -- learned methods ---------------------------------------------------------------------------------------------------


def test_what_was_learned_is_the_same_after_a_round_trip(lab: Lab, tmp_path: Path) -> None:
    model, ids = lab("llama"), ids_of()
    learned = direction(model)
    path = learned.save(tmp_path / "deep" / "direction.safetensors")
    again = hl.steering.load(path)
    assert isinstance(again, Direction)
    assert (again.heads, again.shape, again.layers) == (learned.heads, learned.shape, (0, 1))
    with hl.steer(model, learned):
        expected = model.logits(ids)
    with hl.steer(model, again):
        assert torch.equal(model.logits(ids), expected)
    assert not list(tmp_path.glob("**/.*"))


def test_what_was_learned_is_refused_by_a_model_of_another_shape(lab: Lab) -> None:
    learned = direction(lab("llama"))
    other = replace(learned, shape=(2, 6, 99, 36))
    with (
        pytest.raises(PlanError, match="d_head 99"),
        hl.steer(lab("llama"), other),
    ):
        pass
    with pytest.raises(PlanError, match="fit it at other heads"):
        learned.on("0.0")


def test_files_that_hold_no_method_are_refused(lab: Lab, tmp_path: Path) -> None:
    good = direction(lab("llama")).save(tmp_path / "good.safetensors")
    tensors = load_file(good)
    bad = {
        "missing": None,
        "text": b"not a safetensors file",
        "cut": good.read_bytes()[:-20],
        "plain": {},
        "unknown": {"format": "headlab-steering-1", "method": "nothing", "settings": "{}"},
        "settings": {"format": "headlab-steering-1", "method": "test_direction", "settings": "[1"},
        "fields": {
            "format": "headlab-steering-1",
            "method": "test_direction",
            "settings": json.dumps({"heads": "0.0", "shape": [1], "what": 3}),
        },
        "unlearned": {"format": "headlab-steering-1", "method": "pasta", "settings": "{}"},
    }
    for name, content in bad.items():
        path = tmp_path / f"{name}.safetensors"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            save_file(tensors, path, content)
        with pytest.raises(OutputError, match=name):
            hl.steering.load(path)


def test_steering_works_beside_capture_and_streaming(lab: Lab, tmp_path: Path) -> None:
    model, ids = lab("llama"), ids_of(batch=1)
    method = hl.steering.Pasta(spans=[(2, 5)], heads="*.*")
    keep = hl.keep.statistics("segment_mass", segments={"marked": (2, 5)})
    plain = model.trace(ids, keep=keep)
    with hl.steer(model, method):
        trace = model.trace(ids, keep=keep)
        streamed = model.stream(ids, keep, tmp_path, chunk=4)
    mass = trace.statistic("segment_mass")
    torch.testing.assert_close(streamed.statistic("segment_mass"), mass, atol=1e-5, rtol=0)
    assert float((mass - plain.statistic("segment_mass"))[:, :, :, N - 1].min()) > 0
