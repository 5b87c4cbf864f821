"""GPUs that the plan knows, and what depends on their compute capability."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packed_kv.model.shape import parse
from packed_kv.planning import cards
from packed_kv.planning.plan import decodes
from packed_kv.refusals.table import refusals_of_model
from shape_8b import SHAPE_8B
from test_sparse_plan import V32

ASKED = ("3090", "4090", "5090", "A10", "L4", "L40S", "RTX PRO 6000", "GB10", "H20", "H100", "H200", "B200", "B300")


@pytest.mark.parametrize("name", ASKED)
def test_cards_are_known(name: str) -> None:
    card = cards.find(name)
    assert card.memory > 20 << 30 and card.bandwidth > 0.2e12 and card.capability >= (8, 0)
    assert cards.find(name.lower().replace(" ", "-")) == card


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIE"), ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"), ("NVIDIA GB10", "GB10"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"), ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100X", None),
        ("NVIDIA GeForce RTX 5090 D", None), ("NVIDIA GeForce RTX 3090 Ti", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_a_drivers_name_is_a_card_of_the_table(device: str, name: str | None) -> None:
    assert cards.of_device(device) == (cards.CARDS[name] if name else None)


def test_what_depends_on_hopper_asks_the_capability() -> None:
    shape = parse(SHAPE_8B, "8B")
    for card in cards.CARDS.values():
        kernel = "CUDA" if card.capability == (9, 0) else "Triton"
        assert f"the {kernel} kernel takes steps" in decodes(shape, card), card.name
        assert decodes(shape, replace(card, name="another")) == decodes(shape, card)


def test_a_card_that_cannot_serve_a_model_is_told_so(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not refusals_of_model(V32, capability=cards.find("H20").capability)
    (refused,) = refusals_of_model(V32, capability=cards.find("A100").capability)
    assert "compute capability 8.0, and vLLM's FlashMLA needs 9.0 or 10.x" in refused.sentence()
