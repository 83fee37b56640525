"""What capture costs as the context grows: a SmolLM2 forward pass by engine, and how time and memory grow.

Every case runs in a process of its own, so that its peak memory is its own. Cases of one length take turns, and
the fastest of the rounds counts. Ratios are to the plain SDPA forward pass of the same length and run. A power
law a·N^b is fitted to the seconds and to the memory above SDPA's; b is given with its standard error.

    python benchmarks/long_context.py [--tokens 1024 2048 4096 8192] [--rounds 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "sdpa": "plain SDPA forward",
    "cpp": "all statistics, C++",
    "blockwise": "all statistics, blockwise",
    "output_attentions": "output_attentions=True",
}
#: The pattern of every layer at once, as float32 scores and weights: bytes per square of the length.
PATTERN_BYTES = 30 * 9 * 4 * 1.1


def run_case(case: str, tokens: int) -> dict[str, float]:
    """Time one forward pass after a short warm-up, and its peak memory above the loaded model."""
    import torch

    import headlab as hl

    model = hl.load("smollm2-135m")
    ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    if case == "output_attentions":
        model.module.set_attn_implementation("eager")

    def forward(ids: torch.Tensor) -> object:
        n = ids.shape[1]
        if case in ("sdpa", "output_attentions"):
            # As a user would call it; only the last position's logits, as in every case here.
            keywords = {"output_attentions": True} if case == "output_attentions" else {}
            with torch.no_grad():
                return model.module(ids, logits_to_keep=1, use_cache=False, **keywords)
        keep = hl.keep.statistics(
            "lse", "entropy", "max", "argmax", "topk", "first_mass", "segment_mass", "local_mass",
            "lag_mass", "mean_distance", "target_mass", "received", "block_map",
            segments={"early": (1, n // 8), "late": (n // 2, n)},
            bins=[*(edge for edge in (0, 1, 2, 4, 16, 64, 256) if edge < n), n],
            targets=torch.arange(n) - 1,
        )  # fmt: skip
        return model.trace(ids, keep=[keep], logits="last")

    forward(ids[:, :64])  # compiles the C++ engine, where that has not been done
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    kept = forward(ids)
    seconds = time.perf_counter() - started
    del kept
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds,
        "megabytes": (peak - before) / 1024,
        "threads": torch.get_num_threads(),
    }


def skipped(case: str, tokens: int) -> str | None:
    """Why a case cannot be run at this length, or None."""
    if case != "output_attentions":
        return None
    needed = PATTERN_BYTES * tokens**2 / 2**30
    free = free_gibibytes()
    if needed > free:
        return f"needs {needed:.1f} GiB, {free:.1f} GiB are free"
    return None


def free_gibibytes() -> float:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kilobytes) / 2**20


def measure(tokens: list[int], rounds: int) -> list[dict[str, object]]:
    """All cases at all lengths, each in its own process."""
    rows: list[dict[str, object]] = []
    for n in tokens:
        why = {case: skipped(case, n) for case in CASES}
        runs: dict[str, list[dict[str, float]]] = {c: [] for c in CASES if why[c] is None}
        for _ in range(rounds):
            for case, found in runs.items():
                found.append(_in_own_process(case, n))
        base = min(run["seconds"] for run in runs["sdpa"])
        base_memory = min(run["megabytes"] for run in runs["sdpa"])
        for case in CASES:
            row: dict[str, object] = {"tokens": n, "case": case}
            if why[case] is not None:
                row["skipped"] = why[case]
            else:
                seconds = min(run["seconds"] for run in runs[case])
                megabytes = min(run["megabytes"] for run in runs[case])
                row |= {
                    "seconds": round(seconds, 3),
                    "slowest": round(max(run["seconds"] for run in runs[case]), 3),
                    "ratio": round(seconds / base, 2),
                    "megabytes": round(megabytes, 1),
                    "above_sdpa": round(megabytes - base_memory, 1),
                    "threads": int(runs[case][0]["threads"]),
                }
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _in_own_process(case: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", case, "--tokens", str(tokens)]
    forced = case if case in ("cpp", "blockwise") else "auto"
    environment = os.environ | {"HEADLAB_KERNEL": forced}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{case} at {tokens} tokens failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def growth(tokens: list[float], values: list[float]) -> tuple[float, float] | None:
    """Exponent b of a·N^b by least squares on logarithms, and its standard error; None below 3 positive values."""
    points = [(math.log(n), math.log(v)) for n, v in zip(tokens, values, strict=True) if v > 0]
    if len(points) < 3:
        return None
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    off = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, math.sqrt(off / (len(points) - 2) / spread)


def exponents(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """How seconds, and megabytes above SDPA, grow with N."""
    found: list[dict[str, object]] = []
    for case in CASES:
        mine = [row for row in rows if row["case"] == case and "skipped" not in row]
        for of in ("seconds", "above_sdpa"):
            if case == "sdpa" and of == "above_sdpa":
                continue
            fit = growth([float(r["tokens"]) for r in mine], [float(r[of]) for r in mine])
            if fit is not None:
                exponent, error = (round(x, 3) for x in fit)
                found.append({"case": case, "of": of, "exponent": exponent, "error": error})
    return found


def _line(row: dict[str, object]) -> str:
    start = f"{row['tokens']:>6} tokens  {CASES[str(row['case'])]:<26}"
    if "skipped" in row:
        return f"{start} not run: {row['skipped']}"
    return (
        f"{start} {row['seconds']:>8} s  {row['ratio']:>6} × SDPA  "
        f"{row['megabytes']:>8} MB  {row['above_sdpa']:>+8} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results/long_context.json"
    )
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.tokens[0])))
        return
    rows = measure(options.tokens, options.rounds)
    fits = exponents(rows)
    for fit in fits:
        unit = "seconds" if fit["of"] == "seconds" else "MB above SDPA"
        print(f"{CASES[str(fit['case'])]:<26} {unit} ~ N^({fit['exponent']} ± {fit['error']})")
    import torch
    import transformers

    about = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": options.rounds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about, "rows": rows, "growth": fits}, indent=1)
    options.out.write_text(text + "\n", "utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
