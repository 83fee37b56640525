"""What weights say, held against what heads do on prompts: these methods run the model."""
