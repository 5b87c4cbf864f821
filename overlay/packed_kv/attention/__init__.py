"""Attention over packed pages: one file a route, and `impl.py`, which chooses."""
