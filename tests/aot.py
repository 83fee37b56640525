"""Kernels compiled ahead of time, without a GPU: what the machine code uses.

``python aot.py CAPABILITY CASE ...`` compiles cases for sm_80 or sm_90 and prints a line of what each uses, as
name=number, with TRITON_INTERPRET unset; why a case does not compile goes to stderr. Code is assembled by Triton's own
copy of ptxas and disassembled by its own nvdisasm, so what is counted here is what a GPU would run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from headlab.kernels.fused.call import padded
from headlab.kernels.fused.configs import Program, shipped, with_mask

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel uses, per thread or program.

    Attributes:
        registers: Registers of a thread.
        spills: Bytes of a thread that did not fit them, stored and loaded.
        shared: Bytes of shared memory of a program.
        instructions: How often each instruction stands in the code, by name up to the first dot.
        loops: The same for each innermost loop with matrix instructions, the shortest first.
    """

    registers: int
    spills: int
    shared: int
    instructions: Counter[str]
    loops: list[Counter[str]]


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    warps: int,
    stages: int,
    divisible: tuple[str, ...] = (),
) -> Compiled:
    """Compile a kernel.

    Args:
        kernel: The ``triton.jit`` function.
        types: Type of each argument that is no constant, such as ``*bf16`` or ``i32``.
        constants: Value of each constexpr argument.
        capability: 80 or 90.
        warps: Warps of a program.
        stages: Stages of its pipeline.
        divisible: Integers that are multiples of 16; pointers always are.
    """
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or name in divisible
    }
    code = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        cubin.write_bytes(code.asm["cubin"])
        ptx.write_text(code.asm["ptx"])
        machine = _said(_TOOLS / "nvdisasm", cubin)
        name = re.search(r"\.target (sm_\w+)", code.asm["ptx"])
        assert name is not None
        used = _said(get_ptxas(capability).path, "-v", f"--gpu-name={name[1]}", ptx, "-o", cubin)
    registers = re.search(r"Used (\d+) registers", used)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", used)
    assert registers is not None, used
    assert spills is not None, used
    every, loops = _counted(machine)
    return Compiled(
        int(registers[1]), int(spills[1]) + int(spills[2]), code.metadata.shared, every, loops
    )


def _said(tool: Any, *words: Any) -> str:
    done = subprocess.run([tool, *words], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _counted(machine: str) -> tuple[Counter[str], list[Counter[str]]]:
    """Instructions of the code, and of its innermost loops with matrix instructions."""
    labels: dict[str, int] = {}
    names: list[str] = []
    jumps: list[tuple[int, int]] = []
    for line in machine.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.match(
            r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line
        ):
            target = re.search(r"\.L_x_\d+", code[2])
            if code[1].startswith("BRA") and target and target[0] in labels:
                jumps.append((labels[target[0]], len(names)))
            names.append(code[1].split(".")[0])
    loops = [jump for jump in jumps if {"HMMA", "HGMMA"} & set(names[jump[0] : jump[1]])]
    inner = [
        (a, b)
        for a, b in loops
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    counts = [Counter(names[a : b + 1]) for a, b in inner]
    return Counter(names), sorted(counts, key=lambda count: count.total())


# -- the forward kernel ----------------------------------------------------------------------------

DEFAULT = {"entropy": 1, "maximum": 2, "local": 3}
ROWS = {**DEFAULT, "distance": 4, "argmax": True}

#: Kind of request in the table of tiles, and what the kernel computes.
FORWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "forward-plain": ("plain", {}),
    "forward-default": ("rows", DEFAULT),
    "forward-rows": ("rows", ROWS),
    "forward-features": ("features", {**DEFAULT, "features": 16}),
    "forward-topk": ("topk", {"k": 8}),
    "forward-decode": ("plain", {"bm": 16, "pack": 8, "splits": 16}),
    "forward-mask": ("rows", {**ROWS, "mask": True}),
    "forward-bias": ("rows", {**ROWS, "bias": True, "raw": False}),
    "forward-everything": (
        "topk",
        {
            **{name: slot for name, slot in ROWS.items() if name != "argmax"},
            "features": 16,
            "k": 8,
            "raw": False,
            "two_sided": True,
            "softcap": True,
            "mask": True,
            "bias": True,
            "sinks": True,
        },
    ),
}

_STRIDES = [f"{x}_{axis}" for x in "qkvz" for axis in ("batch", "head", "row")]


def forward(case: str, capability: int) -> tuple[Compiled, int]:
    """The forward kernel for heads of width 128 in bfloat16; and scores a thread has of a tile."""
    from headlab.kernels.fused.forward import forward_kernel

    kind, wanted = FORWARD[case]
    tiles = shipped(f"sm_{capability}", kind, 128, torch.bfloat16)
    if "mask" in wanted or "bias" in wanted:
        tiles = with_mask(tiles, 128)
    warps = tiles.warps if "bm" not in wanted else 4
    sizes = {"bm": tiles.bm, "bn": tiles.bn, "tma": capability >= 90}
    width = {"d": 128, "bd": padded(128), "dv": 128, "bdv": padded(128)}
    program = Program(**{**sizes, **width, **wanted})
    types = dict.fromkeys((parameter.name for parameter in forward_kernel.params), "i32")
    types |= dict.fromkeys(("q_at", "k_at", "v_at", "z_at"), "*bf16")
    types |= dict.fromkeys(("low_at", "high_at", "heads", "key_at", "top_key_at"), "*i32")
    types |= dict.fromkeys(("bias_at", "sinks", "rows_at", "top_at", "x_out"), "*fp32")
    types |= {"x_at": "*fp16", "mask_at": "*u8", "scale": "fp32", "softcap": "fp32"}
    if program.splits > 1:
        types["z_at"] = "*fp32"
    if program.tma:
        types |= dict.fromkeys(("k_at", "v_at"), f"tensordesc<bf16[1, 1, {program.bn}, 128]>")
    divisible = (*_STRIDES, "x_batch", "n_queries", "n_keys")
    code = compiled(
        forward_kernel, types, {"P": program}, capability, warps, tiles.stages, divisible
    )
    return code, program.bm * program.bn // (32 * warps)


def merge(capability: int) -> Compiled:
    """The kernel that merges splits, with everything a row can have."""
    from headlab.kernels.fused.merge import merge_kernel

    program = Program(
        bm=16, bn=64, d=128, bd=128, dv=128, bdv=128, splits=16, k=8, features=16, **ROWS
    )  # fmt: skip
    types = dict.fromkeys((parameter.name for parameter in merge_kernel.params), "*fp32")
    keys = ("parts_key", "parts_top_key", "key_at", "top_key_at", "heads")
    numbers = ("z_batch", "z_head", "z_row", "n_queries", "n_heads", "n_rows", "n_splits")
    types |= dict.fromkeys(keys, "*i32") | dict.fromkeys(numbers, "i32")
    types |= {"scale": "fp32", "z_at": "*bf16"}
    return compiled(merge_kernel, types, {"ROWS": 4, "P": program}, capability, 4, 1)


# -- the second pass and the backward pass ---------------------------------------------------------

#: Kernels to compile, and what is asked of the second pass or ``backward``.
SECOND: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "second-received": (("_columns",), {"statistics": ("received",)}),
    "second-block-map": (("_columns",), {"statistics": ("block_map", "received")}),
    "second-lag-mass": (("_rows",), {"statistics": ("lag_mass",)}),
    "second-segment-z": (("_rows",), {"statistics": ("segment_z",)}),
    "second-everything": (
        ("_columns", "_rows", "_targets", "_keys", "_queries"),
        {
            "statistics": ("received", "block_map", "lag_mass", "feature", "target_mass"),
            "block": 5, "everything": True,
        },
    ),
    "backward-keys": (("_keys",), {"backward": True}),
    "backward-queries": (("_queries",), {"backward": True}),
}  # fmt: skip

_TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.int16: "i16", torch.int32: "i32",
    torch.uint8: "u8",
}  # fmt: skip


def second(case: str, capability: int) -> list[tuple[Compiled, int]]:
    """Kernels as their own launches compile them; and scores a thread has of a tile."""
    kernels, wanted = SECOND[case]
    launches = launched(capability, **wanted)
    return [one.compiled(capability) for one in launches if one.kernel.__name__ in kernels]


@dataclass(frozen=True)
class Launch:
    """A kernel, and what it was launched with."""

    kernel: Any
    given: tuple[Any, ...]
    named: dict[str, Any]

    def compiled(self, capability: int) -> tuple[Compiled, int]:
        """What the launch would compile; and scores a thread has of a tile."""
        kernel, program, warps = self.kernel, self.named["P"], self.named.get("num_warps", 4)
        types: dict[str, str] = {}
        constants = {name: x for name, x in self.named.items() if not name.startswith("num_")}
        divisible = []
        for parameter, x in zip(kernel.params, self.given, strict=False):
            if hasattr(x, "block_shape"):
                types[parameter.name] = f"tensordesc<bf16{list(x.block_shape)}>"
            elif isinstance(x, torch.Tensor):
                types[parameter.name] = "*" + _TYPES[x.dtype]
            elif isinstance(x, float):
                types[parameter.name] = "fp32"
            elif x == 1:
                constants[parameter.name] = 1
            else:
                types[parameter.name] = "i32"
                divisible += [parameter.name] * (x % 16 == 0)
        stages = self.named.get("num_stages", 3)
        code = compiled(kernel, types, constants, capability, warps, stages, tuple(divisible))
        return code, program.rows.size * program.columns.size // (32 * warps)


def launched(
    capability: int,
    statistics: tuple[str, ...] = (),
    block: int = 64,
    backward: bool = False,
    everything: bool = False,
) -> list[Launch]:
    """Launches of the second pass, or of ``backward``, for heads of width 128 in bfloat16.

    With ``everything`` of both: the call has a mask, a bias and a soft cap, weights are multiplied by their gradients,
    and features have one.
    """
    from headlab.kernels.fused import backward as derivative
    from headlab.kernels.fused import columns, configs, rows
    from headlab.kernels.fused import second as shared
    from headlab.kernels.fused.call import prepared
    from headlab.kernels.inputs import AttentionInputs, Request

    seen: list[Launch] = []

    class Recorded:
        """Stands in for a kernel, and keeps what it is launched with."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **named: seen.append(Launch(self.kernel, given, named))

    def tiles(device: Any, *of: Any) -> Any:
        return configs.shipped_second(f"sm_{capability}", *of)

    kernels = (
        (columns, "_columns"), (rows, "_rows"), (rows, "_targets"),
        (derivative, "_keys"), (derivative, "_queries"),
    )  # fmt: skip
    changes = [(module, name, Recorded(getattr(module, name))) for module, name in kernels]
    changes += [(shared, "second_tiles_for", tiles)]
    changes += [(shared, "has_tma", lambda device: capability >= 90)]
    q, lse = torch.zeros(1, 4, 512, 128, dtype=torch.bfloat16), torch.zeros(1, 4, 512)
    inputs = AttentionInputs(q, q[:, :2], q[:, :2], 0.1, causal=True)
    features = torch.ones(1, 512, 20)
    if everything:
        mask = torch.ones(1, 4, 512, 512, dtype=torch.bool)
        mask[..., ::2, 0::3] = False  # no interval
        inputs = replace(inputs, mask=mask, position_bias=torch.ones(1, 4, 512, 512), softcap=30.0)
    call = prepared(inputs, None)
    with ExitStack() as changed:
        for module, name, stand_in in changes:
            changed.enter_context(patch.object(module, name, stand_in))
        if backward or everything:
            expected = torch.zeros(1, 4, 512, 20)
            held = derivative.FeatureGradient(features, expected, expected)
            derivative.backward(call, q, lse, q, lse, held if everything else None)
        if not backward:
            request = Request(
                z=False, statistics=statistics, lag_edges=(0, 1, 4, 64), block=block, features=features,
                targets=torch.zeros(1, 512, dtype=torch.int64),
                segments=torch.ones(1, 512, 3, dtype=torch.bool), z_gradient=q if everything else None,
            )  # fmt: skip
            columns.column_statistics(call, lse, request)
            rows.row_statistics(call, lse, request)
    return seen


def report(case: str, capability: int) -> str:
    """Compile a case, and say what it uses; of several kernels, the most that one of them does."""
    if case == "merge":
        codes = [(merge(capability), 0)]
    elif case in FORWARD:
        codes = [forward(case, capability)]
    else:
        codes = second(case, capability)
    used = {
        name: max(getattr(code, name) for code, _ in codes)
        for name in ("registers", "spills", "shared")
    }
    used |= {name: max(code.instructions[name] for code, _ in codes) for name in ("HMMA", "HGMMA")}
    code, scores = codes[0]
    if scores and len(codes) == 1:
        loop = next(loop for loop in code.loops if loop["MUFU"] >= scores)
        used["scores"] = scores
        used |= {name: loop[name] for name in ("MUFU", "FADD", "FMNMX", "I2F", "I2FP")}
    return " ".join(f"{name}={number}" for name, number in used.items())


if __name__ == "__main__":
    for one in sys.argv[2:]:
        try:
            print(one, report(one, int(sys.argv[1])), flush=True)
        except Exception:  # the other cases still compile
            print(f"{one} does not compile:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
