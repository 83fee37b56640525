"""Probe data with labelled positions; nothing here runs a model."""

from headlab.tasks.needles import NEEDLES, Needle, NeedleTrial, needle_trials
from headlab.tasks.prose import prose, prose_windows
from headlab.tasks.random_tokens import RepeatedTokens, plain_tokens, random_tokens, repeated_tokens
from headlab.tasks.records import RecordError, RecordsLike, read_records

__all__ = [
    "NEEDLES",
    "Needle",
    "NeedleTrial",
    "RecordError",
    "RecordsLike",
    "RepeatedTokens",
    "needle_trials",
    "plain_tokens",
    "prose",
    "prose_windows",
    "random_tokens",
    "read_records",
    "repeated_tokens",
]
