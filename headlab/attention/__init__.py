"""Capture and interventions at one seam; see :mod:`headlab.attention.seam`."""

from headlab.attention import keep
from headlab.attention.ablations import ablate
from headlab.attention.chunks import attention_chunks
from headlab.attention.edits import Edit, Where, add, apply, patch, replace, scale
from headlab.attention.heads import Head, HeadsLike, parse_heads, read_head
from headlab.attention.keep import Keep
from headlab.attention.matched import matched_sets
from headlab.attention.rope import RopePairs, contributions, frequencies, plain_token, rope_pairs
from headlab.attention.streaming import cache_argument
from headlab.attention.trace import Trace

__all__ = [
    "Edit",
    "Head",
    "HeadsLike",
    "Keep",
    "RopePairs",
    "Trace",
    "Where",
    "ablate",
    "add",
    "apply",
    "attention_chunks",
    "cache_argument",
    "contributions",
    "frequencies",
    "keep",
    "matched_sets",
    "parse_heads",
    "patch",
    "plain_token",
    "read_head",
    "replace",
    "rope_pairs",
    "scale",
]
