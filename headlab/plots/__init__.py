"""Plotly figures for notebooks: returned, never shown, and styled without global defaults."""

from headlab.plots.circuit import head_graph
from headlab.plots.curve import faithfulness_curve, pruning_curve
from headlab.plots.effects import effect_map, position_map
from headlab.plots.heatmap import role_map
from headlab.plots.operations import operation_map
from headlab.plots.pattern import pattern
from headlab.plots.profile import profile
from headlab.plots.steering import steering_sweep

__all__ = [
    "effect_map",
    "faithfulness_curve",
    "head_graph",
    "operation_map",
    "pattern",
    "position_map",
    "profile",
    "pruning_curve",
    "role_map",
    "steering_sweep",
]
