"""What leaves an engine: the fingerprint in the keys of pages, and tiers on disk."""
