"""A model as its config.json describes it: layers, shapes of caches, RoPE. No torch."""
