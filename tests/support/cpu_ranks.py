"""The table of refusals without its row on context parallelism on a CPU, where `dealt_out` supplies what vLLM lacks."""

from __future__ import annotations

from packed_kv.refusals import table as refusals


def rules() -> tuple[refusals.Rule, ...]:
    kept = tuple(rule for rule in refusals.RULES if "with vLLM's CPU platform" not in rule.subject)
    assert len(kept) == len(refusals.RULES) - 1, "one row refuses the CPU platform"
    return kept
