"""headlab: find out what each attention head of a language model does, and how we know."""

__version__ = "0.1.0"
