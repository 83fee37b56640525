"""What heads can do, read from their weights.

    maps = hl.parameters.maps(model, relations="all")
    maps.claimed("capital")

Nothing here runs the model on a prompt, but for what is imported from ``on_prompts``, which says what weights do there.
"""

from headlab.parameters.circuits import Circuits, circuits
from headlab.parameters.copying import copying, eigenvalue_copying
from headlab.parameters.embeddings import EmbeddingKind, embed
from headlab.parameters.factored import FactoredMatrix
from headlab.parameters.rotation import Distance

__all__ = [
    "Circuits",
    "Distance",
    "EmbeddingKind",
    "FactoredMatrix",
    "circuits",
    "copying",
    "eigenvalue_copying",
    "embed",
]
