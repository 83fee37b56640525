"""What a sweep over every head costs: headlab against TransformerLens' loop of hooks, at equal results.

SmolLM2-135M, 16 prompts of 64 tokens: zero-ablation of z of every head, and patching of z of every head from a clean
into a corrupted run; the metric is the logit difference of two tokens at the last position. Each of the four cases
runs in a process of its own, so that its peak memory is its own, and takes its turn; the clock starts when the model is
loaded and one pass has warmed it up. TransformerLens runs its own functions: ``run_with_hooks`` per head, and
``patching.get_act_patch_attn_head_out_all_pos``'s loop. Results must agree to 1e-4.

    python benchmarks/sweep.py [--heads 270] [--prompts 16] [--tokens 64] [--out benchmarks/results/sweep.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

CASES = ("ablation", "patching")
TOOLS = ("headlab", "transformer_lens")


def prompts(n: int, tokens: int) -> tuple[Any, Any]:
    """Clean and corrupted prompts: random tokens, twice, and the same with another first half."""
    import torch

    generator = torch.Generator().manual_seed(0)
    body = torch.randint(1000, 40_000, (n, tokens // 2), generator=generator)
    other = torch.randint(1000, 40_000, (n, tokens // 2), generator=generator)
    return torch.cat([body, body], 1), torch.cat([other, body], 1)


def run_headlab(case: str, heads: list[tuple[int, int]], clean: Any, corrupted: Any) -> Any:
    """Effects of every head by headlab; returns what runs it, and the call that reads the values."""
    import headlab as hl

    model = hl.load("smollm2-135m", device="cpu", dtype="float32")
    metric = hl.metrics.logit_difference(answers=100, foils=200)
    model.logits(clean[:1])
    if case == "ablation":
        return lambda: hl.causal.ablate_each(model, clean, metric, heads=heads).frame["value"]
    return lambda: hl.causal.patch_each(model, clean, corrupted, metric, heads=heads).frame["value"]


def run_lens(case: str, heads: list[tuple[int, int]], clean: Any, corrupted: Any) -> Any:
    """The same by TransformerLens."""
    import pandas as pd
    import torch
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    from headlab.models import open_model

    opened = open_model("smollm2-135m", device="cpu", dtype="float32")
    model = TransformerBridge.boot_transformers(
        "smollm2", hf_model=opened.module, tokenizer=opened.tokenizer, device="cpu"
    )

    def metric(logits: Any) -> Any:
        return (logits[:, -1, 100] - logits[:, -1, 200]).mean()

    def ablation() -> Any:
        found = []
        for layer, head in heads:

            def zero(z: Any, hook: Any, head: int = head) -> Any:
                z[:, :, head] = 0
                return z

            hooks = [(f"blocks.{layer}.attn.hook_z", zero)]
            found.append(float(metric(model.run_with_hooks(clean, fwd_hooks=hooks))))
        return found

    def patched() -> Any:
        _, cache = model.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_z"))
        return patching.generic_activation_patch(
            model, corrupted, cache, metric, patching.layer_head_vector_patch_setter, "z",
            index_df=pd.DataFrame(heads, columns=["layer", "head"]),
        ).tolist()  # fmt: skip

    torch.set_grad_enabled(False)
    model(clean[:1])
    return ablation if case == "ablation" else patched


def run_case(tool: str, case: str, n_heads: int, n: int, tokens: int) -> dict[str, Any]:
    """One case in this process."""
    import torch

    clean, corrupted = prompts(n, tokens)
    every = [(layer, head) for layer in range(30) for head in range(9)]
    # Fewer heads are spread evenly over layers, so that the mean depth is that of all.
    heads = [every[at * len(every) // n_heads] for at in range(n_heads)]
    make = run_headlab if tool == "headlab" else run_lens
    run = make(case, heads, clean, corrupted)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    values = [float(value) for value in run()]
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds,
        "megabytes": (peak - before) / 1024,
        "peak_megabytes": peak / 1024,
        "threads": torch.get_num_threads(),
        "values": values,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=270, help="heads to sweep over, of 270")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/sweep.json")
    parser.add_argument("--case", nargs=2, metavar=("TOOL", "CASE"))
    options = parser.parse_args()
    size = (options.heads, options.prompts, options.tokens)
    if options.case:
        print(json.dumps(run_case(*options.case, *size)))
        return
    rows = []
    for case in CASES:
        found = {}
        for tool in TOOLS:
            command = [sys.executable, __file__, "--case", tool, case]
            for name, value in zip(("--heads", "--prompts", "--tokens"), size, strict=True):
                command += [name, str(value)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[tool] = json.loads(done.stdout.splitlines()[-1])
        ours, theirs = (found[tool].pop("values") for tool in TOOLS)
        apart = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
        if apart > 1e-4:
            raise SystemExit(f"{case}: results differ by {apart:.2g}, so times mean nothing")
        for tool in TOOLS:
            run = found[tool] | {"case": case, "tool": tool, "largest_difference": apart}
            run["speedup"] = found["transformer_lens"]["seconds"] / run["seconds"]
            rows.append(run)
            print(_line(run), flush=True)
    import torch
    import transformers

    about = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformer_lens": version("transformer-lens"),
        **dict(zip(("heads", "prompts", "tokens"), size, strict=True)),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")
    print(options.out)


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['case']:<9} {run['tool']:<17} {run['seconds']:>7.1f} s  {run['speedup']:>5.2f} ×  "
        f"{run['megabytes']:>6.0f} MB above the loaded model, {run['peak_megabytes']:>6.0f} MB in all"
    )


if __name__ == "__main__":
    main()
