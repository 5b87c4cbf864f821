"""The vLLM attention backend of the packed KV-cache dtypes."""
