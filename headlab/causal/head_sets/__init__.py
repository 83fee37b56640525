"""What heads give together: Shapley values and pruning."""
