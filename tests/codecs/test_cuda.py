"""CPU and GPU give the same bytes. Runs where a GPU is; CI has none (scripts/gpu_site.sh says how to get there)."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS, get_codec
from packed_kv.reference.attention import AttentionOptions, attend
from page_codecs import page_codec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_same_bytes_and_values(name: str, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, head_dim, generator=generator) * torch.logspace(-6, 5, 20_000)[:, None]
    x[::7] = x[::7].bfloat16().float()  # values of few bits, where ties happen
    x[1], x[2, 3], x[4, 5] = 0.0, float("nan"), float("inf")
    on_cpu, on_gpu = get_codec(name, head_dim), get_codec(name, head_dim, device="cuda")
    packed = on_gpu.encode(x.cuda())
    assert torch.equal(packed.cpu(), on_cpu.encode(x))
    assert torch.equal(on_gpu.decode(packed).cpu(), on_cpu.decode(packed.cpu()))


@pytest.mark.parametrize("centred", [False, True], ids=["plain", "centred"])
@pytest.mark.parametrize("name", FORMATS)
def test_same_pages_and_attention(name: str, centred: bool) -> None:
    tokens, heads, head_dim, block_size = 3000, 2, 128, 32
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, tokens, heads, head_dim, generator=generator)
    query = torch.randn(100, 4 * heads, head_dim, generator=generator)
    table = torch.randperm(tokens // block_size + 1, generator=generator)
    positions = torch.arange(tokens)
    slots = table[positions // block_size] * block_size + positions % block_size
    transforms = {}
    if centred:
        mean, first_mean, scale, value_scale = torch.randn(4, heads, head_dim, generator=generator)
        transforms = dict(
            key_mean=mean, key_first_mean=first_mean, key_scale=scale.exp2(), value_scale=value_scale.exp2()
        )
    outputs, pages = [], []
    for device in ("cpu", "cuda"):
        codec = page_codec(FORMATS[name], head_dim, device=device, **transforms)
        cache = torch.full((len(table), heads, block_size, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=device)
        codec.write(cache, slots.to(device), key.to(device), value.to(device), positions.to(device))
        options = AttentionOptions(scale=head_dim**-0.5, sliding_window=1500, logits_soft_cap=30.0)
        outputs.append(attend(codec, cache, table.to(device), tokens, query.to(device), options)[0].cpu())
        pages.append(cache.cpu())
    assert torch.equal(*pages)
    assert (outputs[0] - outputs[1]).norm() < 1e-5 * outputs[0].norm()
