"""``python -m headlab``: the command line."""

from headlab.cli import main

main()
