"""Entry point `vllm.general_plugins`: tells vLLM about the KV-cache dtypes. vLLM calls it in every process."""

from __future__ import annotations


def register() -> None:
    """Register every dtype of `FORMATS`, with its attention backend. Does nothing but log if vLLM is not patched."""
    from .engine.registration import register_formats

    register_formats()
