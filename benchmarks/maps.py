"""What mapping every head to every shipped relation costs: headlab against whole rows over the vocabulary.

SmolLM2-135M in float32, 270 heads, all shipped relations that its tokenizer has as single tokens. headlab runs all of
it, significance included, in a process of its own: ``peak_megabytes`` is that process's whole memory, model and
libraries with it. The plain way multiplies each head's W_V·W_O out, takes a whole row over the vocabulary for every
source and sorts it with ``torch.topk`` once per direction; it is run for a few heads, spread over the layers, and its
time for all is extrapolated from those. It computes scores only, no significance. Scores of these heads must agree.
The whole n_vocab × n_vocab matrix of a head, as the method is written down, would take the memory given as
``whole_matrix_megabytes``.

    python benchmarks/maps.py [--heads 9] [--out benchmarks/results/maps.json]
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
from typing import Any

WAYS = ("headlab", "whole rows")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_headlab(n_heads: int) -> dict[str, Any]:
    """All heads and relations."""
    import torch

    import headlab as hl

    model = hl.load("smollm2-135m", device="cpu", dtype="float32")
    loaded = peak()
    started, used = time.perf_counter(), time.process_time()
    found = hl.parameters.maps(model)
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    frame = found.frame
    chosen = heads(n_heads)
    scores = {
        f"{row.relation} {row.direction} {row.layer}.{row.head}": row.score
        for row in frame.itertuples()
        if (row.layer, row.head) in chosen
    }
    return {
        "heads": len(frame[["layer", "head"]].drop_duplicates()),
        "relations": len(found.names),
        "pairs": sum(each.n for each in found.relations if not each.skipped),
        "skipped": [each.name for each in found.skipped],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "loaded_megabytes": loaded,
        "peak_megabytes": peak(),
        "threads": torch.get_num_threads(),
        "claimed": int(frame["claimed"].sum()),
        "scores": scores,
    }


def run_whole_rows(n_heads: int) -> dict[str, Any]:
    """Some heads, the plain way."""
    import numpy as np
    import torch

    import headlab as hl
    from headlab.parameters.embeddings import embed
    from headlab.tasks.relations import relations, token_pairs

    torch.set_grad_enabled(False)
    model = hl.load("smollm2-135m", device="cpu", dtype="float32")
    pairs = [token_pairs(relation, model.tokenizer) for relation in relations()]
    pairs = [each for each in pairs if len(each) >= 30]
    sources = np.unique(np.concatenate([each.sources.numpy() for each in pairs]))
    scores = {}
    started, used = time.perf_counter(), time.process_time()
    for layer, head in heads(n_heads):
        rows = embed(model, layer, torch.from_numpy(sources))
        W_OV = model.weights.W_V(layer)[head // 3] @ model.weights.W_O(layer)[head]
        matrix = rows @ W_OV @ model.weights.W_U
        for direction, signed in (("promotes", matrix), ("suppresses", -matrix)):
            top = signed.topk(10, dim=1).indices.numpy()
            for each in pairs:
                name = each.relation.name
                k = 1 if "copying" in name else 10
                places = np.searchsorted(sources, each.sources.numpy())
                hit = (top[places][:, :k] == each.targets.numpy()[:, None]).any(1)
                scores[f"{name} {direction} {layer}.{head}"] = float(hit.mean())
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    return {
        "heads": n_heads,
        "relations": len(pairs),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "seconds_for_all_extrapolated": seconds * 270 / n_heads,
        "peak_megabytes": peak(),
        "threads": torch.get_num_threads(),
        "sources": len(sources),
        "n_vocab": model.spec.n_vocab,
        "whole_matrix_megabytes": model.spec.n_vocab**2 * 4 / 2**20,
        "scores": scores,
    }


def heads(n: int) -> list[tuple[int, int]]:
    every = [(layer, head) for layer in range(30) for head in range(9)]
    return [every[at * len(every) // n] for at in range(n)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--heads", type=int, default=9, help="heads to map the plain way, of 270, spread evenly"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/maps.json")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        run = run_headlab if options.way == "headlab" else run_whole_rows
        print(json.dumps(run(options.heads)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--heads", str(options.heads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = (found[way].pop("scores") for way in WAYS)
    if ours.keys() != theirs.keys():
        raise SystemExit("the two ways scored different heads or relations, so times mean nothing")
    # Two values within rounding of each other may change places.
    apart = max(abs(ours[key] - theirs[key]) for key in ours)
    if apart > 0.03:
        raise SystemExit(f"scores differ by {apart:.2g}, so times mean nothing")
    for way in WAYS:
        print(_line(way, found[way]))
    import torch

    about = {"machine": platform.machine(), "torch": torch.__version__, "largest_difference": apart}
    rows = [{"way": way, **found[way]} for way in WAYS]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")
    print(options.out)


def _line(way: str, run: dict[str, Any]) -> str:
    whole = run.get("seconds_for_all_extrapolated", run["seconds"])
    return (
        f"{way:<11} {run['heads']:>4} heads × {run['relations']} relations  {run['seconds']:>6.1f} s "
        f"(for 270 heads {whole:.0f} s), {run['peak_megabytes']:.0f} MB in all, {run['threads']} threads"
    )


if __name__ == "__main__":
    main()
