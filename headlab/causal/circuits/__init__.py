"""Circuits: sets of heads or edges, how faithful they are, and how they change."""
