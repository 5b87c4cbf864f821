#!/usr/bin/env python3
"""Search for magnitudes that a kernel can compute from code bits without a table, and measure their error.

    python experiments/table_free_codes.py [--groups N] [--seed N]          half a minute on a CPU

A mask takes sign and code bits out of a word, and one bit pattern (`base`) is added: the result is an fp16. Positions
are those of the code bits in it; 15 is the sign's. The search tries all of

    mask        base below 2.0 in steps of 2^7, code bits at any positions from 7 to 13
    x|x| - x    the same for x, and one fused multiply-add of fp16 behind it, which keeps x's sign; base from 1.0 to 8.0
                in steps of 2^4, code bits at two given positions

The error is the relative MSE of groups of 32 Gaussian values, each group with the best of all scales (e5m3), over that
of format version 1's magnitudes with the same bits on the same groups. Groups have a standard deviation of 2^u, u
uniform in [0, 1), so no set gains by where its scales lie; sets are therefore taken over their largest magnitude. All
sets are measured on the first SIFTED groups, the FINALISTS best of them on all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from packed_kv.codecs.scalar import decode_scale
from packed_kv.formats import CODES, GROUP_SIZE, MAX_SCALE_BYTE

VERSION_1 = {3: (4, 13, 24, 40), 2: (9, 32)}
SIFTED, FINALISTS = 500, 12
SCALE_RANGE = 0.7, 8.0
"""Scales that are tried, as the largest magnitude they give: from 0.7 of the least standard deviation to 4 of the
largest."""


@dataclass(frozen=True)
class Code:
    """Magnitudes, ascending, the largest 1; places of the code bits, and the base as fp16 bits."""

    levels: tuple[float, ...]
    places: tuple[int, ...]
    base: int


def gaussian_groups(count: int, seed: int) -> torch.Tensor:
    """|x| as fp32 [count, 32]."""
    generator = torch.Generator().manual_seed(seed)
    deviation = torch.rand(count, 1, generator=generator).exp2()
    return deviation * torch.randn(count, GROUP_SIZE, generator=generator).abs()


def relative_mse(x: torch.Tensor, levels: Sequence[float]) -> float:
    """|x - x'|^2 / |x|^2, each the sum of all. `x`: |x| as fp32 [groups, 32]; `levels`: ascending."""
    scales = decode_scale(torch.arange(MAX_SCALE_BYTE + 1, dtype=torch.int16))
    least = torch.full((len(x),), float("inf"))
    for scale in scales[(scales > SCALE_RANGE[0]) & (scales < SCALE_RANGE[1])].tolist():
        nearest = (x - scale * levels[0] / levels[-1]).abs()
        for level in levels[1:]:
            nearest = torch.minimum(nearest, (x - scale * level / levels[-1]).abs())
        least = torch.minimum(least, nearest.square().sum(-1))
    return float(least.sum() / x.square().sum())


def codes(places: tuple[int, ...], bases: range, product_behind: bool) -> Iterator[Code]:
    """Those with code bits at these places whose magnitudes are above 0 and differ; of equal ones the lowest base."""
    seen = set()
    for base in bases:
        choices = product((0, 1), repeat=len(places))
        bits = [base | sum(bit << place for bit, place in zip(choice, places, strict=True)) for choice in choices]
        x = torch.tensor(bits, dtype=torch.int16).view(torch.float16).double()  # the product is exact in fp64
        values = sorted((x * x.abs() - x).half().tolist() if product_behind else x.tolist())
        levels = tuple(value / values[-1] for value in values) if values[0] > 0 else ()
        if len(set(levels)) == 1 << len(places) and levels not in seen:
            seen.add(levels)
            yield Code(levels, places, base)


def of_a_mask(code_bits: int) -> Iterator[Code]:
    for places in combinations(range(7, 14), code_bits):
        yield from codes(places, range(0, 1 << 14, 1 << 7), False)


def of_a_product(places: tuple[int, int]) -> Iterator[Code]:
    return codes(places, range(0x3C00, 0x4800, 1 << 4), True)


def best(found: Iterator[Code], x: torch.Tensor) -> Code:
    """The code of least error on `x`, [groups, 32]."""
    sifted = sorted(found, key=lambda code: relative_mse(x[:SIFTED], code.levels))
    return min(sifted[:FINALISTS], key=lambda code: relative_mse(x, code.levels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32000, help="of 32 values (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    x = gaussian_groups(options.groups, options.seed)
    print(f"{options.groups} groups, seed {options.seed}, PyTorch {torch.__version__}\n")
    print("| bits | made by | places | base | magnitudes over the largest | error over version 1's |")
    print("|---|---|---|---|---|---|")

    def row(bits: int, what: str, levels: Sequence[float], places: str = "", base: str = "") -> None:
        ratio = relative_mse(x, levels) / relative_mse(x, VERSION_1[bits])
        shown = " : ".join(f"{level / levels[-1]:.4g}" for level in levels)
        print(f"| {bits} | {what} | {places} | {base} | {shown} | {ratio:.3f} |", flush=True)

    for bits in (3, 2):
        row(bits, "version 2", CODES[bits].magnitudes)
    row(2, "equal steps", (1, 3))
    searches = [(3, "mask", of_a_mask(2)), (2, "mask", of_a_mask(1))]
    searches += [(2, "mask", (code for code in of_a_mask(1) if code.places == (11,)))]
    searches += [(3, "x\\|x\\| - x", of_a_product(places)) for places in ((8, 9), (7, 8))]
    for bits, what, found in searches:
        code = best(found, x)
        row(bits, what, code.levels, ", ".join(map(str, code.places)), f"{code.base:#06x}")


if __name__ == "__main__":
    main()
