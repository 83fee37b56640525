"""What methods of steering are to bring about, on headlab's own probe data: one module per behaviour."""
