"""Causal effects of heads: ablation, patching, paths, attribution and circuits."""
