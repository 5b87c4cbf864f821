"""`packed-kv selftest` in the process that loads vLLM: attention of layers, without a model, against the reference."""
