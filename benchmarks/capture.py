"""What capture costs: time and memory of a SmolLM2 forward pass, kept lean and kept full.

Every case runs in a process of its own, so that its peak memory is its own. Cases of one length take turns, and
the fastest of the rounds counts. Ratios are to the plain SDPA forward pass of the same length and run.

    python benchmarks/capture.py [--tokens 1024 2048 4096] [--rounds 2] [--out benchmarks/results/capture.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "sdpa": "plain SDPA forward",
    "rows": "rows of 32 queries",
    "statistics": "all statistics",
    "output_attentions": "output_attentions=True",
}


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
        keep = [hl.keep.rows(queries=list(range(-32, 0)))]
        if case == "statistics":
            keep = [
                hl.keep.statistics(
                    "lse", "entropy", "max", "argmax", "topk", "first_mass", "segment_mass", "local_mass",
                    "lag_mass", "mean_distance", "target_mass", "received", "block_map",
                    segments={"early": (1, n // 8), "late": (n // 2, n)},
                    bins=[0, 1, 2, 4, 16, 64, 256, tokens],
                    targets=torch.arange(n) - 1,
                )
            ]  # fmt: skip
        return model.trace(ids, keep=keep, logits="last")

    forward(ids[:, :64])
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


def measure(tokens: list[int], rounds: int) -> list[dict[str, object]]:
    """All cases at all lengths, each in its own process."""
    rows: list[dict[str, object]] = []
    for n in tokens:
        runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(rounds):
            for case, found in runs.items():
                command = [sys.executable, __file__, "--case", case, "--tokens", str(n)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        base = min(run["seconds"] for run in runs["sdpa"])
        base_memory = min(run["megabytes"] for run in runs["sdpa"])
        for case, found in runs.items():
            seconds = min(run["seconds"] for run in found)
            megabytes = min(run["megabytes"] for run in found)
            rows.append(
                {
                    "tokens": n,
                    "case": case,
                    "seconds": round(seconds, 2),
                    "ratio": round(seconds / base, 2),
                    "megabytes": round(megabytes),
                    "above_sdpa": round(megabytes - base_memory),
                    "threads": int(found[0]["threads"]),
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, object]) -> str:
    name = CASES[str(row["case"])]
    return (
        f"{row['tokens']:>6} tokens  {name:<24} {row['seconds']:>7} s  {row['ratio']:>6} × SDPA  "
        f"{row['megabytes']:>7} MB  {row['above_sdpa']:>+7} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/capture.json")
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.tokens[0])))
        return
    rows = measure(options.tokens, options.rounds)
    import torch
    import transformers

    about = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": options.rounds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
