"""Layers for the tests of the CPU's kernels: codecs with and without calibration, poisoned pages, tokens to store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu.compiler import TARGETS, Target, is_usable
from packed_kv.layout import ring_slot_bytes
from packed_kv.model.rope import Rope
from page_codecs import page_codec

HERE = [target for target in TARGETS if is_usable(target)]
"""Kinds of processors whose code runs on this one."""
SHAPES = ((80, 48), (64, 64), (128, 128), (192, 128), (256, 256))
"""Channels of K and V."""


def cases() -> list[Any]:
    """Formats, shapes and targets to compile for. Each format, and each shape, for the best target; for others what has
    all widths and rotations."""
    best, *others = targets()
    found = [(name, SHAPES[0], best) for name in FORMATS] + [("turboquant35", shape, best) for shape in SHAPES[1:]]
    found += [(name, shape, best) for name in ("tq4", "turboquant25") for shape in SHAPES[2:4]]
    rare = zip(("turboquant35", "turboquant25", "isoquant4", "planarquant4"), (SHAPES[3], *SHAPES[:3]), strict=True)
    found += [(*case, target) for case in rare for target in others]
    return [pytest.param(*case, id=f"{case[0]}-{case[1][0]}-{case[2].name}") for case in found]


def targets() -> list[Target]:
    """One of each length of vectors that runs here."""
    return list({target.name.partition("_")[0]: target for target in HERE}.values())


def codec_of(name: str, head_dim: int, value_dim: int, heads: int, *, calibrated: bool) -> PagedCodec:
    """A layer's codec; calibrated: means by blocks of positions, scales and channel orders by head, all drawn."""
    fmt = FORMATS[name]
    if not calibrated:
        return PagedCodec(fmt, head_dim, value_dim=value_dim)
    random = torch.Generator().manual_seed(3)
    orders: dict[str, Any] = {}
    for role, dim in (("key", head_dim), ("value", value_dim)):
        shuffled = torch.stack([torch.randperm(dim, generator=random) for _ in range(heads)])
        if count := fmt.outlier_channels(head_dim):
            orders[f"{role}_outlier_channels"] = shuffled[:, :count].sort(-1).values
        else:
            orders[f"{role}_channel_order"] = shuffled
    return page_codec(
        fmt, head_dim, value_dim=value_dim, positions=2048, **orders,
        key_mean=torch.randn(heads, head_dim, generator=random),
        key_first_mean=torch.randn(heads, head_dim, generator=random),
        key_scale=torch.randn(heads, head_dim, generator=random).exp(),
        value_scale=torch.randn(heads, value_dim, generator=random).exp(),
        key_rope=Rope(tuple(10000.0 ** (-i / (head_dim // 2)) for i in range(head_dim // 2))),
    )  # fmt: skip


def pages(name: str, blocks: int, heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """Pages of random bytes, heads and blocks further apart than their bytes."""
    random = torch.Generator().manual_seed(1)
    shape = (blocks, heads, block_size, FORMATS[name].slot_bytes(head_dim))
    return torch.randint(0, 256, (blocks, 2, *shape[1:]), dtype=torch.uint8, generator=random)[:, 1]


def ring(blocks: int, heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """A ring of 0xFF."""
    return torch.full((blocks, heads, block_size, ring_slot_bytes(head_dim)), 255, dtype=torch.uint8)


def vectors(tokens: int, heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """K and V as a step has them: views of one tensor. With NaN, infinities, -0, vectors of zeros and large numbers."""
    random = torch.Generator().manual_seed(2)
    both = torch.randn(tokens, heads, head_dim + value_dim, generator=random)
    both[:, :, :3] *= 8
    flat = both.view(-1)
    for place, number in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 40000.0, -60000.0, 1e-7, 3e-5)):
        flat[place * 101 % len(flat)] = number
    both[tokens // 2] = 0
    both[tokens // 3, 0] *= 1e-6
    return [part.to(dtype) for part in both.to(dtype).split([head_dim, value_dim], dim=-1)]
