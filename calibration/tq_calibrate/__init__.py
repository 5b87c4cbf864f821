"""The `tq-calibrate` command: chooses which channels of a model's keys and values are stored with more bits.

Imports packed_kv, never the reverse, and no vLLM. `docs/calibration.md` says how the channels are chosen and why.
"""
