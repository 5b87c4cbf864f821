"""`packed-kv plan`: what a model's KV cache holds and costs, from its config.json. Imports neither torch nor vLLM."""
