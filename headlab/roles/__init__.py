"""Roles of heads: each a probe, a statistic, a null and a decision, in one file.

Importing this package registers headlab's own roles; :func:`register` adds one of yours.
"""

# isort: off
# Importing a role registers it; this is the order in which reports show them.
from headlab.roles import (
    retrieval,
    induction,
    natural_induction,
    fuzzy_induction,
    copying,
    episodic,
)
from headlab.roles import previous_token, duplicate_token, successor, temporal, contextual
from headlab.roles import sink, delimiter, positional, distance, long_context
from headlab.roles import spans, syntactic
# isort: on

from headlab.roles.base import (
    ROLES,
    Behaviour,
    Detail,
    Look,
    Measurement,
    Probing,
    Role,
    RoleError,
    register,
)
from headlab.roles.confirmation import confirm
from headlab.roles.scores import COLUMNS, Example, RoleInfo, Scores, head_label, visible
from headlab.roles.scoring import ALPHA, N_PROMPTS, score

__all__ = [
    "ALPHA",
    "COLUMNS",
    "N_PROMPTS",
    "ROLES",
    "Behaviour",
    "Detail",
    "Example",
    "Look",
    "Measurement",
    "Probing",
    "Role",
    "RoleError",
    "RoleInfo",
    "Scores",
    "confirm",
    "contextual",
    "copying",
    "delimiter",
    "distance",
    "duplicate_token",
    "episodic",
    "fuzzy_induction",
    "head_label",
    "induction",
    "long_context",
    "natural_induction",
    "positional",
    "previous_token",
    "register",
    "retrieval",
    "score",
    "sink",
    "spans",
    "successor",
    "syntactic",
    "temporal",
    "visible",
]
