"""Opening models, and reading what their weights say about each head."""
