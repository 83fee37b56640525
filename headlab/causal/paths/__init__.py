"""Exact runs of single paths and edges."""
