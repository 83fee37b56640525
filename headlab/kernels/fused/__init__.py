"""The Triton engine: attention whose statistics are computed in the attention loop itself."""

from headlab.kernels.fused.engine import attend, why_not

__all__ = ["attend", "why_not"]
