"""Latent attention (MLA) over packed pages: vLLM's own prefill, and decodes that read latents as stored."""
