"""Lookback ratios: how much of their attention heads give back to the context, and what that tells of a response.

    lens = hl.lookback.fit(model, examples)
    lens.score(model, "…prompt…", " its response")

:func:`ratios` are features of every head and token, :func:`fit` learns from labelled responses which heads tell what
the context bears out, and :func:`generate` lets such a lens choose among continuations.
"""

from headlab.lookback.detector import Calibration, Calibrator, Linear, Scaling, Split
from headlab.lookback.examples import LOOKBACK_SCHEMA, Example, check_examples, read_examples
from headlab.lookback.fitting import check_settings, fit
from headlab.lookback.guided import Guided, generate
from headlab.lookback.lens import Lens, Scored
from headlab.lookback.ratios import ratios
from headlab.lookback.transfer import transfer

__all__ = [
    "LOOKBACK_SCHEMA",
    "Calibration",
    "Calibrator",
    "Example",
    "Guided",
    "Lens",
    "Linear",
    "Scaling",
    "Scored",
    "Split",
    "check_examples",
    "check_settings",
    "fit",
    "generate",
    "ratios",
    "read_examples",
    "transfer",
]
