"""Probe data with labelled positions; nothing here runs a model."""

from headlab.tasks.dependencies import DEPENDENCY_SCHEMA, ParsedSentence, parsed_sentences
from headlab.tasks.documents import (
    DocumentPrompt,
    DocumentQuestion,
    document_prompt,
    document_questions,
)
from headlab.tasks.ioi import IOIPrompt, ioi_prompts
from headlab.tasks.needles import (
    NEEDLES,
    Needle,
    NeedleError,
    NeedleTrial,
    bare_length,
    check_offsets,
    draw_needles,
    needle_trials,
    prompt_trial,
)
from headlab.tasks.pairs import PAIR_SCHEMA, PromptPairs, given_pairs, ioi_pairs
from headlab.tasks.prose import data_folder, prose, prose_windows
from headlab.tasks.random_tokens import (
    TOKENS_SCHEMA,
    FuzzyTokens,
    RepeatedTokens,
    fuzzy_tokens,
    given_tokens,
    plain_tokens,
    random_tokens,
    repeated_tokens,
    shuffled_apart,
)
from headlab.tasks.records import RecordError, RecordsLike, read_records
from headlab.tasks.repeated_lists import (
    LIST_SCHEMA,
    MIN_LIST,
    RepeatedList,
    given_lists,
    random_lists,
)
from headlab.tasks.sequences import SEQUENCE_SCHEMA, OrderedTokens, dealt, ordered_tokens
from headlab.tasks.spans import SPAN_SCHEMA, SpanTrial, span_trials
from headlab.tasks.temporal import (
    Facts,
    TimePair,
    TimePrompts,
    event_pairs,
    facts_of_records,
    invariant_pairs,
    temporal_facts,
    temporal_pairs,
)

__all__ = [
    "DEPENDENCY_SCHEMA",
    "LIST_SCHEMA",
    "MIN_LIST",
    "NEEDLES",
    "PAIR_SCHEMA",
    "SEQUENCE_SCHEMA",
    "SPAN_SCHEMA",
    "TOKENS_SCHEMA",
    "DocumentPrompt",
    "DocumentQuestion",
    "Facts",
    "FuzzyTokens",
    "IOIPrompt",
    "Needle",
    "NeedleError",
    "NeedleTrial",
    "OrderedTokens",
    "ParsedSentence",
    "PromptPairs",
    "RecordError",
    "RecordsLike",
    "RepeatedList",
    "RepeatedTokens",
    "SpanTrial",
    "TimePair",
    "TimePrompts",
    "bare_length",
    "check_offsets",
    "data_folder",
    "dealt",
    "document_prompt",
    "document_questions",
    "draw_needles",
    "event_pairs",
    "facts_of_records",
    "fuzzy_tokens",
    "given_lists",
    "given_pairs",
    "given_tokens",
    "invariant_pairs",
    "ioi_pairs",
    "ioi_prompts",
    "needle_trials",
    "ordered_tokens",
    "parsed_sentences",
    "plain_tokens",
    "prompt_trial",
    "prose",
    "prose_windows",
    "random_lists",
    "random_tokens",
    "read_records",
    "repeated_tokens",
    "shuffled_apart",
    "span_trials",
    "temporal_facts",
    "temporal_pairs",
]
