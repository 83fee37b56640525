"""What heads can do, read from their weights.

    maps = hl.parameters.maps(model, relations="all")
    maps.claimed("country_capital")

Nothing here runs the model on a prompt, but for what is imported from ``on_prompts``, which says what weights do there.
"""

from headlab.parameters.circuits import Circuits, circuits
from headlab.parameters.composition import Composition, composition
from headlab.parameters.copying import copying, eigenvalue_copying
from headlab.parameters.describe import Description, Pattern, describe_mappings
from headlab.parameters.describe_by_model import Describer
from headlab.parameters.embeddings import EmbeddingKind, embed
from headlab.parameters.factored import FactoredMatrix
from headlab.parameters.maps import maps
from headlab.parameters.maps_result import MAPS_COLUMNS, MappedRelation, Maps
from headlab.parameters.on_prompts.attention_lens import AttentionLens, untrained_lens
from headlab.parameters.on_prompts.causal_check import CausalCheck, causal_check
from headlab.parameters.on_prompts.disruption import disrupt
from headlab.parameters.on_prompts.disruption_effects import (
    Behaviour,
    Disruption,
    behaviours,
    disruption,
)
from headlab.parameters.on_prompts.dynamic import DynamicScores, dynamic_scores
from headlab.parameters.on_prompts.lens_training import LensCheck, train_lens
from headlab.parameters.on_prompts.massive_values import MassiveValues, massive_values
from headlab.parameters.on_prompts.memory import DistributedMemory, distributed_memory
from headlab.parameters.on_prompts.signals import SignalEffect, edit_signal
from headlab.parameters.on_prompts.sparse_scores import PromptScores
from headlab.parameters.on_prompts.tracing import TraceGraph, sparsity, trace_heads, upstream
from headlab.parameters.on_prompts.visit import Visit, visit
from headlab.parameters.positions import positional_patterns, previous_token
from headlab.parameters.relation_inputs import CONVENTIONS, Convention, RelationsLike
from headlab.parameters.rotation import Distance
from headlab.parameters.salient import SalientMapping, SalientOperations, salient_operations
from headlab.parameters.singular_vectors import SingularVectors, singular_vectors
from headlab.parameters.virtual_weights import (
    Channel,
    channel,
    top_token_pairs,
    virtual_ov,
    virtual_qk,
)
from headlab.parameters.vocabulary import TopTokens, top_tokens

__all__ = [
    "CONVENTIONS",
    "MAPS_COLUMNS",
    "AttentionLens",
    "Behaviour",
    "CausalCheck",
    "Channel",
    "Circuits",
    "Composition",
    "Convention",
    "Describer",
    "Description",
    "Disruption",
    "Distance",
    "DistributedMemory",
    "DynamicScores",
    "EmbeddingKind",
    "FactoredMatrix",
    "LensCheck",
    "MappedRelation",
    "Maps",
    "MassiveValues",
    "Pattern",
    "PromptScores",
    "RelationsLike",
    "SalientMapping",
    "SalientOperations",
    "SignalEffect",
    "SingularVectors",
    "TopTokens",
    "TraceGraph",
    "Visit",
    "behaviours",
    "causal_check",
    "channel",
    "circuits",
    "composition",
    "copying",
    "describe_mappings",
    "disrupt",
    "disruption",
    "distributed_memory",
    "dynamic_scores",
    "edit_signal",
    "eigenvalue_copying",
    "embed",
    "maps",
    "massive_values",
    "positional_patterns",
    "previous_token",
    "salient_operations",
    "singular_vectors",
    "sparsity",
    "top_token_pairs",
    "top_tokens",
    "trace_heads",
    "train_lens",
    "untrained_lens",
    "upstream",
    "virtual_ov",
    "virtual_qk",
    "visit",
]
