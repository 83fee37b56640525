"""Traces as tidy pandas tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import Tensor

from headlab.errors import PlanError
from headlab.kernels import COLUMN_STATISTICS

if TYPE_CHECKING:
    from headlab.attention.trace import Trace

_UNTIDY = COLUMN_STATISTICS | {"segment_z"}


def statistics_frame(trace: Trace, names: Sequence[str]) -> pd.DataFrame:
    """One line per prompt, layer, head and query (per key for ``received``), one column per statistic.

    A statistic with a last axis takes a column per entry, such as ``segment_mass[subject]``.

    Raises:
        PlanError: A statistic was not kept, or has no query axis and others were asked for with it.
    """
    if len(names) == 1 and names[0] == "received":
        return _frame(trace, names[0], trace.statistic("received"), "key")
    tidy = [name for name in names if name not in _UNTIDY]
    if not tidy:
        raise PlanError(
            f"{', '.join(names)} has no query axis and no table; read it with trace.statistic"
        )
    frames = [_frame(trace, name, trace.statistic(name), "query") for name in tidy]
    keys = ["prompt", "layer", "head", "query", "token"]
    joined = frames[0]
    for frame in frames[1:]:
        joined = joined.merge(frame, on=keys, how="outer")
    return joined


def rows_frame(trace: Trace) -> pd.DataFrame:
    """One line per prompt, layer, head, query and key."""
    rows = trace.rows
    index = np.indices(rows.shape).reshape(5, -1)
    positions = trace.row_positions.cpu().numpy()
    frame = pd.DataFrame(
        {
            "prompt": index[0],
            "layer": np.asarray(trace.layers("rows"))[index[1]],
            "head": np.asarray(trace.head_axis("rows"))[index[2]],
            "query": positions[index[0], index[3]],
            "key": index[4],
            "weight": rows.detach().float().cpu().numpy().reshape(-1),
        }
    )
    real = frame["key"].to_numpy() < trace.lengths.cpu().numpy()[index[0]]
    return frame[real & frame["weight"].notna()].reset_index(drop=True)


def _frame(trace: Trace, name: str, value: Tensor, axis: str) -> pd.DataFrame:
    labels = trace.labels.get(name) or tuple(str(at) for at in range(value.shape[-1]))
    columns = [name] if value.dim() == 4 else [f"{name}[{label}]" for label in labels]
    flat = value if value.dim() == 5 else value[..., None]
    shape = flat.shape[:4]
    index = np.indices(shape).reshape(4, -1)
    lengths = trace.lengths.cpu().numpy()
    table = {
        "prompt": index[0],
        "layer": np.asarray(trace.layers(name))[index[1]],
        "head": np.asarray(trace.head_axis(name))[index[2]],
        axis: index[3],
    }
    positions = index[3]
    if name in trace.query_positions:  # only some queries were kept
        positions = trace.query_positions[name].cpu().numpy()[index[0], index[3]]
        table[axis] = positions
    kept = np.array(
        [
            [head in trace.heads[name][layer] for head in trace.head_axis(name)]
            for layer in trace.layers(name)
        ]
    )
    real = (positions < lengths[index[0]]) & kept[index[1], index[2]]
    table["token"] = np.array(
        [
            trace.tokens[prompt][at] if ok else ""
            for prompt, at, ok in zip(index[0], positions, real, strict=True)
        ],
        dtype=object,
    )
    data = flat.detach().cpu().reshape(-1, flat.shape[-1])
    data = data.float() if data.is_floating_point() else data
    table |= {column: data[:, at].numpy() for at, column in enumerate(columns)}
    return pd.DataFrame(table)[real].reset_index(drop=True)
