"""What a model is, read from its config.json: layers, shapes of caches, RoPE. No torch."""
