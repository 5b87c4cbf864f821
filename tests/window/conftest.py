"""Without a recent window, as in vLLM 0.28, there is nothing to test here."""

from packed_kv.vllm_compat import no_scratch_groups

collect_ignore_glob = ["test_*.py"] if no_scratch_groups() else []
