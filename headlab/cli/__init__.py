"""The command line; nothing heavy is imported before a command runs."""

from headlab.cli.app import main

__all__ = ["main"]
