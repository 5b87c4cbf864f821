"""Prefill: gathered tokens equal the pages; raw chunks and gathered prefixes make up the attention over all tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from launchers import gather, unrotate
from packed_kv.attention.metadata import Batch
from packed_kv.attention.prefill import FlashAttention, FlashPrefill, takes_two_sizes
from packed_kv.attention.prefix import key_part, prefix_parts
from packed_kv.attention.step import StepCache
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.combine import CombineLaunch
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.reference.attention import AttentionOptions
from page_codecs import page_codec
from test_decode import rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pages(codec: PagedCodec, heads: int, seq_lens: tuple[int, ...], block_size: int, generator: torch.Generator):
    """Poisoned cache with the requests' tokens in shuffled blocks: cache, block table, K and V of each request."""
    blocks_each = [-(-n // block_size) for n in seq_lens]
    shape = (sum(blocks_each) + 2, heads, block_size, codec.slot_bytes)
    cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
    order = torch.randperm(len(cache), generator=generator).to(torch.int32)
    table = torch.full((len(seq_lens), max(blocks_each)), len(cache) - 1, dtype=torch.int32)
    vectors = []
    for i, (seq_len, blocks) in enumerate(zip(seq_lens, blocks_each, strict=True)):
        table[i, :blocks] = order[sum(blocks_each[:i]) :][:blocks]
        ids = torch.arange(seq_len)
        slots = table[i, ids // block_size].long() * block_size + ids % block_size
        key, value = torch.randn(2, seq_len, heads, codec.key.head_dim, generator=generator).to(DEVICE)
        value = value[..., : codec.value.head_dim]
        codec.write(cache, slots.to(DEVICE), key, value, ids.to(DEVICE))
        vectors.append((key, value))
    return cache, table.to(DEVICE), vectors


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("isoquant4", 128), ("isoquant3", 96), ("isoquant3", 256), ("turboquant35", 192), ("turboquant35", 128),
     ("turboquant25", 64), ("turboquant25", 128)],
)  # fmt: skip
def test_gathered_tokens_equal_the_pages(name: str, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    codec = PagedCodec(FORMATS[name], head_dim, device=DEVICE)
    cache, table, _ = pages(codec, 2, (37, 54), 32, generator)
    (spans,) = prefix_parts([5, 5], [37, 54], None, 4096)
    part = key_part(spans, [0, 5, 10], table, 32)
    key, value = torch.full((2, 37 + 54, 2, head_dim), float("nan"), dtype=torch.float16, device=DEVICE)
    gather(codec.layout, cache, part.micro_blocks, part.rows, key, value)
    expected = codec.read(cache, part.micro_blocks)
    kept = torch.cat((torch.arange(37), 48 + torch.arange(54))).to(DEVICE)  # 37 tokens take 3 micro-blocks
    for ours, reference in zip((key, value), expected, strict=True):
        assert torch.equal(ours, reference.transpose(0, 1)[kept].half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tq4", "planarquant3", "turboquant25"])
def test_unrotated_vectors_are_the_decoded_ones(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    outliers = None
    if FORMATS[name].outlier_bits:
        outliers = torch.stack([torch.randperm(128, generator=generator)[:32].sort().values for _ in range(2)])
    codec = page_codec(FORMATS[name], 128, key_outlier_channels=outliers, device=DEVICE).key
    packed = codec.encode(torch.randn(50, 2, 128, generator=generator).to(DEVICE))
    rotated = codec.dequantize(*codec.unpack(packed)).half()
    result = unrotate(rotated, rotation_matrix(codec, 2, inverse=True), dtype)
    assert result.dtype == dtype and result.data_ptr() == rotated.data_ptr()
    rounding = torch.finfo(dtype).eps + 2**-10  # of the result; of the matrix and its products, in fp16
    assert (result.float() - codec.decode(packed)).norm() < rounding * codec.decode(packed).norm()


def transforms(heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mean, first_mean, scale, value_scale = torch.randn(4, heads, head_dim, generator=generator)
    return dict(key_mean=3 * mean, key_scale=scale.exp2(), key_first_mean=first_mean, value_scale=value_scale.exp2())


@pytest.mark.parametrize("per_head", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("turns", [False, True], ids=["one mean", "blocks"])
def test_unrotated_vectors_have_their_mean_again(per_head: bool, turns: bool) -> None:
    """Of two requests, and positions beyond the table."""
    given = {name: x if per_head else x[0] for name, x in transforms(2, 80).items()}
    if turns:
        given |= {"key_rope": rope(30, interleaved=per_head), "positions": 600}
    codec = page_codec(FORMATS["turboquant35"], 80, device=DEVICE, **given).key
    positions = torch.cat((torch.arange(5), 23 * torch.arange(65))).to(DEVICE)
    x = torch.randn(70, 2, 80, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    packed = codec.encode(x, positions[:, None])
    rotated = codec.dequantize(*codec.unpack(packed)).half()
    matrix, means = rotation_matrix(codec, 2, inverse=True), Means.of(codec.transform)
    result = unrotate(rotated, matrix, torch.float16, means, positions.to(torch.int32))[..., :80].float()
    expected = codec.decode(packed, positions[:, None])
    assert ((result - expected).norm(dim=-1) < 2**-9 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("infinity", [float("inf"), float("-inf")])
def test_combine(infinity: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 9, 20, generator=generator).to(DEVICE)  # heads, tokens, keys
    values = torch.randn(3, 20, 64, generator=generator).to(DEVICE)

    def over(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.einsum("htk,hkd->thd", scores[..., keys].softmax(-1), values[:, keys])
        return output.contiguous(), scores[..., keys].logsumexp(-1)

    output, lse = over(slice(0, 12))
    part, part_lse = over(slice(12, 20))
    part[4], part_lse[:, 4] = float("nan"), infinity
    before = output[4].clone()
    CombineLaunch(output, part.shape[2]).combine(output, lse, part, part_lse)
    expected, expected_lse = over(slice(0, 20))
    others = [i for i in range(9) if i != 4]
    torch.testing.assert_close(output[others], expected[others], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, others], expected_lse[:, others], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output[4], before, rtol=0, atol=0)


def flash_attention(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, softmax_scale, causal, window_size, softcap, out, **_unused
):
    """`flash_attn_varlen_func` by its documentation, in float64: masks aligned to the bottom right corner.

    Where a window has a left end alone, it ends where FlashAttention 2 says: `max_seqlen_k` keys on (others: nowhere).
    """
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    left, right = window_size[0], 0 if causal else window_size[1]
    if left >= max_seqlen_k:
        left = -1
    if left >= 0 and right < 0:
        right = max_seqlen_k
    for q0, q1, k0, k1 in zip(*(x.tolist()[i : len(x) - 1 + i] for x in (cu_seqlens_q, cu_seqlens_k) for i in (0, 1)),
                              strict=True):  # fmt: skip
        group = q.shape[1] // k.shape[1]
        key, value = (x[k0:k1].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].double(), key) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(k1 - k0 - (q1 - q0), k1 - k0, device=q.device)[:, None]
        keys = torch.arange(k1 - k0, device=q.device)
        masked = torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device)
        if left >= 0:
            masked |= keys < place - left
        if right >= 0:
            masked |= keys > place + right
        scores = scores.masked_fill(masked, float("-inf"))
        lse[:, q0:q1] = scores.logsumexp(-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), value).to(out.dtype)
    return out, lse


def one_size_attention(q, k, v, **options):
    """FlashAttention 2: K, V and the output have heads of one size."""
    assert q.shape[2] == k.shape[2] == v.shape[2] == options["out"].shape[2]
    return flash_attention(q, k, v, **options)


QUERY_LENS, PREFIXES = (5, 17, 40, 20), (20, 0, 37, 64)
SINKS = torch.tensor([-1.0, 0.5, 2.0, 5.0], device=DEVICE)


@pytest.mark.parametrize(
    ("shared", "options"),
    [
        (False, {"logits_soft_cap": 3.0}),
        (False, {"capacity": 48}),
        (False, {"sliding_window": 24}),
        (False, {"sliding_window": 41}),
        (False, {"sliding_window": 60, "capacity": 48}),
        (True, {"capacity": 48}),
        (True, {"sliding_window": 60}),
        (False, {"transformed": True, "logits_soft_cap": 3.0}),
        (False, {"transformed": True, "capacity": 48}),
        (True, {"transformed": True, "sliding_window": 60}),
        (False, {"transformed": True, "capacity": 48, "sinks": True}),
        (False, {"sliding_window": 24, "sinks": True}),
        (False, {"transformed": True, "capacity": 48, "head_dim": 80}),
        (True, {"capacity": 48, "head_dim": 80}),
        (False, {"capacity": 48, "head_dim": 96, "value_dim": 64}),
        (False, {"transformed": True, "sliding_window": 60, "sinks": True, "head_dim": 96, "value_dim": 64, "pads": 1}),
        (True, {"capacity": 48, "head_dim": 80, "value_dim": 48, "pads": 1}),
        (True, {"capacity": 48, "head_dim": 80, "value_dim": 48}),
        (False, {"transformed": True, "turns": True, "lengths": ((5, 17, 3), (250, 0, 530))}),
        (
            False,
            {"transformed": True, "turns": True, "lengths": ((5, 7), (0, 600)), "sliding_window": 90, "sinks": True},
        ),
        (True, {"transformed": True, "turns": True, "lengths": ((5, 7), (0, 270)), "capacity": 112}),
        (False, {"transformed": True, "centred": True, "capacity": 48, "sinks": True}),
        (True, {"transformed": True, "centred": True, "sliding_window": 60, "head_dim": 80}),
    ],
    ids=str,
)
def test_chunks_and_prefixes(shared: bool, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row sees its prefix as decoded, and its chunk raw (decoded where the layer has no K and V of its own)."""
    generator = torch.Generator().manual_seed(1)
    heads, group, block_size, first = 2, 2, 16, 1
    options = dict(options)
    head_dim = options.pop("head_dim", 64)
    value_dim, pads = options.pop("value_dim", head_dim), options.pop("pads", False)
    capacity = options.pop("capacity", 4096)
    given = transforms(heads, head_dim) if options.pop("transformed", False) else {}
    query_lens, prefixes = options.pop("lengths", (QUERY_LENS, PREFIXES))
    if options.pop("turns", False):
        given |= {"key_rope": rope(head_dim // 2), "positions": 1000}
    if options.pop("centred", False):
        given |= {"value_mean": given["key_mean"].flip(0) / 3, "value_first_mean": given["key_first_mean"].flip(0)}
    if given:
        given["value_scale"] = given["value_scale"][:, :value_dim]
    codec = page_codec(FORMATS["isoquant4"], head_dim, device=DEVICE, value_dim=value_dim, **given)
    seq_lens = tuple(a + b for a, b in zip(query_lens, prefixes, strict=True))
    cache, table, vectors = pages(codec, heads, seq_lens, block_size, generator)
    options["sinks"] = SINKS if options.pop("sinks", False) else None
    attention = AttentionOptions(scale=0.2, **options)
    flash = FlashAttention(one_size_attention if pads else flash_attention, head_dim if pads else value_dim)
    prefill = FlashPrefill(codec, heads * group, heads, attention, 1, 1, flash)
    prefill.capacity = capacity if not shared else max(capacity, sum(query_lens) + 16 * len(query_lens))
    gathered = (prefill.capacity, heads, codec.key.stored_dim)
    own = [((sum(query_lens), n, flash.value_dim), None) for n in (heads * group, heads, heads * group)]
    shapes = ((gathered, torch.float16), (gathered, torch.float16), *(own if pads else own[:1]))
    monkeypatch.setattr(
        prefill,
        "take",
        lambda dtype: [torch.full(shape, float("nan"), dtype=kind or dtype, device=DEVICE) for shape, kind in shapes],
    )
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    metadata = SimpleNamespace(
        query_starts=starts, num_actual_tokens=starts[-1], context=list(seq_lens), block_table=table,
        steps=StepCache(),
    )  # fmt: skip
    query = torch.randn(starts[-1] + 3, heads * group, head_dim, generator=generator).to(DEVICE, torch.float16)
    key, value = (torch.cat([x[i][-n:] for x, n in zip(vectors, query_lens, strict=True)]).half() for i in (0, 1))
    output = torch.full_like(query[..., :value_dim], float("nan"))
    prefill.attend(Batch(query, *((None, None) if shared else (key, value)), cache, metadata, output), first)

    assert output[: starts[first]].isnan().all() and output[starts[-1] :].isnan().all()
    for i in range(first, len(seq_lens)):
        rows = slice(starts[i], starts[i + 1])
        places = torch.arange(seq_lens[i], device=DEVICE)[:, None]
        whole = [
            part.decode(part.encode(x, places), places)
            for part, x in zip((codec.key, codec.value), vectors[i], strict=True)
        ]
        if not shared:
            whole = [
                torch.cat((x[: prefixes[i]], raw[rows].float())) for x, raw in zip(whole, (key, value), strict=True)
            ]
        expected = torch.empty(query_lens[i], heads * group, value_dim, device=DEVICE)
        _, lse = flash_attention(
            query[rows], *whole, cu_seqlens_q=torch.tensor([0, query_lens[i]]),
            cu_seqlens_k=torch.tensor([0, seq_lens[i]]), max_seqlen_k=seq_lens[i], softmax_scale=0.2, causal=True,
            window_size=((attention.sliding_window or 0) - 1, 0), softcap=attention.logits_soft_cap, out=expected,
        )  # fmt: skip
        if attention.sinks is not None:
            expected *= torch.sigmoid(lse.T - attention.sinks)[..., None]
        assert (output[rows].float() - expected).norm() < 1.5e-3 * expected.norm()


@pytest.mark.parametrize(
    ("version", "generation", "head_dim", "value_dim", "takes"),
    [(3, 9, 192, 128, True), (4, 10, 192, 128, False), (3, 8, 192, 128, False), (2, 9, 192, 128, False),
     (3, 9, 256, 128, False), (3, 9, 192, 64, False)],
)  # fmt: skip
def test_two_sizes(version: int, generation: int, head_dim: int, value_dim: int, takes: bool) -> None:
    assert takes_two_sizes(version, generation, head_dim, value_dim) == takes


def test_a_part_holds_no_more_than_the_workspace() -> None:
    for capacity in (16, 48, 112, 4096):
        for window in (None, 33):
            seen = [set() for _ in PREFIXES]
            for part in prefix_parts(QUERY_LENS, PREFIXES, window, capacity):
                assert sum(span.end - span.start for span in part) <= capacity
                for span in part:
                    assert span.start % 16 == 0 and not seen[span.request] & set(range(span.start, span.end))
                    seen[span.request] |= set(range(span.start, span.end))
            for tokens, prefix in zip(seen, PREFIXES, strict=True):
                assert tokens >= set(range(max(0, prefix - (window or prefix) + 1), prefix))
