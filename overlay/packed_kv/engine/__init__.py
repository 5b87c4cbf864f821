"""The seams to vLLM: registration, backends, capacity, metrics. The top floor of the package."""
