"""Codes that no dtype has for V: of 5 bits, and the null code, each on every route."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import null_code
import pytest
import torch
from launchers import gather, store_tokens
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS, Format
from packed_kv.reference.attention import AttentionOptions, attend
from test_decode import BOUND, attention, relative_rms, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

FIVE = Format("five", rotation="givens", bits=5)
FIVE_AND_THREE = Format("five_and_three", rotation="hadamard", bits=3, outlier_bits=5)
"""Groups of both widths share a sign word."""


@pytest.fixture(autouse=True)
def other_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for fmt in (FIVE, FIVE_AND_THREE):
        monkeypatch.setitem(FORMATS, fmt.name, fmt)
    null_code.register(monkeypatch)
    forget_compiled()
    yield
    forget_compiled()


def forget_compiled() -> None:
    """Let kernels be compiled again: Triton 3.8 refuses one whose constants have changed since it was compiled."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("packed_kv.kernels.triton.") else ():
            if hasattr(value, "used_global_vals"):  # of Triton's compiler; its interpreter has others
                value.hash, value.used_global_vals = None, {}
            if hasattr(value, "device_caches"):
                value.device_caches.clear()


CASES = pytest.mark.parametrize(
    ("name", "head_dim"), [("five", 64), ("five", 96), ("five_and_three", 128), ("null", 64), ("null", 96)]
)


def stored(name: str, head_dim: int) -> tuple[PagedCodec, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A codec, the slots of 41 tokens, their K and V in bf16, and pages of poison that the codec has written."""
    generator = torch.Generator().manual_seed(head_dim)
    codec = PagedCodec(FORMATS[name], head_dim, device=DEVICE)
    slots = torch.randperm(96, generator=generator)[:41].to(DEVICE)
    key, value = torch.randn(2, 41, 2, head_dim, generator=generator).to(DEVICE, torch.bfloat16)
    cache = torch.full((3, 2, 32, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    codec.write(cache, slots, key, value)
    return codec, slots, key, value, cache


@CASES
def test_pages_read_back(name: str, head_dim: int) -> None:
    codec, slots, key, value, cache = stored(name, head_dim)
    read = codec.read(cache, torch.arange(6, device=DEVICE))
    for part, x, y in zip(codec.codecs, (key, value), read, strict=True):
        ours = part.restore(y.transpose(0, 1)[slots])
        if name == "null":
            assert torch.equal(ours, x.float())
        else:
            assert torch.equal(ours, part.decode(part.encode(x)))
            assert relative_rms(ours, x.float()) < (0.079 if name == "five" else 0.2)  # 4 bits: 0.079


@CASES
def test_the_store_kernel_writes_the_codecs_bytes(name: str, head_dim: int) -> None:
    codec, slots, key, value, expected = stored(name, head_dim)
    cache = torch.full_like(expected, 0xFF)
    store_tokens(codec, cache, slots, key, value)
    assert torch.equal(cache, expected)


@CASES
def test_gathered_tokens_equal_the_pages(name: str, head_dim: int) -> None:
    codec, slots, raw_key, _, cache = stored(name, head_dim)
    key, value = torch.full((2, 96, 2, head_dim), float("nan"), dtype=torch.float16, device=DEVICE)
    micro_blocks = torch.arange(6, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(0, 97, 16, dtype=torch.int32, device=DEVICE)
    gather(codec.layout, cache, micro_blocks, rows, key, value)
    for ours, expected in zip((key, value), codec.read(cache, micro_blocks), strict=True):
        assert torch.equal(ours[slots], expected.transpose(0, 1)[slots].half())
    if name == "null":
        assert torch.equal(key[slots].float(), raw_key.float())


@pytest.mark.parametrize(("name", "head_dim"), [("five", 96), ("five_and_three", 128)])
def test_the_decode_kernel_reads_five_bits(name: str, head_dim: int) -> None:
    assert relative_rms(*run(name, head_dim=head_dim, kv_heads=1, seq_lens=(1, 50))) < BOUND


def dense(head_dim: int) -> tuple[PagedCodec, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of null codes of a request of 41 tokens, its block table, queries of its last 3, and dense attention."""
    generator = torch.Generator().manual_seed(1)
    codec = PagedCodec(FORMATS["null"], head_dim, device=DEVICE)
    query = torch.randn(3, 4, head_dim, generator=generator).to(DEVICE, torch.bfloat16)
    key, value = torch.randn(2, 41, 2, head_dim, generator=generator).to(DEVICE, torch.bfloat16)
    table = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    ids = torch.arange(41, device=DEVICE)
    cache = torch.full((3, 2, 32, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    codec.write(cache, table[ids // 32].long() * 32 + ids % 32, key, value)
    expected, _ = attention(query.double(), key.double(), value.double(), head_dim**-0.5, None, None)
    return codec, cache, table, query, expected


def test_attention_in_pytorch_over_null_codes_is_dense() -> None:
    codec, cache, table, query, expected = dense(64)
    output, _ = attend(codec, cache, table, 41, query, AttentionOptions(64**-0.5))
    assert relative_rms(output.double(), expected) < 1e-5


def test_the_decode_kernel_over_null_codes_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` compares with attention over what its codec decodes: here the K and V that were given.

    The poison of tokens that are not there is finite, as their scales of 0 do not hide NaN, which no other code has."""
    monkeypatch.setattr("packed_kv.codecs.codec.Codec.encode", lambda self, x, positions=None: x)
    monkeypatch.setattr("packed_kv.codecs.codec.Codec.decode", lambda self, x, positions=None: x.float())
    assert relative_rms(*run("null", head_dim=64, query_lens=(1, 2, 2), dtype=torch.bfloat16, poison=0x77)) < 2**-8
