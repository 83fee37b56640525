"""Causal effects of heads: ablation, patching, paths, attribution and circuits.

    effects = hl.causal.patch_each(model, clean, corrupted, hl.metrics.logit_difference(answers, foils))
    effects.top(10)

Everything here works on ordinary prompts and edits; :class:`Sweep` runs many sets of edits without computing anything
twice, and :class:`Effects` is the table that sweeps give.
"""

from headlab.causal import metrics
from headlab.causal.ablation import ablate_each
from headlab.causal.effects import EFFECT_COLUMNS, Effects, effects_of
from headlab.causal.metrics import Metric
from headlab.causal.pairs import Pairs, pairs
from headlab.causal.patching import patch_each
from headlab.causal.sweep import Sweep

__all__ = [
    "EFFECT_COLUMNS",
    "Effects",
    "Metric",
    "Pairs",
    "Sweep",
    "ablate_each",
    "effects_of",
    "metrics",
    "pairs",
    "patch_each",
]
