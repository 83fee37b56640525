"""Causal effects of heads: ablation, patching, paths, attribution and circuits.

    effects = hl.causal.patch_each(model, clean, corrupted, hl.metrics.logit_difference(answers, foils))
    effects.top(10)

Everything here works on ordinary prompts and edits; :class:`Sweep` runs many sets of edits without computing anything
twice, and :class:`Effects` is the table that sweeps give.
"""

from headlab.causal import metrics
from headlab.causal.ablation import ablate_each
from headlab.causal.attribution.atp import atp, atp_star
from headlab.causal.attribution.direct import DirectAttribution, direct_logit_attribution
from headlab.causal.attribution.eap import Edges, eap, eap_ig
from headlab.causal.attribution.eap_heads import eap_ig_heads
from headlab.causal.attribution.flow import InformationFlow, Routes, information_flow, proximity
from headlab.causal.attribution.importance import head_importance
from headlab.causal.attribution.rollout import Flow, Rollout, attention_flow, attention_rollout
from headlab.causal.attribution.saliency import attention_saliency
from headlab.causal.attribution.sources import SourceAttribution, by_source
from headlab.causal.circuits.acdc import acdc
from headlab.causal.circuits.checkpoints import over_checkpoints
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.faithfulness import (
    Faithfulness,
    FaithfulnessCurve,
    HeadRuns,
    faithfulness,
    faithfulness_curve,
)
from headlab.causal.circuits.overlap import Overlap, overlap
from headlab.causal.effects import EFFECT_COLUMNS, Effects, effects_of
from headlab.causal.graph import Edge, Graph
from headlab.causal.head_sets.pruning import PruningCurve, greedy_pruning, pruning_curve
from headlab.causal.head_sets.shapley import Shapley, shapley_heads, shapley_values
from headlab.causal.metrics import Metric
from headlab.causal.patching import patch_each
from headlab.causal.paths.edges import EdgeRuns
from headlab.causal.paths.path_patching import path_patch
from headlab.causal.prompt_pairs import Pairs, pairs
from headlab.causal.sweep import Sweep

__all__ = [
    "EFFECT_COLUMNS",
    "Circuit",
    "DirectAttribution",
    "Edge",
    "EdgeRuns",
    "Edges",
    "Effects",
    "Faithfulness",
    "FaithfulnessCurve",
    "Flow",
    "Graph",
    "HeadRuns",
    "InformationFlow",
    "Metric",
    "Overlap",
    "Pairs",
    "PruningCurve",
    "Rollout",
    "Routes",
    "Shapley",
    "SourceAttribution",
    "Sweep",
    "ablate_each",
    "acdc",
    "atp",
    "atp_star",
    "attention_flow",
    "attention_rollout",
    "attention_saliency",
    "by_source",
    "direct_logit_attribution",
    "eap",
    "eap_ig",
    "eap_ig_heads",
    "effects_of",
    "faithfulness",
    "faithfulness_curve",
    "greedy_pruning",
    "head_importance",
    "information_flow",
    "metrics",
    "over_checkpoints",
    "overlap",
    "pairs",
    "patch_each",
    "path_patch",
    "proximity",
    "pruning_curve",
    "shapley_heads",
    "shapley_values",
]
