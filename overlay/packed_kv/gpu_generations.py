"""Generations of NVIDIA's GPUs: the resources of an SM, and which CUDA kernels compile for them. No torch.

Numbers are from the tables of compute capabilities of the CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
REGISTERS = 64 * KIB
"""32-bit registers of an SM, of every generation here."""
SCHEDULERS, LANES = 4, 32
"""Schedulers of an SM, which share its registers equally, and lanes of a warp."""
REGISTER_UNIT, SHARED_UNIT = 8, 128
"""Registers of a lane, and bytes of shared memory of a thread block, are given out in multiples of these."""
RESERVED = KIB
"""Bytes of shared memory that CUDA takes for each thread block."""


@dataclass(frozen=True)
class Generation:
    """GPUs of a compute capability, and of later ones up to the next generation's.

    `warps`, `blocks`: the most that an SM holds. `shared_bytes`: of an SM. `cuda_columns`: the most columns for which
    the CUDA decode kernel is compiled (0: not at all). `has_wgmma`: it has products of a warpgroup, which the CUDA
    kernels of latents and warps that only unpack need; Blackwell no longer has them. `is_seen`: whether such a GPU has
    run the CUDA kernels.
    """

    capability: tuple[int, int]
    warps: int
    blocks: int
    shared_bytes: int
    cuda_columns: int = 0
    has_wgmma: bool = False
    is_seen: bool = False

    @property
    def block_shared_bytes(self) -> int:
        """The most shared memory of a thread block."""
        return self.shared_bytes - RESERVED

    def resident_warps(self, registers: int) -> int:
        """Return how many warps of so many registers a lane fit the registers of an SM, and its table of warps."""
        of_lane = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
        return min(self.warps, REGISTERS // SCHEDULERS // LANES // of_lane * SCHEDULERS)

    def resident_blocks(self, registers: int, shared_bytes: int, warps: int = 1) -> int:
        """Return how many thread blocks an SM holds: the least of what its registers, shared memory and tables allow.

        registers: of a lane. shared_bytes: of a block, static and dynamic. warps: of a block.
        """
        of_block = -(-shared_bytes // SHARED_UNIT) * SHARED_UNIT + RESERVED
        return min(self.blocks, self.resident_warps(registers) // warps, self.shared_bytes // of_block)


GENERATIONS = (
    Generation((8, 0), warps=64, blocks=32, shared_bytes=164 * KIB),
    Generation((8, 6), warps=48, blocks=16, shared_bytes=100 * KIB),
    Generation((8, 7), warps=48, blocks=16, shared_bytes=164 * KIB),
    Generation((8, 9), warps=48, blocks=24, shared_bytes=100 * KIB),
    Generation((9, 0), 64, 32, 228 * KIB, cuda_columns=64, has_wgmma=True, is_seen=True),
    Generation((10, 0), 64, 32, 228 * KIB, cuda_columns=32),
    Generation((11, 0), 48, 24, 228 * KIB),
    Generation((12, 0), 48, 24, 100 * KIB, cuda_columns=32),
)
LEAST_CAPABILITY = GENERATIONS[0].capability
"""The oldest generation that packed pages run on."""


def generation_of(capability: tuple[int, int]) -> Generation:
    """Return the generation of a GPU; the first one's for older GPUs, on which no engine starts."""
    return next((made for made in reversed(GENERATIONS) if made.capability <= capability), GENERATIONS[0])
