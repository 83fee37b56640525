"""Which engine computes an attention call.

On CUDA that is ``triton``, on a CPU ``cpp``; where it cannot serve a call, ``blockwise`` does, on any device. Each
engine says why it cannot. ``HEADLAB_KERNEL`` forces one by name, and then a call that is beyond it is an error:
whoever forces an engine wants to know that it ran.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from headlab.errors import PlanError, UnsupportedError
from headlab.kernels.gradients import needs_gradients, with_gradients
from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request

#: Environment variable that forces an engine.
VARIABLE = "HEADLAB_KERNEL"


@dataclass(frozen=True)
class Engine:
    """An engine by name; its module is imported when it is first used.

    Attributes:
        name: What ``HEADLAB_KERNEL`` calls it.
        module: Where ``attend`` and, unless it can do every call, ``why_not`` are.
        about: What it is, for a person.
    """

    name: str
    module: str
    about: str

    def __call__(
        self, inputs: AttentionInputs, request: Request, **options: Any
    ) -> AttentionResult:
        """Compute what was requested, with this engine."""
        result: AttentionResult = import_module(self.module).attend(inputs, request, **options)
        return result

    def why_not(self, inputs: AttentionInputs, request: Request) -> str | None:
        """Why this call is beyond the engine, as a clause; None where it is not."""
        reason = getattr(import_module(self.module), "why_not", None)
        return None if reason is None else reason(inputs, request)


#: Engines by name: ``engine(inputs, request) -> AttentionResult``.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("triton", "headlab.kernels.fused", "fused Triton kernels, on NVIDIA GPUs"),
        Engine("cpp", "headlab.kernels.native", "C++, on CPUs"),
        Engine("blockwise", "headlab.kernels.blockwise", "PyTorch by blocks of rows, anywhere"),
        Engine("dense", "headlab.kernels.dense", "PyTorch with whole patterns: the definition"),
    )
}


def order(device: torch.device) -> tuple[Engine, ...]:
    """Engines for tensors of a device, the first that can serve a call is used.

    Raises:
        PlanError: ``HEADLAB_KERNEL`` names no engine.
    """
    forced = os.environ.get(VARIABLE, "auto").strip().lower() or "auto"
    if forced != "auto":
        if forced not in ENGINES:
            raise PlanError(
                f"{VARIABLE}={forced!r} names no engine; it can be auto, {', '.join(ENGINES)}"
            )
        return (ENGINES[forced],)
    fast = {"cuda": ("triton",), "cpu": ("cpp",)}.get(device.type, ())
    return tuple(ENGINES[name] for name in (*fast, "blockwise"))


def choose(inputs: AttentionInputs, request: Request) -> Engine:
    """The engine for a call.

    Raises:
        PlanError: ``HEADLAB_KERNEL`` names no engine.
        UnsupportedError: It names one that cannot serve this call.
    """
    reasons = []
    for engine in order(inputs.q.device):
        reason = engine.why_not(inputs, request)
        if reason is None:
            return engine
        reasons.append(f"{engine.name} cannot serve this attention call: {reason}")
    raise UnsupportedError(
        f"{VARIABLE} is set, and {'; '.join(reasons)}; unset it to let headlab choose"
    )


def attend(inputs: AttentionInputs, request: Request) -> AttentionResult:
    """Compute attention and what was requested of it, differentiably where inputs require gradients.

    Args:
        inputs: The attention call.
        request: What to return.

    Raises:
        PlanError: ``HEADLAB_KERNEL`` names no engine.
        UnsupportedError: It names one that cannot serve this call.
    """
    engine = choose(inputs, request)
    with torch.autocast(inputs.q.device.type, enabled=False):  # statistics are not a model's matter
        if needs_gradients(inputs, request):
            return with_gradients(engine, inputs, request)
        return engine(inputs, request)
