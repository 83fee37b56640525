"""What a table of scores says beyond its rows: which roles share heads, and how stable the scores are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from headlab.errors import OutputError


def overlap(frame: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """How many heads are claimed for both of two roles, [role, role]; the diagonal counts each role's heads."""
    claimed = frame[frame["claimed"]]
    sets = {
        role: set(zip(rows["layer"], rows["head"], strict=True))
        for role in roles
        for rows in [claimed[claimed["role"] == role]]
    }
    counts = [[len(sets[one] & sets[other]) for other in roles] for one in roles]
    return pd.DataFrame(counts, index=list(roles), columns=list(roles), dtype="int64")


def stability(frame: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """How far two disjoint halves of the probe agree.

    Returns:
        One row per role: ``heads`` measured in both halves, ``rank_correlation`` (Spearman) of their scores, and
        ``agreement``: of the k best heads of either half, the share that both halves name (Jaccard), with k the
        number of claimed heads; NaN where nothing is claimed.
    """
    rows = []
    for role in roles:
        measured = frame[(frame["role"] == role)].dropna(subset=["half_1", "half_2"])
        first, second = measured["half_1"].to_numpy(), measured["half_2"].to_numpy()
        varied = len(measured) > 2 and np.ptp(first) > 0 and np.ptp(second) > 0
        k = int(measured["claimed"].sum())
        best = [set(np.argsort(-half, kind="stable")[:k]) for half in (first, second)]
        rows.append(
            {
                "role": role,
                "heads": len(measured),
                "rank_correlation": float(spearmanr(first, second)[0]) if varied else np.nan,
                "agreement": len(best[0] & best[1]) / len(best[0] | best[1]) if k else np.nan,
            }
        )
    return pd.DataFrame(rows, columns=["role", "heads", "rank_correlation", "agreement"])


def checked_details(frame: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """The details with their types and a fresh index.

    Raises:
        OutputError: A column is missing, or a row belongs to no role.
    """
    texts, integers, floats = ("role", "detail", "meaning"), ("layer", "head"), ("at", "value")
    columns = ["role", "layer", "head", "detail", "at", "value", "meaning"]
    if missing := [name for name in columns if name not in frame.columns]:
        raise OutputError(f"the details frame lacks {', '.join(missing)}: a row needs every column")
    result = frame.loc[:, columns].reset_index(drop=True)
    for name in (*texts, *integers, *floats):
        kind = "str" if name in texts else "int64" if name in integers else "float64"
        try:
            result[name] = result[name].astype(kind)  # type: ignore[call-overload]  # checked kinds
        except (ValueError, TypeError) as error:
            raise OutputError(f"column {name} of the details frame: {error}") from error
    if unknown := sorted(set(result["role"]) - set(roles)):
        raise OutputError(f"the details have roles without a description: {', '.join(unknown)}")
    return result
