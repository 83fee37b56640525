"""Capture and interventions at one seam; see :mod:`headlab.attention.seam`."""

from headlab.attention import keep
from headlab.attention.ablations import ablate
from headlab.attention.edits import Edit, Where, add, apply, patch, replace, scale
from headlab.attention.heads import Head, HeadsLike, parse_heads
from headlab.attention.keep import Keep
from headlab.attention.trace import Trace

__all__ = [
    "Edit",
    "Head",
    "HeadsLike",
    "Keep",
    "Trace",
    "Where",
    "ablate",
    "add",
    "apply",
    "keep",
    "parse_heads",
    "patch",
    "replace",
    "scale",
]
