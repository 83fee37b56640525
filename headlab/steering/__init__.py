"""Turning what is known of heads into control: methods of steering, and what they do and cost."""

from headlab.steering.base import Method, steer
from headlab.steering.evaluation import Behaviour, Case, Measure, evaluate
from headlab.steering.learned import Learned, load
from headlab.steering.marks import Marks, Span, SpansLike, find_spans
from headlab.steering.measures import (
    answer_log_probability,
    first_token_difference,
    holds,
    says_answer,
)
from headlab.steering.pasta import Pasta
from headlab.steering.results import Evaluation

__all__ = [
    "Behaviour",
    "Case",
    "Evaluation",
    "Learned",
    "Marks",
    "Measure",
    "Method",
    "Pasta",
    "Span",
    "SpansLike",
    "answer_log_probability",
    "evaluate",
    "find_spans",
    "first_token_difference",
    "holds",
    "load",
    "says_answer",
    "steer",
]
