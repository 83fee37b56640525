"""Attention as sparse distributed memory (Bricken and Pehlevan 2021): each head's effective β and nearest radius.

Published β are those of translation models trained with query-key norm (Henry et al. 2020), from the file in the
authors' repository. The radii 5, 11 and 15 as optima of 64 bits (for memory, for noise, for a critical distance) are
from memory and unverified, but for 11, which the formula in the authors' code gives for 1024 patterns and all 2^64
neurons.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.parameters.on_prompts.memory import best_radius, distributed_memory, radius_beta
from headlab.tasks import prose, prose_windows

NORMED = "translation transformers with query-key norm"
GPT2 = "gpt2"
BITS, LENGTH = 64, 128
OPTIMA = {
    5: "most patterns (unverified)",
    11: "most signal to noise",
    15: "critical distance (unverified)",
}


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Fit β of every head."""
    figures = [
        Figure("radius of the best signal to noise, 64 bits", best_radius(BITS, 1024, 2.0**BITS), 11,
               "the theory", note="1024 patterns, 2^64 neurons; the published figure is from memory"),
        *(Figure(f"β of radius {at}, 64 bits", radius_beta(BITS, at), note=why) for at, why in OPTIMA.items()),
    ]  # fmt: skip
    if model.tokenizer is None:
        return [*figures, Figure("β of heads", None, note="no tokenizer, so no text")]
    length = min(LENGTH, model.spec.max_context or LENGTH)
    ids = prose_windows(model.tokenizer, prose(), max(2, n_prompts // 2), length, seed, model.bos)
    found = distributed_memory(model, ids, seed=seed)
    frame = found.frame[found.frame["n"] > 0]
    if not len(frame):
        return [*figures, Figure("β of heads", None, note="no head has a usable row")]
    low, middle, high = np.quantile(frame["beta"], [0.05, 0.5, 0.95])
    wide, narrow = (radius_beta(BITS, at) for at in (min(OPTIMA), max(OPTIMA)))
    between = float(frame["beta"].between(narrow, wide).mean())
    about = f"{len(frame)} heads with a usable row, {len(ids)} texts of {length} tokens"
    return [
        *figures,
        Figure("β of heads, 5%–95%", f"{low:.3g}–{high:.3g}", "10.3–24.8", NORMED, note=f"all of them; ours: {about}"),
        Figure("β of heads, median", float(middle), 15.6, NORMED, note="the mean of 90 learned β"),
        Figure("heads with β between those of radii 15 and 5, share", between, "learned β are bounded by them", NORMED,
               note=f"{narrow:.3g} to {wide:.3g}"),
        Figure("R² of log attention on cosine, median", float(frame["r2"].median()), note=about),
        Figure("heads with R² of 0.9 or more, share", float((frame["r2"] >= 0.9).mean()),
               "conditions hold in GPT-2 (abstract)", GPT2, False, "chance R² "
               f"{float(frame['null_r2'].median()):.2g}"),
        Figure("scaling · ‖q‖ · ‖k‖, median", float(frame["product"].median())),
    ]  # fmt: skip


if __name__ == "__main__":
    main(run, __doc__)
