"""The Triton engine: attention whose statistics are computed in the attention loop itself."""

from headlab.kernels.fused.derivative import backward_of
from headlab.kernels.fused.engine import attend, why_not

__all__ = ["attend", "backward_of", "why_not"]
