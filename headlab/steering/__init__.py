"""Turning what is known of heads into control: methods of steering, and what they do and cost."""

from headlab.steering.act import ACT
from headlab.steering.base import Method, steer
from headlab.steering.evaluation import Behaviour, Case, Measure, evaluate
from headlab.steering.focus import FocusDirections, compare_sides, gold_mass
from headlab.steering.found_in_middle import FoundInTheMiddle
from headlab.steering.function_vectors import FunctionVector, indirect_effects, top_heads
from headlab.steering.head_vectors import HeadVectors
from headlab.steering.juice import JuICE, JuNE, best_heads, conflict_heads
from headlab.steering.kv_budget import KVBudget
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
from headlab.steering.profiling import Profile, profile, shared_heads
from headlab.steering.reordering import (
    Reordered,
    attention_sorted,
    attention_to_documents,
    place_preference,
    ranked_into_places,
    reorder,
    word_overlap,
)
from headlab.steering.results import Evaluation
from headlab.steering.sink_removal import SinkRemoval
from headlab.steering.split_softmax import SplitSoftmax
from headlab.steering.task_vectors import TaskVectors
from headlab.steering.tracker import (
    Detection,
    InjectionDetector,
    important_heads,
    instruction_prompt,
)
from headlab.steering.translation import subtask_effects, subtask_vectors
from headlab.steering.value_edit import ValueEdit

__all__ = [
    "ACT",
    "Behaviour",
    "Case",
    "Detection",
    "Evaluation",
    "FocusDirections",
    "FoundInTheMiddle",
    "FunctionVector",
    "HeadVectors",
    "InjectionDetector",
    "JuICE",
    "JuNE",
    "KVBudget",
    "Learned",
    "Marks",
    "Measure",
    "Method",
    "Pasta",
    "Profile",
    "Reordered",
    "SinkRemoval",
    "Span",
    "SpansLike",
    "SplitSoftmax",
    "TaskVectors",
    "ValueEdit",
    "answer_log_probability",
    "attention_sorted",
    "attention_to_documents",
    "best_heads",
    "compare_sides",
    "conflict_heads",
    "evaluate",
    "find_spans",
    "first_token_correct",
    "first_token_difference",
    "gold_mass",
    "holds",
    "important_heads",
    "indirect_effects",
    "instruction_prompt",
    "load",
    "place_preference",
    "profile",
    "ranked_into_places",
    "reorder",
    "says_answer",
    "shared_heads",
    "steer",
    "subtask_effects",
    "subtask_vectors",
    "top_heads",
    "word_overlap",
]
