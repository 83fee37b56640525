"""Attention engines: each computes z and statistics of the pattern from one attention call.

* :mod:`~headlab.kernels.dense` holds the whole pattern: the oracle, in any dtype;
* :mod:`~headlab.kernels.blockwise` holds blocks of rows: exact, on any device, O(n) memory;
* :mod:`~headlab.kernels.native` does the same in C++, on CPUs;
* :mod:`~headlab.kernels.fused` holds a tile at a time: Triton, on NVIDIA GPUs.

:func:`~headlab.kernels.choice.attend` picks one. Each statistic is defined once, in
:mod:`~headlab.kernels.statistics`; engines are tested against it.
"""

from headlab.kernels.choice import ENGINES, Engine, attend
from headlab.kernels.inputs import LINEAR, AttentionInputs, AttentionResult, Request, RowEdit
from headlab.kernels.statistics import COLUMN_STATISTICS, STATISTICS

__all__ = [
    "COLUMN_STATISTICS",
    "ENGINES",
    "LINEAR",
    "STATISTICS",
    "AttentionInputs",
    "AttentionResult",
    "Engine",
    "Request",
    "RowEdit",
    "attend",
]
