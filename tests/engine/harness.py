"""What engine tests share with the quality harness: the engine in this process, and teacher forcing through it."""

from __future__ import annotations

from packed_kv_quality.engines import KV_CACHE_BYTES, engine, kv_tokens, model_of, scheduler
from packed_kv_quality.teacher_forced import mean_kl, teacher_forced_logits

__all__ = ["KV_CACHE_BYTES", "engine", "kv_tokens", "mean_kl", "model_of", "scheduler", "teacher_forced_logits"]
