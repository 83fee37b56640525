"""headlab: find out what each attention head of a language model does, and how we know.

    import headlab as hl

    model = hl.load("smollm2-135m")
    trace = model.trace("The capital of France is", keep=[hl.keep.rows(queries=[-1])])
    scores = hl.score(model, roles=["induction", "sink"])

Everything public is reachable from here; what a name needs is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from headlab import errors

if TYPE_CHECKING:
    from headlab import causal, lookback, parameters, planted, plots, roles, steering, tasks
    from headlab.attention import (
        Edit,
        Head,
        Trace,
        ablate,
        add,
        apply,
        keep,
        parse_heads,
        patch,
        replace,
        scale,
    )
    from headlab.causal import metrics
    from headlab.model import Generation, Model, load
    from headlab.report import HeadCard, Report, report
    from headlab.report.head_card import head_card
    from headlab.roles import Scores, score
    from headlab.steering import steer

__version__ = "0.1.0"

#: Where each public name lives; a module that is itself public stands for itself.
_HOMES = {
    "Edit": "headlab.attention",
    "Generation": "headlab.model",
    "Head": "headlab.attention",
    "HeadCard": "headlab.report",
    "Model": "headlab.model",
    "Report": "headlab.report",
    "Scores": "headlab.roles",
    "Trace": "headlab.attention",
    "ablate": "headlab.attention",
    "add": "headlab.attention",
    "apply": "headlab.attention",
    "causal": "",
    "head_card": "headlab.report",
    "keep": "headlab.attention",
    "load": "headlab.model",
    "lookback": "",
    "metrics": "headlab.causal",
    "parse_heads": "headlab.attention",
    "patch": "headlab.attention",
    "parameters": "",
    "planted": "",
    "plots": "",
    "replace": "headlab.attention",
    "report": "",
    "roles": "",
    "scale": "headlab.attention",
    "score": "headlab.roles",
    "steer": "headlab.steering",
    "steering": "",
    "tasks": "",
}

__all__ = [*_HOMES, "errors"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'headlab' has no attribute {name!r}")
    home = _HOMES[name]
    found = getattr(import_module(home), name) if home else import_module(f"headlab.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
