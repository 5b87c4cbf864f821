"""The `packed-kv-quality` command: what KV-cache dtypes cost in quality, measured through the real vLLM engine.

Imports packed_kv, never the reverse. `docs/quality.md` says how to read what it finds.
"""
