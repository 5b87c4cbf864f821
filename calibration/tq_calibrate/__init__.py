"""The `tq-calibrate` command: chooses which channels of a model's keys and values are stored with more bits.

Imports packed_kv, never the reverse; vLLM only in `vllm_engine` and `vllm_worker`, where that engine was asked for.
`docs/lab/calibration.md` says how the channels are chosen and why.
"""
