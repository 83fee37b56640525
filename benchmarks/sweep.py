"""What a sweep over every head costs: headlab against TransformerLens' loop of hooks, at equal results.

SmolLM2-135M, 16 prompts of 64 tokens, the logit difference of two tokens at the last position. Four sweeps:

* ablation: z of each head set to 0 at every position;
* ablation at END: at the last position only;
* patching: z of each head from a clean run into a corrupted one; the prompts differ from the first token on;
* patching late: the same where only the last 12 tokens differ, as a question under a shared text.

What an edit cannot reach is not computed, so the later it comes, in layers and in positions, the larger the gain; with
every head at every position only the layers below are saved, half of them on average.

Each case runs in a process of its own, so that its peak memory is its own; the clock starts when the model is loaded
and one pass has warmed it up. TransformerLens runs its own functions: ``run_with_hooks`` per head, and the loop behind
``patching.get_act_patch_attn_head_out_all_pos``. Results must agree to 1e-4.

    python benchmarks/sweep.py [--heads 90] [--prompts 16] [--tokens 64] [--out benchmarks/results/sweep.json]
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

CASES = ("ablation", "ablation at END", "patching", "patching late")
_LATE = 12
TOOLS = ("headlab", "transformer_lens")


def prompts(case: str, n: int, tokens: int) -> tuple[Any, Any]:
    """Clean prompts, random tokens twice over, and corrupted ones, with another beginning or another end."""
    import torch

    generator = torch.Generator().manual_seed(0)
    body = torch.randint(1000, 40_000, (n, tokens // 2), generator=generator)
    other = torch.randint(1000, 40_000, (n, tokens // 2), generator=generator)
    clean = torch.cat([body, body], 1)
    if case == "patching late":
        return clean, torch.cat([clean[:, :-_LATE], other[:, -_LATE:]], 1)
    return clean, torch.cat([other, body], 1)


def run_headlab(case: str, heads: list[tuple[int, int]], clean: Any, corrupted: Any) -> Any:
    """The call that gives the metric with each head ablated or patched, by headlab."""
    import headlab as hl

    model = hl.load("smollm2-135m", device="cpu", dtype="float32")
    metric = hl.metrics.logit_difference(answers=100, foils=200)
    model.logits(clean[:1])
    if case.startswith("ablation"):
        at = [-1] if case.endswith("END") else None
        return lambda: hl.causal.ablate_each(model, clean, metric, heads=heads, positions=at).frame[
            "value"
        ]
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
                z[:, slice(-1, None) if case.endswith("END") else slice(None), head] = 0
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
    return ablation if case.startswith("ablation") else patched


def run_case(tool: str, case: str, n_heads: int, n: int, tokens: int) -> dict[str, Any]:
    """One case in this process."""
    import torch

    clean, corrupted = prompts(case, n, tokens)
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
    parser.add_argument(
        "--heads", type=int, default=90, help="heads to sweep over, of 270, spread evenly"
    )
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
            done = subprocess.run(command, capture_output=True, text=True, check=True)
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
        f"{run['case']:<15} {run['tool']:<17} {run['seconds']:>7.1f} s  {run['speedup']:>5.2f} ×  "
        f"{run['megabytes']:>6.0f} MB above the loaded model, {run['peak_megabytes']:>6.0f} MB in all"
    )


if __name__ == "__main__":
    main()
