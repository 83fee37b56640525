"""Opening models, and reading what their weights say about each head."""

from headlab.models.blocks import Blocks
from headlab.models.embedded import EMBEDDED, KnownModel, list_models
from headlab.models.fingerprint import weights_sha256
from headlab.models.gguf import cache_root
from headlab.models.loading import Opened, open_model
from headlab.models.spec import LayerSpec, ModelSpec
from headlab.models.weights import HeadWeights

__all__ = [
    "EMBEDDED",
    "Blocks",
    "HeadWeights",
    "KnownModel",
    "LayerSpec",
    "ModelSpec",
    "Opened",
    "cache_root",
    "list_models",
    "open_model",
    "weights_sha256",
]
