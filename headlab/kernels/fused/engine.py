"""The engine: which kernels a request needs, and what is beyond them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.errors import UnsupportedError
from headlab.kernels.dense import attend_rows
from headlab.kernels.fused.call import INTERPRET, MAX_WIDTH, Call, head_index, prepared
from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request
from headlab.kernels.statistics import COLUMN_STATISTICS

#: Entries of the top-k up to which the kernel keeps them in registers.
MAX_K = 64

#: Statistics of the attention loop itself.
FIRST = frozenset(
    {
        "lse",
        "entropy",
        "max",
        "argmax",
        "topk",
        "topk_index",
        "feature",
        "local_mass",
        "mean_distance",
    }
)

#: Statistics that need the final log-sum-exp, and so a second pass.
SECOND = COLUMN_STATISTICS | {"lag_mass", "target_mass", "segment_z"}

#: A column of features is rare if it is not 0 in at most this share of tiles of so many keys.
_RARE, _TILE = 1 / 16, 128

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(inputs: AttentionInputs, request: Request) -> str | None:
    """Why this call is beyond the engine, as a clause; None where it is not.

    Args:
        inputs: The attention call.
        request: What is asked of it.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    widest = max(q.shape[-1], v.shape[-1])
    if request.edit_scores is not None or request.edit_pattern is not None:
        return "edits of scores or pattern need whole rows"
    if unknown := set(request.statistics) - FIRST - SECOND:
        return f"it does not compute {', '.join(sorted(unknown))}"
    missing = _missing()
    if missing is not None:
        return missing
    if q.device.type != "cuda" and not (INTERPRET and q.device.type == "cpu"):
        return f"tensors on {q.device.type}, and Triton needs an NVIDIA GPU"
    if q.dtype not in _TYPES or not q.dtype == k.dtype == v.dtype:
        named = "/".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (q, k, v)))
        return f"{named} inputs; float32, float16 and bfloat16 it can"
    if widest > MAX_WIDTH:
        return f"a head size of {widest}; it can up to {MAX_WIDTH}"
    if request.k > MAX_K and {"topk", "topk_index"} & set(request.statistics):
        return f"a top-{request.k}; it can up to {MAX_K} entries"
    return None


def _missing() -> str | None:
    remedy = "pip install 'triton>=3.6' mends that"
    if find_spec("triton") is None:
        return f"triton is not installed; {remedy}"
    from triton import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < (3, 6):
        return f"triton {__version__} is older than 3.6; {remedy}"
    return None


def attend(inputs: AttentionInputs, request: Request) -> AttentionResult:
    """Compute what was requested; the pattern is never in memory.

    Args:
        inputs: The attention call.
        request: What to return.

    Raises:
        UnsupportedError: The call is beyond the engine.
    """
    reason = why_not(inputs, request)
    if reason is not None:
        raise UnsupportedError(f"the Triton engine cannot serve this attention call: {reason}")
    result = AttentionResult()
    if request.rows is not None:
        result.rows = attend_rows(inputs, request, request.rows).pattern
    asked = set(request.statistics)
    if not (request.z or asked):
        return result
    call = prepared(inputs, request.heads)
    second = asked if request.z_gradient is not None else asked & SECOND
    rare: list[int] = []
    if "feature" in asked - second:
        assert request.features is not None
        rare = _rare(request.features)
    common = [] if request.features is None else _without(request.features.shape[2], rare)
    if rare and not common:
        second = second | {"feature"}
    first = asked - second | ({"lse"} if second or rare else set())
    if request.z:
        result.z = _empty_z(inputs)
    found = _first_pass(call, first, _columns(request, common) if rare else request, result.z)
    if second:
        found |= _second_pass(call, found["lse"], replace(request, statistics=tuple(second)))
    if rare and common:
        found["feature"] = _joined(call, found, request, common, rare)
    result.statistics = {name: found[name] for name in request.statistics}
    return result


def _rare(features: Float[Tensor, "#batch key feature"]) -> list[int]:
    """Columns of features that are 0 at nearly all keys, as those that mark the first key are.

    The second pass visits the few tiles where they are not 0, while the attention loop would multiply them everywhere.
    """
    padding = -features.shape[1] % _TILE
    tiles = torch.nn.functional.pad(features != 0, (0, 0, 0, padding)).unflatten(1, (-1, _TILE))
    share = tiles.any(2).float().mean((0, 1))
    return [at for at, part in enumerate(share.tolist()) if part <= _RARE]


def _without(n: int, some: list[int]) -> list[int]:
    return [at for at in range(n) if at not in some]


def _columns(request: Request, chosen: list[int]) -> Request:
    """The request with some of its features."""
    assert request.features is not None
    return replace(request, features=request.features[..., chosen])


def _joined(
    call: Call, found: dict[str, Tensor], request: Request, common: list[int], rare: list[int]
) -> Tensor:
    """Features of the first pass and, from the second, rare ones, in their own order."""
    of_rare = replace(_columns(request, rare), statistics=("feature",))
    parts = [found["feature"], _second_pass(call, found["lse"], of_rare)["feature"]]
    order = torch.tensor([*common, *rare], device=call.q.device).argsort()
    return torch.cat(parts, -1)[..., order]


def forward(
    inputs: AttentionInputs,
) -> tuple[Float[Tensor, "batch head query d_value"], Float[Tensor, "batch head query"]]:
    """z and the natural log-sum-exp (float32) of a call: all that its backward pass needs.

    Args:
        inputs: The attention call.
    """
    z = _empty_z(inputs)
    found = _first_pass(prepared(inputs, None), {"lse"}, Request(), z)
    return z, found["lse"]


def _empty_z(inputs: AttentionInputs) -> Tensor:
    """z with the heads of a token side by side, as W_O reads them."""
    batch, n_heads, n_queries = inputs.q.shape[:3]
    return inputs.v.new_empty(batch, n_queries, n_heads, inputs.v.shape[-1]).transpose(1, 2)


def _first_pass(
    call: Call, names: set[str], request: Request, z: Tensor | None
) -> dict[str, Tensor]:
    """Statistics of the heads of the call, and z of every head."""
    from headlab.kernels.fused.launch import launch

    chosen = tuple(range(call.q.shape[1])) if request.heads is None else request.heads
    found = launch(call, names, request, z) if names or call.every else {}
    others = tuple(h for h in range(call.q.shape[1]) if not (names and h in chosen))
    if z is not None and not call.every and others:
        launch(replace(call, heads=head_index(others, call.q.device)), set(), request, z)
    return found


def _second_pass(call: Call, lse: Tensor, request: Request) -> dict[str, Tensor]:
    from headlab.kernels.fused.columns import column_statistics
    from headlab.kernels.fused.rows import row_statistics

    found: dict[str, Tensor] = {}
    asked = set(request.statistics)
    if asked & COLUMN_STATISTICS:
        names = tuple(asked & COLUMN_STATISTICS)
        found |= column_statistics(call, lse, replace(request, statistics=names))
    if asked - COLUMN_STATISTICS:
        names = tuple(asked - COLUMN_STATISTICS)
        found |= row_statistics(call, lse, replace(request, statistics=names))
    return found
