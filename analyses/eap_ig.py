"""Attribution patching with integrated gradients against exact patching: Hanna et al. 2024, Have Faith in Faithfulness.

IOI prompts on the model at hand: heads scored by EAP-IG, AtP and AtP* beside what patching each head really does
(corrupted z into the clean run), and circuits of the best edges run exactly, with MIB's CMD (area under |1 − f|). The
paper's own figures, on greater-than, are in greater_than.py. AtP* has magnitudes only, so its ρ is of sizes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from common import Figure, is_model, main
from scipy.stats import spearmanr

import headlab as hl
from headlab.causal.attribution.atp import atp, atp_star
from headlab.causal.attribution.eap import eap, eap_ig
from headlab.causal.attribution.eap_heads import eap_ig_heads
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.faithfulness import faithfulness_curve
from headlab.causal.metrics import logit_difference
from headlab.causal.patching import patch_each
from headlab.causal.paths.edges import EdgeRuns
from headlab.errors import PromptError, UnsupportedError
from headlab.tasks import ioi_prompts

GPT2 = "GPT-2 small"
#: MIB's CMD on IOI, by secondary notes.
CMD = {"EAP-IG": 0.03, "EAP": 0.03, "random edges": 0.75}
SIZES = (0.01, 0.05, 0.2, 0.5, 1.0)


def of_heads(given: tuple[Any, ...]) -> list[Figure]:
    """Rank correlations of estimates with exact patching over all heads."""
    found = []
    fixed = partial(atp_star, grad_drop=False)
    for site, ways in {
        "z": {"EAP-IG (5)": eap_ig_heads, "AtP": atp},
        "q": {"AtP": atp, "AtP with QK fix": fixed, "AtP*": atp_star},
        "k": {"AtP": atp, "AtP with QK fix": fixed},
    }.items():
        exactly = patch_each(*given, site=site, direction="noising").frame["effect"].to_numpy()
        for name, way in ways.items():
            options = {} if way is eap_ig_heads else {"site": site, "direction": "noising"}
            guess = way(*given, **options).frame["effect"].to_numpy()  # type: ignore[operator]
            signed = spearmanr(guess, exactly)[0] if way is not atp_star else None
            size = spearmanr(np.abs(guess), np.abs(exactly))[0]
            best = [set(np.argsort(-np.abs(x))[:10]) for x in (guess, exactly)]
            note = f"of sizes {size:.2f}; {len(best[0] & best[1])} of the 10 largest in common"
            what = f"IOI, heads at {site}: {name} against exact patching, Spearman's ρ"
            found.append(Figure(what, float(size if signed is None else signed), note=note))
    return found


def of_edges(model: hl.Model, given: tuple[Any, ...], same: bool, seed: int) -> list[Figure]:
    """CMD of rankings of all edges on IOI."""
    runs = EdgeRuns(*given)
    ways = {"EAP-IG": eap_ig, "EAP": eap}
    ranked = {name: Circuit.of_edges(model, way(*given)) for name, way in ways.items()}
    drawn = np.random.default_rng(seed).permutation(len(runs.graph.edges)) + 1.0
    ranked["random edges"] = Circuit.of_edges(
        model, dict(zip(runs.graph.edges, drawn, strict=True))
    )
    found = []
    for name, circuit in ranked.items():
        curve = faithfulness_curve(runs, circuit, sizes=SIZES, seed=seed)
        note = (
            f"sizes {SIZES}; 95 % {curve.cmd[1]:.3g} to {curve.cmd[2]:.3g}; published with 10 sizes"
        )
        found.append(Figure(f"IOI, {name}: CMD", curve.cmd[0], CMD[name], GPT2, same, note))
    return found


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    same = is_model(model, "gpt2", "openai-community/gpt2")
    try:
        drawn = ioi_prompts(model.tokenizer, n_prompts, seed, model.bos)
    except PromptError as error:
        return [Figure("EAP-IG on IOI", None, note=f"not measurable: {error}")]
    metric = logit_difference([p.io for p in drawn], [p.subject for p in drawn])
    given = model, [list(p.ids) for p in drawn], [list(p.corrupted) for p in drawn], metric
    figures = of_heads(given)
    try:
        figures += of_edges(model, given, same, seed)
    except UnsupportedError as error:
        figures.append(Figure("CMD", None, note=str(error)))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
