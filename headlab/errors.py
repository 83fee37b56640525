"""Errors a user can act on.

Every error headlab raises on purpose is a :class:`HeadlabError`. Its message is one sentence that names
the input, what is wrong with it and what would work; the command line prints that sentence and exits 2.
"""


class HeadlabError(Exception):
    """Base of every error headlab raises on purpose."""


class ModelError(HeadlabError):
    """A model cannot be found, read or loaded."""


class UnsupportedError(HeadlabError):
    """The model loads, but what was asked cannot be done for its architecture."""


class HeadError(HeadlabError):
    """A head or layer does not exist or cannot be parsed."""


class PromptError(HeadlabError):
    """A prompt is empty, too long for the model, or not something that can be tokenised."""


class PlanError(HeadlabError):
    """A capture plan, statistic or intervention is not valid."""


class OutputError(HeadlabError):
    """A result cannot be written or read back."""
