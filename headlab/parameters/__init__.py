"""What heads do, read from their weights."""
