"""Attention Lens (Sakarvadia et al. 2023): tuned maps from heads to the vocabulary, against the untrained projection.

A lens of rank 8 (headlab's own saving; the paper's are full) of the layer three quarters up, with the paper's training
but a handful of short texts, where the paper's have a corpus; figures say what so little training buys. The abstract
gives no figures; the number of weights follows from shapes.
"""

from __future__ import annotations

from common import Figure, is_model, main

import headlab as hl
from headlab.parameters.on_prompts.lens_training import train_lens
from headlab.tasks import prose, prose_windows

GPT2 = "gpt2"
PER_PROMPT, LENGTH, RANK = 5, 24, 8
#: Of low-rank lenses; the paper trains whole matrices at 1e-3 for 3 epochs.
RATE, EPOCHS = 1e-2, 20


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Train one lens and check it on texts it was not trained on."""
    layer = 3 * model.spec.n_layers // 4
    whole = model.spec.layers[layer].n_heads * model.spec.d_model * model.weights.W_U.shape[1]
    same = is_model(model, GPT2)
    size = Figure("weights of a full lens of one layer, millions", whole / 1e6, 463.0, GPT2, same)
    if model.tokenizer is None:
        return [Figure("lens", None, note="not measurable: there is no tokenizer"), size]
    n = max(10, PER_PROMPT * n_prompts)
    ids = prose_windows(model.tokenizer, prose(), n, LENGTH, seed, model.bos)
    lens, found = train_lens(
        model, ids, f"{layer}.*", rank=RANK, rate=RATE, epochs=EPOCHS, seed=seed
    )
    kept = f"nats on {len(found.kl)} held-out texts, trained on {n - len(found.kl)}"
    claim = "trained lenses translate heads to tokens; heads are highly specialised (abstract)"
    low, high = found.ci
    return [
        size,
        Figure("KL(model ‖ lens)", float(found.kl.mean()), claim, GPT2, same, f"layer {layer}, rank {RANK}, {kept}"),
        Figure("KL(model ‖ untrained lens)", float(found.untrained.mean()), note=kept),
        Figure("KL(model ‖ its mean distribution)", float(found.prior.mean()), note=f"{kept}; reads no head"),
        Figure("gain over the untrained lens", found.gain, note=f"{low:.3g} to {high:.3g}, p {found.p_value:.2g}"),
        Figure("gain over the mean distribution", found.beyond_prior,
               note=f"{found.prior_ci[0]:.3g} to {found.prior_ci[1]:.3g}, p {found.prior_p:.2g}"),
        Figure("training steps", len(lens.losses)),
    ]  # fmt: skip


if __name__ == "__main__":
    main(run, __doc__)
