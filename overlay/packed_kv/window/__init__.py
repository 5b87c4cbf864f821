"""The recent window: a ring buffer of 8-bit tokens per request, its cache group in vLLM, and its step."""
