"""What capture costs on a GPU: the fused kernel beside PyTorch's own attention, in one run of at most five minutes.

First every statistic is checked against whole float64 patterns on fresh random data, with windows, padding, packed
documents, soft caps, sinks, chunks and single queries, and gradients against those of the formula. Then one causal
attention call is timed: 32 query heads on 8 key/value heads of width 128, bfloat16. Ratios are to the kernel that
returns z alone ("bare"). Memory is the peak beyond q, k, v and z.

    python benchmarks/gpu_capture.py [--tokens 8192 32768 131072] [--seed N] [--out benchmarks/results/gpu_capture.json]

Without a GPU, ``TRITON_INTERPRET=1 python benchmarks/gpu_capture.py --dry`` makes the same checks on small shapes in
Triton's interpreter, launches every timed case once, and times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headlab.errors import HeadlabError
from headlab.kernels import ENGINES, LINEAR, STATISTICS, AttentionInputs, Request, attend

HEADS, KV_HEADS, WIDTH = 32, 8, 128
#: Largest errors allowed; of z by type, of statistics absolute or, over 1, relative.
Z_ERRORS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ERROR = 1e-4
#: Ratios to aim for.
GOALS = {"default": 1.10, "row statistics": 1.20, "16 features": 1.15, "received": 1.7}
#: Seconds after which no further case is started.
LIMIT = 285.0
INDEX = ("argmax", "topk_index")


class Draw:
    """Fresh random attention calls."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype)

    def inputs(
        self, queries: int, keys: int, heads: int, kv: int, width: int, dtype: torch.dtype,
        batch: int = 1, sharp: float = 1.5, **fields: Any,
    ) -> AttentionInputs:  # fmt: skip
        q = self.normal(batch, heads, queries, width) * sharp
        return AttentionInputs(
            q.to(dtype),
            self.normal(batch, kv, keys, width, dtype=dtype),
            self.normal(batch, kv, keys, width, dtype=dtype),
            **{"scaling": width**-0.5, **fields},
        )

    def request(self, inputs: AttentionInputs, names: tuple[str, ...], **fields: Any) -> Request:
        batch, n, keys = inputs.q.shape[0], inputs.n_queries, inputs.n_keys
        integers = {"device": self.device, "generator": self.generator}
        return Request(
            **{
                "statistics": names,
                "features": self.normal(batch, keys, 16),
                "local_window": 7,
                "lag_edges": (0, 1, 2, 16, 100, keys),
                "targets": torch.randint(-1, keys, (batch, n), **integers),
                "counted": torch.rand(batch, n, **integers) < 0.7,
                "block": 64,
                "segments": torch.rand(batch, keys, 2, **integers) < 0.4,
                **fields,
            }
        )


# -- checks ----------------------------------------------------------------------------------------


def calls(draw: Draw, n: int, heads: int, kv: int, width: int) -> dict[str, AttentionInputs]:
    """Attention calls of every kind, a little longer than n so that no block divides them."""
    n += 13
    device = draw.device
    lower = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    column = torch.arange(n, device=device)
    padded = lower & (column >= torch.tensor([[n // 3], [0]], device=device))[:, None, None]
    document = (column > n // 3).int() + (column > n // 2).int()
    packed = (lower & (document[:, None] == document))[None, None]
    shape = (n, n, heads, kv, width)
    half, bf16, full = torch.float16, torch.bfloat16, torch.float32
    return {
        "causal bf16": draw.inputs(*shape, bf16, causal=True),
        "causal fp16": draw.inputs(*shape, half, causal=True),
        "causal fp32": draw.inputs(*shape, full, causal=True),
        "bidirectional": draw.inputs(*shape, bf16),
        "window": draw.inputs(*shape, bf16, causal=True, window=n // 5),
        "soft cap": draw.inputs(*shape, bf16, causal=True, softcap=2.0, sharp=4.0),
        "sinks": draw.inputs(*shape, bf16, causal=True, sinks=draw.normal(heads)),
        "left padding": draw.inputs(*shape, bf16, batch=2, mask=padded),
        "packed": draw.inputs(*shape, bf16, mask=packed),
        "width 80": draw.inputs(n, n, heads, kv, 80, bf16, causal=True),
        "bias": draw.inputs(*shape, bf16, position_bias=draw.normal(1, heads, n, n)),
        "sharp": draw.inputs(*shape, bf16, causal=True, sharp=30.0),
        "chunk": draw.inputs(
            n // 4, n, heads, kv, width, bf16, causal=True, query_start=n - n // 4
        ),
        "one query": draw.inputs(1, 4 * n, heads, kv, width, bf16, query_start=4 * n - 1),
    }


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    fields = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks", "position_bias")}
    return replace(inputs, **{n: x.double() for n, x in fields.items() if x is not None})


def error_of(name: str, got: Tensor, expected: Tensor, pattern: Tensor) -> float:
    """Largest error; of an index, by how much its weight misses that of the right one."""
    if name in INDEX:  # a weight may be too small for float32, and then has no index
        got, expected = (
            pattern.gather(-1, at.clamp(min=0)).where(at >= 0, 0.0)
            for at in (x if x.dim() == pattern.dim() else x[..., None] for x in (got, expected))
        )
    got, expected = got.double(), expected.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    size = expected[expected.isfinite()].abs().max().clamp(min=1) if expected.numel() else 1
    return float(torch.where(same, 0.0, (got - expected).abs().nan_to_num(torch.inf) / size).max())


def check(draw: Draw, n: int, heads: int, kv: int, width: int) -> list[dict[str, Any]]:
    """Errors of the kernel against whole patterns, and of its gradients."""
    rows = []
    for call, inputs in calls(draw, n, heads, kv, width).items():
        exact = in_float64(inputs)
        every = torch.arange(inputs.n_queries, device=draw.device).expand(inputs.q.shape[0], -1)
        pattern = ENGINES["dense"](exact, Request(z=False, rows=every)).rows
        z = draw.normal(*inputs.q.shape[:3], inputs.v.shape[3])
        for weighted in (False, True):
            names = tuple(sorted(LINEAR)) if weighted else tuple(STATISTICS)
            extra = {"z": False, "z_gradient": z} if weighted else {}
            request = draw.request(inputs, names, **extra)
            doubled = replace(request, features=request.features.double())
            got, expected = ENGINES["triton"](inputs, request), ENGINES["dense"](exact, doubled)
            if got.z is not None:
                error = error_of("z", got.z, expected.z, pattern)
                rows.append(line(call, "z", error, Z_ERRORS[inputs.q.dtype]))
            for name in names:
                error = error_of(name, got.statistics[name], expected.statistics[name], pattern)
                label = f"{name} × gradient" if weighted else name
                # z of a segment is mixed as z is, from weights rounded to the values' type.
                limit = Z_ERRORS[inputs.q.dtype] if name == "segment_z" else ERROR
                rows.append(line(call, label, error, limit))
        rows += gradients(draw, call, inputs)
    return rows


def gradients(draw: Draw, call: str, inputs: AttentionInputs) -> list[dict[str, Any]]:
    """Errors of gradients of z, relative to the largest; p and its gradient are each rounded once more than z is."""
    upstream = draw.normal(*inputs.q.shape[:3], inputs.v.shape[3])
    found = []
    exact = in_float64(inputs)
    for source, run in ((inputs, attend), (exact, ENGINES["dense"])):
        leaves = [getattr(source, name).detach().requires_grad_() for name in "qkv"]
        z = run(replace(source, **dict(zip("qkv", leaves, strict=True))), Request()).z
        found.append(torch.autograd.grad((z * upstream.to(z)).sum(), leaves))
    rows = []
    for name, got, expected in zip("qkv", *found, strict=True):
        size = expected.abs().max().clamp(min=1e-12)
        error = float(((got.double() - expected).abs() / size).max())
        rows.append(line(call, f"gradient of {name}", error, 4 * Z_ERRORS[inputs.q.dtype]))
    return rows


def line(call: str, what: str, error: float, limit: float) -> dict[str, Any]:
    return {"call": call, "what": what, "error": error, "limit": limit, "ok": error <= limit}


# -- times -----------------------------------------------------------------------------------------


def cases(draw: Draw, inputs: AttentionInputs) -> dict[str, Callable[[], Any]]:
    """What is timed at one length."""
    n, device = inputs.n_keys, draw.device
    engine = ENGINES["triton"]
    position = torch.arange(n, device=device)
    first = (position < 4)[None, :, None].float()
    features = draw.normal(1, n, 16)
    row = ("lse", "entropy", "max", "argmax", "feature", "local_mass", "mean_distance")
    rest = ("topk", "topk_index", "lag_mass", "target_mass", "received", "block_map")
    edges = tuple(edge for edge in (0, 1, 2, 4, 16, 64, 256, 1024, 4096, 16384) if edge < n)
    more = {
        "lag_edges": (*edges, n),
        "targets": (position - 1)[None],
        "block": 128,
    }
    last = position[None, -32:]
    segments = torch.zeros(1, n, 2, dtype=torch.bool, device=device)
    segments[:, : n // 2, 0] = True
    segments[:, n // 2 :, 1] = True

    def ours(statistics: tuple[str, ...] = (), features: Tensor = first, **fields: Any) -> Any:
        request = Request(statistics=statistics, features=features, **fields)
        return lambda: engine(inputs, request)

    def sdpa(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    inputs.q, inputs.k, inputs.v, is_causal=True, enable_gqa=True
                )

        return run

    own = SDPBackend.FLASH_ATTENTION if device == "cuda" else SDPBackend.MATH
    found = {"SDPA, FlashAttention": sdpa(own)}
    if device == "cuda":
        found["SDPA, cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    return found | {
        "bare": ours(),
        "32 rows": ours(rows=last),
        "default": ours(("entropy", "max", "feature", "local_mass")),
        "row statistics": ours(row),
        "16 features": ours(("feature",), features),
        "top 8": ours(("topk", "topk_index")),
        "lag bins": ours(("lag_mass",), **more),
        "received": ours(("received",)),
        "received, last 64 queries": ours(("received",), counted=(position >= n - 64)[None]),
        "block map": ours(("block_map",), **more),
        "z of two halves, 4 heads": ours(("segment_z",), segments=segments, heads=(0, 1, 2, 3)),
        "everything": ours((*row, *rest), features, **more),
    }


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median milliseconds of a call, and megabytes at its peak beyond what it returns as z."""
    run()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    torch.cuda.synchronize()
    z = kept if isinstance(kept, Tensor) else kept.z
    peak = torch.cuda.max_memory_allocated() - before - z.numel() * z.element_size()
    del kept, z
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times), peak / 2**20


def measure(draw: Draw, tokens: list[int], started: float) -> list[dict[str, Any]]:
    """Times and memory of every case at every length."""
    rows: list[dict[str, Any]] = []
    for n in tokens:
        inputs = draw.inputs(n, n, HEADS, KV_HEADS, WIDTH, torch.bfloat16, causal=True)
        flops = 2 * HEADS * n * n * 2 * WIDTH / 2
        found: dict[str, dict[str, Any]] = {}
        for name, run in cases(draw, inputs).items():
            if time.monotonic() - started > LIMIT:
                rows.append({"tokens": n, "case": name, "left_out": "out of time"})
                continue
            try:
                ms, megabytes = timed(run, repeats=3 if n > 65536 else 7)
            except (RuntimeError, HeadlabError) as error:
                reason = str(error).splitlines()[0][:200]
                rows.append({"tokens": n, "case": name, "left_out": reason})
                continue
            found[name] = {
                "tokens": n,
                "case": name,
                "ms": round(ms, 3),
                "tflops": round(flops / ms / 1e9, 1),
                "megabytes": round(megabytes, 1),
            }
            rows.append(found[name])
        bare = found.get("bare")
        for name, row in found.items():
            if bare is not None:
                row["ratio"] = round(row["ms"] / bare["ms"], 3)
            if name in GOALS and bare is not None:
                row["goal"] = GOALS[name]
        for row in rows:
            if row["tokens"] == n:
                print(table_line(row), flush=True)
    return rows


def table_line(row: dict[str, Any]) -> str:
    head = f"{row['tokens']:>7} tokens  {row['case']:<26}"
    if "left_out" in row:
        return f"{head} left out: {row['left_out']}"
    goal = f"  goal {row['goal']:.2f}" if "goal" in row else ""
    return (
        f"{head} {row['ms']:>9.3f} ms  {row['tflops']:>6.1f} TFLOP/s  "
        f"{row.get('ratio', float('nan')):>6.3f} × bare  {row['megabytes']:>8.1f} MB{goal}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--seed", type=int, help="by default from the clock: the data are fresh")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results/gpu_capture.json"
    )
    parser.add_argument("--dry", action="store_true", help="small, in the interpreter, untimed")
    options = parser.parse_args()
    started = time.monotonic()
    if options.dry:
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("--dry runs in Triton's interpreter: set TRITON_INTERPRET=1")
        os.environ["HEADLAB_KERNEL"] = "triton"  # gradients on the CPU, too, by the kernel
    elif not torch.cuda.is_available():
        sys.exit("there is no GPU here; TRITON_INTERPRET=1 and --dry make the checks without one")
    device = "cpu" if options.dry else "cuda"
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    draw = Draw(device, seed)
    sizes = (27, 4, 2, 32) if options.dry else (700, 8, 2, WIDTH)
    checked = check(draw, *sizes)
    wrong = [row for row in checked if not row["ok"]]
    worst = max(checked, key=lambda row: row["error"] / row["limit"])
    print(
        f"seed {seed}: {len(checked) - len(wrong)} of {len(checked)} checks hold; nearest to its limit: {worst}"
    )
    for row in wrong:
        print(f"WRONG {row}")
    if options.dry:
        small = draw.inputs(64, 64, 4, 2, 32, torch.bfloat16, causal=True)
        for name, run in cases(draw, small).items():
            run()
            print(f"launched: {name}")
        sys.exit(1 if wrong else 0)
    rows = measure(draw, options.tokens, started)
    import triton

    about = {
        "device": torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seed": seed,
        "heads": [HEADS, KV_HEADS, WIDTH],
        "seconds": round(time.monotonic() - started, 1),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about, "checks": checked, "rows": rows}, indent=1)
    options.out.write_text(text + "\n", "utf-8")
    print(options.out)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
