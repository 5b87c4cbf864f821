"""GPUs by name: memory, bandwidth and compute capability.

Memory is what `nvidia-smi` reports, below what a datasheet calls GB: H200 in benchmarks/results/machine.txt, the others
of Hopper, Ampere and Ada as listed at https://thundergolfer.com/blog/nvidia-gpu-memory-capacity, H20, Blackwell
and GeForce from reports of `nvidia-smi`; GB10 shares its host's memory; the figure is what PyTorch reports. Bandwidth
is the peak of NVIDIA's datasheets, compute capability as at https://developer.nvidia.com/cuda-gpus. SMs, boost clocks
and rates of tensor cores are from NVIDIA's datasheets and white papers; only docs/lab/cards.md is made from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..model.config_fields import BadInput

MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """`memory` in bytes; `bandwidth` in bytes a second, 0: not known; `capability`: compute capability, None: not
    known.

    `sms`, `clock` (Hz), `products`: SMs, their boost clock, and fp16 multiplications per cycle of an SM's tensor cores,
    with fp32 sums; 0: not needed so far.
    """

    name: str
    memory: int
    bandwidth: float
    capability: tuple[int, int] | None = None
    sms: int = 0
    clock: float = 0
    products: int = 0

    @property
    def served_at_once(self) -> int:
        """Requests that vLLM serves at once by default: its `--max-num-seqs` (`EngineArgs`, vLLM 0.31 to 0.33)."""
        return 1024 if self.memory >= 70 << 30 and not self.name.startswith("A100") else 256

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes that memory delivers per SM and cycle, at the peak of both; `sms` and `clock` must be known."""
        return self.bandwidth / self.sms / self.clock


SMS = {
    "H200": (132, 1.98e9, 2048), "H100": (132, 1.98e9, 2048), "A100-80GB": (108, 1.41e9, 1024),
    "A100-40GB": (108, 1.41e9, 1024), "A10": (72, 1.695e9, 512), "RTX-3090": (82, 1.695e9, 256),
    "L4": (58, 2.04e9, 512), "L40S": (142, 2.52e9, 512), "RTX-4090": (128, 2.52e9, 256),
}  # fmt: skip
"""Card -> `sms`, `clock` and `products`. GeForce cards sum in fp32 at half the rate of the same chip's other cards."""

CARDS = {
    name: Card(name, mib * MIB, bandwidth * 1e12, capability, *SMS.get(name, ()))
    for name, mib, bandwidth, capability in (
        ("B300", 275040, 8.0, (10, 3)),
        ("B200", 183359, 8.0, (10, 0)),
        ("H200", 143771, 4.8, (9, 0)),
        ("H100", 81559, 3.35, (9, 0)),  # SXM
        ("H100-PCIE", 81559, 2.0, (9, 0)),
        ("H20", 97871, 4.0, (9, 0)),
        ("A100-80GB", 81920, 2.039, (8, 0)),  # SXM
        ("A100-40GB", 40960, 1.555, (8, 0)),
        ("L40S", 46068, 0.864, (8, 9)),
        ("A10", 23028, 0.6, (8, 6)),
        ("L4", 23034, 0.3, (8, 9)),
        ("RTX-PRO-6000", 97887, 1.792, (12, 0)),  # Workstation Edition
        ("RTX-5090", 32607, 1.792, (12, 0)),
        ("RTX-4090", 24564, 1.008, (8, 9)),
        ("RTX-3090", 24576, 0.936, (8, 6)),
        ("GB10", 124610, 0.273, (12, 1)),
    )
}


OTHER_FORMS = {"MIG", "LAPTOP", "NVL", "D", "SUPER", "TI", "MAX"}
"""Words in a driver's card name that mean another card than the table's."""
ALIASES = {
    "A100": "A100-80GB", "H100-80GB": "H100", "H100-SXM": "H100", "3090": "RTX-3090", "4090": "RTX-4090",
    "5090": "RTX-5090", "PRO-6000": "RTX-PRO-6000", "DGX-Spark": "GB10",
}  # fmt: skip


def find(name: str) -> Card:
    """A card by its name, ignoring case, blanks and dashes. Raises BadInput."""
    names = {_letters(known): known for known in CARDS} | {_letters(alias): known for alias, known in ALIASES.items()}
    wanted = names.get(_letters(name))
    if wanted is None:
        raise BadInput(
            f"--gpu {name} is not known; known: {', '.join(CARDS)}; or give --gpu-memory SIZE and --bandwidth TB/S"
        )
    return CARDS[wanted]


def of_device(name: str) -> Card | None:
    """Return the card that a driver calls `name`, such as "NVIDIA H100 80GB HBM3"; None: it is not in the table, or is
    a part or a variant of a card with another memory."""
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    if words & OTHER_FORMS:
        return None
    found = [card for card in CARDS.values() if set(card.name.upper().split("-")) <= words]
    return max(found, key=lambda card: len(card.name), default=None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.upper() if letter.isalnum())
