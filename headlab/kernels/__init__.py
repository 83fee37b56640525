"""Attention engines: each computes z and statistics of the pattern from one attention call.

* :mod:`~headlab.kernels.dense` holds the whole pattern: the oracle, in any dtype;
* :mod:`~headlab.kernels.blockwise` holds blocks of rows: exact, on any device, O(n) memory.

Each statistic is defined once, in :mod:`~headlab.kernels.statistics`; engines are tested against it.
"""

from collections.abc import Callable

from headlab.kernels import blockwise, dense
from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request, RowEdit
from headlab.kernels.statistics import COLUMN_STATISTICS, STATISTICS

#: Engines by name: ``engine(inputs, request) -> AttentionResult``.
ENGINES: dict[str, Callable[[AttentionInputs, Request], AttentionResult]] = {
    "blockwise": blockwise.attend,
    "dense": dense.attend,
}

__all__ = [
    "COLUMN_STATISTICS",
    "ENGINES",
    "STATISTICS",
    "AttentionInputs",
    "AttentionResult",
    "Request",
    "RowEdit",
]
