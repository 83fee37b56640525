"""Roles of heads: each a probe, a statistic, a null and a decision, in one file.

Importing this package registers headlab's own roles; :func:`register` adds one of yours.
"""

# isort: off
# Importing a role registers it; this is the order in which reports show them.
from headlab.roles import retrieval, induction, copying, previous_token, duplicate_token
from headlab.roles import sink, distance
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
from headlab.roles.confirm import confirm
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
    "copying",
    "distance",
    "duplicate_token",
    "head_label",
    "induction",
    "previous_token",
    "register",
    "retrieval",
    "score",
    "sink",
    "visible",
]
