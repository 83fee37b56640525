"""Lookback ratios."""
