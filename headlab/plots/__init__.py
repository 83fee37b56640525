"""Plotly figures for notebooks: returned, never shown, and styled without global defaults."""

from headlab.plots.heatmap import role_map
from headlab.plots.pattern import pattern
from headlab.plots.profile import profile

__all__ = ["pattern", "profile", "role_map"]
