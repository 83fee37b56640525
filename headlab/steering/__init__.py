"""Turning what is known of heads into control: methods of steering, and what they do and cost."""

from headlab.steering.base import Method, steer
from headlab.steering.evaluation import Behaviour, Case, Measure, evaluate
from headlab.steering.function_vectors import FunctionVector, indirect_effects, top_heads
from headlab.steering.head_vectors import HeadVectors
from headlab.steering.juice import JuICE, JuNE, best_heads, conflict_heads
from headlab.steering.learned import Learned, load
from headlab.steering.marks import Marks, Span, SpansLike, find_spans
from headlab.steering.measures import (
    answer_log_probability,
    first_token_correct,
    first_token_difference,
    holds,
    says_answer,
)
from headlab.steering.pasta import Pasta
from headlab.steering.results import Evaluation
from headlab.steering.task_vectors import TaskVectors
from headlab.steering.value_edit import ValueEdit

__all__ = [
    "Behaviour",
    "Case",
    "Evaluation",
    "FunctionVector",
    "HeadVectors",
    "JuICE",
    "JuNE",
    "Learned",
    "Marks",
    "Measure",
    "Method",
    "Pasta",
    "Span",
    "SpansLike",
    "TaskVectors",
    "ValueEdit",
    "answer_log_probability",
    "best_heads",
    "conflict_heads",
    "evaluate",
    "find_spans",
    "first_token_correct",
    "first_token_difference",
    "holds",
    "indirect_effects",
    "load",
    "says_answer",
    "steer",
    "top_heads",
]
