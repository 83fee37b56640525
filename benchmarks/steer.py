"""What steering costs: tokens per second with each method, as a share of the unsteered model's in the same run.

A round generates from one prompt, with a KV cache, unsteered and then with every method in turn, so that a busy machine
slows all alike; a method's share is the median over rounds of its speed over the unsteered speed of that round. Whole
generations count, prefill included. A method that runs the model twice for every token (JuICE) cannot keep pace, and
is given for that reason beside the others, not among those held to the goal of 0.85.

    python benchmarks/steer.py [--tokens 64] [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import headlab as hl

#: Least share of the unsteered speed that a method should keep.
GOAL = 0.85
PROMPT = (
    "The scroll was written in Alexandria and copied twice before it was brought to Antioch. " * 16
    + "The scroll was written in"
)


#: Heads that roles would name: some in every part of the model.
HEADS = "3.*, 8.*, 14.1, 15.*, 17.3, 18.6, 20.5, 20.6, 23.3, 24.4"
#: Runs the model twice for every token.
TWICE = ("juice",)


def methods(model: hl.Model) -> dict[str, hl.steering.Method]:
    """One of each method, at a strength that leaves the text readable."""
    steering = hl.steering
    marked = ["Antioch"]
    prompts, others = ["The river is deep.", "Snow fell."], ["Add the numbers.", "Name a colour."]
    vectors = steering.HeadVectors.fit(model, prompts, others, HEADS, factor=0.1)
    focus = steering.FocusDirections(
        vectors.heads, vectors.shape, 0.1 * vectors.vectors, vectors.heads, factor=0.2
    )
    stream = torch.randn(model.spec.d_model, generator=torch.Generator().manual_seed(0))
    return {
        "pasta, every head": steering.Pasta(marked, "*.*", 0.5),
        "pasta": steering.Pasta(marked, HEADS, 0.5),
        "focus": focus,
        "head_vectors": vectors,
        "function_vector": steering.FunctionVector(
            vectors.heads, vectors.shape, 0.1 * stream, 15, rows="from_end"
        ),
        "june": steering.JuNE(HEADS, a_l=0.1),
        "sink_removal, every head": steering.SinkRemoval("*.*", 0.9),
        "kv_budget, every head": steering.KVBudget(None, recent=64),
        "split_softmax, every head": steering.SplitSoftmax(marked, "*.*", 0.95),
        "split_softmax": steering.SplitSoftmax(marked, HEADS, 0.95),
        "act": steering.ACT(HEADS, 0.8),
        "value_edit": steering.ValueEdit.fit(model, prompts[0], HEADS, marked, factor=0.1),
        "juice": steering.JuICE(HEADS, a_l=0.1),
    }


def seconds(model: hl.Model, method: hl.steering.Method | None, tokens: int) -> float:
    """Wall time of one generation."""
    with hl.steer(model, method) if method is not None else nullcontext():
        started = time.perf_counter()
        model.generate(PROMPT, max_new_tokens=tokens, eos_token_id=None)
        return time.perf_counter() - started


def measure(tokens: int, rounds: int) -> Iterator[dict[str, object]]:
    """Shares of the unsteered speed, one row per method."""
    model = hl.load("smollm2-135m")
    every = methods(model)
    runs: dict[str, list[float]] = {name: [] for name in ("unsteered", *every)}
    for method in (None, *every.values()):
        seconds(model, method, 2)  # whatever is built or measured once
    for _ in range(rounds):
        runs["unsteered"].append(seconds(model, None, tokens))
        for name, method in every.items():
            runs[name].append(seconds(model, method, tokens))
    for name, mine in runs.items():
        shares = [plain / own for plain, own in zip(runs["unsteered"], mine, strict=True)]
        yield {
            "method": name,
            "tokens_per_second": round(tokens / statistics.median(mine), 2),
            "share": round(statistics.median(shares), 3),
            "lowest": round(min(shares), 3),
            "highest": round(max(shares), 3),
            "goal": "" if name in ("unsteered", *TWICE) else GOAL,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/steer.json")
    options = parser.parse_args()
    rows = list(measure(options.tokens, options.rounds))
    table = Table(title=f"generation of {options.tokens} tokens, share of the unsteered speed")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    about = {
        "model": "smollm2-135m",
        "prompt_tokens": int(hl.load("smollm2-135m").tokens(PROMPT).shape[1]),
        "new_tokens": options.tokens,
        "rounds": options.rounds,
        "goal": GOAL,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
