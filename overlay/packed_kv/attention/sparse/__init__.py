"""Sparse attention over latents: each query token reads the tokens that vLLM's indexer picked for it."""
