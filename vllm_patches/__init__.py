"""The patches that packed-kv needs in vLLM, one series per pinned version, and the tool that applies them."""
