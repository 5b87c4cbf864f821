"""Pages that leave an engine: the fingerprint in their keys, and tiers on disk."""
