"""The decode kernel with rotation and merge against attention over the decoded pages, in float64."""

from __future__ import annotations

import pytest
import torch
from implementations import attend_pages
from launchers import rotate_query
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.model.rope import Rope
from page_codecs import page_codec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 2e-3
"""Relative RMS error: fp16 rounding of query, weights and rotation matrices (2^-11 each) gives about 1e-3."""


def run(name, *, head_dim=128, value_dim=None, kv_heads=2, group=4, seq_lens=(1, 37, 100), query_lens=None,
        block_size=16, splits=3, window=None, soft_cap=None, sinks=None, dtype=torch.float16, size=1.0, kernel="triton",
        returns_lse=False, poison=0xFF, sharp=None, **transforms):  # fmt: skip
    """Kernel output and the reference in float64, [tokens, query heads, head_dim], on pages of poison; or of both the
    natural log-sum-exps of the scores, [tokens, query heads]. `sharp`: token and head of a query whose scores lie far
    apart, so that its softmax's maximum moves alone."""
    generator = torch.Generator().manual_seed(head_dim + len(seq_lens))
    query_lens = query_lens or (1,) * len(seq_lens)
    codec = page_codec(FORMATS[name], head_dim, device=DEVICE, value_dim=value_dim, **transforms)
    blocks_each = [-(-n // block_size) for n in seq_lens]
    cache = torch.full((sum(blocks_each) + 2, kv_heads, block_size, codec.slot_bytes), poison, dtype=torch.uint8)
    order = torch.randperm(len(cache), generator=generator).to(torch.int32)
    table = torch.full((len(seq_lens), max(blocks_each)), -1, dtype=torch.int32)
    cache, start = cache.to(DEVICE), torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=generator).to(DEVICE, dtype)
    if sharp is not None:
        query[sharp] *= 64
    of_output = (*query.shape[:2], value_dim or head_dim)
    expected = torch.zeros(of_output, dtype=torch.float64, device=DEVICE)
    expected_lse = torch.zeros(query.shape[:2], dtype=torch.float64, device=DEVICE)
    scale, used = head_dim**-0.5, 0
    if sinks is not None:  # from far below the sum of weights to far above it
        sinks = torch.linspace(-3, 9, kv_heads * group).to(DEVICE, sinks)
    for i, (seq_len, count) in enumerate(zip(seq_lens, query_lens, strict=True)):
        table[i, : blocks_each[i]] = order[used : used + blocks_each[i]]
        used += blocks_each[i]
        key, value = torch.randn(2, seq_len, kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
        value = sized(value[..., :value_dim], size)
        ids = torch.arange(seq_len)
        slots = table[i, ids // block_size].long() * block_size + ids % block_size
        codec.write(cache, slots.to(DEVICE), key, value, ids.to(DEVICE))
        places = ids.to(DEVICE)[:, None]
        key = codec.key.decode(codec.key.encode(key, places), places)
        value = codec.value.decode(codec.value.encode(value, places), places)
        rows = slice(int(start[i]), int(start[i]) + count)
        expected[rows], expected_lse[rows] = attention(
            query[rows].double(), key.double(), value.double(), scale, window, soft_cap, sinks
        )
    rotated = torch.empty(len(query), kv_heads, group, codec.key.stored_dim, dtype=torch.float16, device=DEVICE)
    means, value_means, bias = Means.of(codec.key.transform), Means.of(codec.value.transform), None
    if means is not None:
        columns = 1 + means.blocks + (value_means is not None)
        bias = torch.full((len(query), kv_heads * group, columns), float("nan"), device=DEVICE)
    new = [torch.arange(n - count, n) for n, count in zip(seq_lens, query_lens, strict=True)]
    positions = torch.cat(new).to(DEVICE)
    rotate_query(query, rotation_matrix(codec.key, kv_heads), rotated, scale, means, positions, bias)
    output = torch.full(of_output, float("nan"), dtype=dtype, device=DEVICE)
    lse = torch.full(query.shape[:2], float("nan"), device=DEVICE) if returns_lse else None
    attend_pages(
        kernel, codec.layout, rotated, cache, table.to(DEVICE), start.to(DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE), rotation_matrix(codec.value, kv_heads, inverse=True),
        output, splits, max_query_len=max(query_lens), query_bias=bias, sliding_window=window, logits_soft_cap=soft_cap,
        sinks=sinks, lse=lse, tiles_a_block=codec.key.transform.block_tokens // 32, value_means=value_means,
    )  # fmt: skip
    if lse is not None:
        assert relative_rms(output.double(), expected) < BOUND
        return lse.double(), expected_lse
    return output.double(), expected


def sized(value, size):
    """V times a number, or 16 tokens each times one of several, in turn."""
    if not isinstance(size, tuple):
        return value * size
    sizes = torch.tensor(size).repeat_interleave(16).repeat(len(value) // 16 // len(size) + 1)[: len(value)]
    return value * sizes.to(value)[:, None, None]


def attention(query, key, value, scale, window, soft_cap, sinks=None):
    """Causal attention of the last tokens, float64 [tokens, heads, d] over [keys, KV heads, d], and its
    scores' log-sum-exps [tokens, heads]."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    last = torch.arange(len(key) - len(query), len(key), device=key.device)[:, None]
    distance = last - torch.arange(len(key), device=key.device)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(key))), float("-inf"))
    if sinks is not None:  # of each head one more key, whose value is 0
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(scores[..., :1].shape)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value), scores.logsumexp(-1).T


def relative_rms(output, expected):
    return ((output - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    assert relative_rms(*run(name)) < BOUND


@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 256])
@pytest.mark.parametrize("name", ["isoquant4", "isoquant3", "turboquant25", "turboquant35"])
def test_head_dims(name, head_dim):
    assert relative_rms(*run(name, head_dim=head_dim, kv_heads=1, seq_lens=(1, 50))) < BOUND


@pytest.mark.parametrize(
    "options",
    [
        {"group": 1, "kv_heads": 3},
        {"group": 8, "kv_heads": 1},
        {"group": 16, "kv_heads": 1},
        {"group": 64, "kv_heads": 1, "seq_lens": (1, 70), "sinks": torch.bfloat16},
        {"group": 20, "kv_heads": 2, "seq_lens": (3, 40), "query_lens": (2, 3), "window": 30},
        {"group": 7, "kv_heads": 1},
        {"group": 12, "kv_heads": 2, "soft_cap": 5.0, "sinks": torch.float32},
        {"query_lens": (1, 4, 3), "splits": 1},  # 16 columns
        {"query_lens": (1, 8, 3), "seq_lens": (1, 40, 70), "window": 30, "head_dim": 64},  # 32
        {"head_dim": 192, "value_dim": 128, "kv_heads": 1, "seq_lens": (1, 50)},
        {"head_dim": 96, "value_dim": 48, "sinks": torch.bfloat16, "window": 20, "splits": 1},
        {"head_dim": 96, "value_dim": 32, "query_lens": (1, 3, 2), "group": 16, "kv_heads": 1},
        {"block_size": 32},
        {"block_size": 48},
        {"head_dim": 112, "splits": 1},
        {"splits": 9},
        {"window": 20},
        {"window": 64, "seq_lens": (200, 64, 65)},
        {"soft_cap": 5.0},
        {"query_lens": (1, 3, 2)},
        {"query_lens": (1, 4, 0), "window": 30},
        {"query_lens": (1, 9, 0), "window": 30, "seq_lens": (1, 40, 70), "group": 7, "kv_heads": 1},
        {"splits": 40, "query_lens": (0, 2, 1)},
        {"sinks": torch.bfloat16},
        {"sinks": torch.float32, "splits": 1},
        {"sinks": torch.float16, "query_lens": (1, 3, 2), "window": 20, "soft_cap": 5.0},
        {"size": 1e-5, "dtype": torch.float32},
        {"size": 1e4, "dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_options(options):
    bound = 6e-3 if options.get("dtype") == torch.bfloat16 else BOUND  # bf16 rounds the output itself to 2^-9
    output, expected = run("isoquant3", **options)
    assert relative_rms(output, expected) < bound


def test_outliers_of_each_head():
    generator = torch.Generator().manual_seed(0)
    outliers = torch.stack([torch.randperm(128, generator=generator)[:32].sort().values for _ in range(2)])
    assert (
        relative_rms(*run("turboquant25", key_outlier_channels=outliers, value_outlier_channels=outliers.flip(0)))
        < BOUND
    )


@pytest.mark.parametrize("name", ["isoquant4", "planarquant3"])
def test_channel_order_of_each_head(name):
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(128, generator=generator) for _ in range(2)])
    assert relative_rms(*run(name, key_channel_order=orders, value_channel_order=orders.flip(0))) < BOUND


def transforms(head_dim: int, kv_heads: int = 2) -> dict[str, torch.Tensor]:
    """Means that move scores by several units, another of each head."""
    generator = torch.Generator().manual_seed(3)
    mean, first_mean, scale, value_scale = torch.randn(4, kv_heads, head_dim, generator=generator)
    return dict(key_mean=3 * mean, key_scale=scale.exp2(), key_first_mean=first_mean, value_scale=value_scale.exp2())


def rope(pairs: int, *, interleaved: bool = False) -> Rope:
    """A RoPE of pairs that turn within a token, and that turn within thousands."""
    return Rope(tuple(3.0 * 1e-4 ** (pair / pairs) for pair in range(pairs)), interleaved)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tq4", {}),
        ("turboquant35", {"head_dim": 96, "soft_cap": 5.0}),
        ("turboquant25", {"seq_lens": (1, 40)}),
        ("turboquant35", {"head_dim": 128, "seq_lens": (37,)}),
        ("tq4", {"head_dim": 80, "kv_heads": 2}),
        ("tq4", {"sinks": torch.bfloat16}),
        ("tq4", {"sinks": torch.bfloat16, "soft_cap": 5.0}),
        ("tq4", {"sinks": torch.bfloat16, "without": "key_first_mean"}),
        ("tq4", {"without": "key_first_mean", "soft_cap": 5.0, "seq_lens": (37,)}),
        ("isoquant3", {"without": "key_mean", "window": 20, "seq_lens": (10, 50)}),
        ("isoquant3", {"query_lens": (1, 9, 0), "window": 30, "seq_lens": (1, 40, 70), "group": 7, "kv_heads": 1}),
        ("turboquant25", {"group": 12, "seq_lens": (37,)}),
    ],
    ids=str,
)
def test_centred_and_scaled_pages(name, options):
    options = {"head_dim": 64, **options}
    given = transforms(options["head_dim"], options.get("kv_heads", 2))
    given.pop(options.pop("without", None), None)
    assert relative_rms(*run(name, **options, **given)) < BOUND


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tq4", {"seq_lens": (1, 300, 530)}),
        ("turboquant35", {"head_dim": 128, "seq_lens": (513,), "splits": 1, "without": "key_first_mean"}),
        ("tq4", {"seq_lens": (300, 513), "sinks": torch.bfloat16, "soft_cap": 5.0}),
        ("isoquant3", {"head_dim": 80, "seq_lens": (290, 600), "window": 40, "sinks": torch.float32}),
        # Drafts on both sides of a block's border, in other blocks of rows.
        ("turboquant25", {"seq_lens": (513, 514), "query_lens": (3, 2), "group": 8, "kv_heads": 1}),
        ("tq4", {"seq_lens": (700,), "positions": 300}),  # beyond the table
        ("tq4", {"seq_lens": (100,), "positions": 100}),  # one block, which turns
    ],
    ids=str,
)
def test_pages_centred_by_blocks_of_positions(name, options):
    options = {"head_dim": 64, "kv_heads": 2, "positions": 768, **options}
    given = transforms(options["head_dim"], options["kv_heads"])
    given["key_mean"] *= 3
    given |= {"key_rope": rope(options["head_dim"] // 2 - 3), "positions": options.pop("positions")}
    given.pop(options.pop("without", None), None)
    assert relative_rms(*run(name, **options, **given)) < BOUND
