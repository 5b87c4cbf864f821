"""Prompts in lockstep through the engine: each gets its own rows, and what is measured leaves no trace."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
import torch
from harness import engine, mean_kl, teacher_forced_logits
from packed_kv_quality import lockstep
from packed_kv_quality.engines import CHECKOUT
from packed_kv_quality.recall_map import RecallSettings, recall_map
from packed_kv_quality.teacher_forced import fp8_storage, logits, rounded_attention

LENGTHS = (60, 60, 63)
"""The third is longer, as prompts with answers of several lengths are."""


@pytest.fixture(scope="module")
def llm(demo_model: str):
    with engine(demo_model, "auto", enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(llm) -> list[list[int]]:
    ids = llm.get_tokenizer().encode((CHECKOUT / "LICENSE").read_text())
    return [ids[100 * index : 100 * index + length] for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("widths", [repeat(1), repeat(16), chain([32, 20], repeat(1))], ids=["decode", "16", "mixed"])
def test_together_as_alone(widths, llm, prompts) -> None:
    """But for rounding: matrices of other shapes add up in another order."""
    found = lockstep.run(llm, prompts, widths)
    assert [len(hidden) for hidden in found] == list(LENGTHS)
    for prompt, hidden in zip(prompts, found, strict=True):
        alone = teacher_forced_logits(llm, prompt, 16)
        assert mean_kl(alone, logits(llm, hidden)) < 0.002
    assert mean_kl(logits(llm, found[0]), logits(llm, found[1])) > 1


def test_what_is_measured_leaves_no_trace(llm, prompts) -> None:
    before = teacher_forced_logits(llm, prompts[0], 16)
    costs = []
    for within in (rounded_attention, fp8_storage):
        with within(llm):
            costs.append(mean_kl(before, teacher_forced_logits(llm, prompts[0], 16)))
    assert torch.equal(teacher_forced_logits(llm, prompts[0], 16), before)
    rounding, storage = costs
    print(f"KL of rounding {rounding:.5f}, of fp8's storage {storage:.5f}")
    assert 0 < 3 * rounding < storage < 0.05


def test_recall(llm) -> None:
    """The demo model recalls all facts of short prompts, and none if it is not shown them."""
    settings = RecallSettings([200], [0.0, 1.0], facts=2, chat=False, chunk=64, seed=0)
    cells = recall_map(llm, settings)
    assert [(cell.depth, cell.recalled) for cell in cells] == [(0.0, 2), (1.0, 2)]
    assert all(-1 < cell.log_prob < 0 for cell in cells)


def test_too_little_memory(llm) -> None:
    with pytest.raises(RuntimeError, match="less than one prompt of 1,000,000"):
        lockstep.at_once(llm, 1_000_000, 1, 8)
    assert lockstep.at_once(llm, 100, 64, 8) == 8
