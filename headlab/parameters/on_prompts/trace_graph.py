"""What tracing gives: edges between heads on prompts, their frequencies, and where heads that gave none looked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headlab.statistics import bootstrap_interval, corrected, sign_flip_p

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class TraceGraph:
    """Edges found by tracing heads back, on some prompts.

    Attributes:
        model: Name of the model.
        n_prompts: Prompts traced.
        edges: One line per prompt and edge: prompt, head, destination, source (the firing traced), attention, score,
            n_terms (selected), side, position (the side's), upstream (a head, ``mlp3``, ``attention_bias3``,
            ``embedding`` or ``constant``), contribution (in units of q · k), share (of the selected terms' sum),
            projection (the paper's figure), null (the same head elsewhere; NaN for what is no head), fires (the source
            the upstream head attends to there, −1 where it does not fire), depth (0 for the heads asked for).
        shares: Every earlier head of every firing traced, edge or not: prompt, head, side, upstream, share, null_share.
        starts: One line per prompt and head asked for: prompt, head, ``firings`` (how many), and where it attended most
            to any token but the first: destination, source, attention, score (−1 and NaN where there is none). A head
            without firings was not traced: attention below ``least_attention`` or a negative score.
        least_attention: Attention at which a head fires.
        min_share: Least share that makes an edge.
    """

    model: str
    n_prompts: int
    edges: pd.DataFrame
    shares: pd.DataFrame
    starts: pd.DataFrame
    least_attention: float
    min_share: float

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Pairs of heads with an edge, over prompts; the most frequent first.

        Columns head, side, upstream, n_edges (prompts with the edge), n (prompts on which the head was traced), share
        (mean over those) with its 95 % bootstrap interval ci_low and ci_high, null_mean (share), effect, p_value,
        q_value (over all pairs, those without an edge too).
        """
        import pandas as pd

        keys = ["head", "side", "upstream"]
        per_prompt = self.shares.groupby([*keys, "prompt"], sort=False).mean()
        counts = self.edges.groupby(keys)["prompt"].nunique()
        lines: list[dict[str, Any]] = []
        for pair, rows in per_prompt.groupby(level=keys, sort=False):
            values = rows[["share", "null_share"]].to_numpy()
            low, high = bootstrap_interval(values[:, :1], seed=0)
            mean, null = values.mean(0)
            lines.append(
                dict(zip(keys, pair, strict=True))
                | {
                    "n_edges": int(counts.get(pair, 0)),
                    "n": len(values),
                    "share": mean,
                    "ci_low": low[0],
                    "ci_high": high[0],
                    "null_mean": null,
                    "effect": mean - null,
                    "p_value": sign_flip_p(values[:, :1] - values[:, 1:], seed=0)[0],
                }
            )
        frame = pd.DataFrame(lines, columns=_COLUMNS)
        # A head at a prompt's only other position has no null.
        frame["q_value"] = corrected(frame["p_value"].to_numpy(float))
        frame = frame[frame["n_edges"] > 0]
        return frame.sort_values(["n_edges", "share"], ascending=False, ignore_index=True)

    def __repr__(self) -> str:
        lines = [
            f"TraceGraph of {self.model}: {len(self.edges)} edges on {self.n_prompts} prompt(s)"
        ]
        for row in self.frame.head(8).itertuples():
            lines.append(
                f"  {row.upstream} → {row.head} ({row.side}): mean share {row.share:.2f}, an edge on {row.n_edges} of "
                f"the {row.n} prompt(s) where {row.head} was traced"
            )
        lines += [f"  {line}" for line in self._without()]
        return "\n".join(lines)

    def _without(self) -> list[str]:
        """Why heads asked for have no edge."""
        lines = []
        traced = set(self.edges["head"])
        for head, rows in self.starts.groupby("head", sort=False):
            if head in traced:
                continue
            if rows["firings"].any():
                lines.append(
                    f"{head} fires, but no part has a share of {self.min_share:g} (min_share)"
                )
            elif rows["attention"].isna().all():
                lines.append(f"{head} does not fire: there is no source but the first token")
            else:
                row = rows.sort_values("attention").dropna().iloc[-1]
                why = f"below least_attention={self.least_attention:g}"
                if row["attention"] >= self.least_attention:
                    why = f"but the score is {row['score']:.2g}, below 0"
                lines.append(
                    f"{head} does not fire: its attention to any token but the first is at most "
                    f"{row['attention']:.2f} (prompt {row['prompt']}, {row['destination']} to {row['source']}), {why}"
                )
        return lines


_COLUMNS = [
    "head", "side", "upstream", "n_edges", "n", "share", "ci_low", "ci_high", "null_mean", "effect", "p_value"
]  # fmt: skip

EDGE_COLUMNS = [
    "prompt", "head", "destination", "source", "attention", "score", "n_terms", "side", "position", "upstream",
    "contribution", "share", "projection", "null", "fires", "depth",
]  # fmt: skip

SHARE_COLUMNS = ["head", "side", "upstream", "share", "null_share", "prompt"]
START_COLUMNS = ["prompt", "head", "firings", "destination", "source", "attention", "score"]

__all__ = ["EDGE_COLUMNS", "SHARE_COLUMNS", "START_COLUMNS", "TraceGraph"]
