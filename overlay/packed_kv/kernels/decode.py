"""Split-KV decode attention over packed pages: the block table is walked, codes are decoded in registers.

One warp serves one (request, KV head, split): all query heads of the KV head (and all of its few query tokens) are
the columns of one tile of 8 (K and V are the left operands), so each packed byte is read once. Partial results of the
splits are combined, and V's rotation undone, by `merge.py`. The reference is `attention/active_blocks.attend`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import CODE_WORDS, PageLayout
from .fragments import assemble_key, assemble_value, decode_half, load_words, scale_pair

LOG2_E = 1.4426950408889634
MAX_REGISTERS = 128
"""32 x 8192 on an H200, isoquant4, the better of 6 and 8 splits: 102 us at 168, 100 at 144, 100 at 128 registers;
128 x 2048: 112, 112, 106 us. 128 leave no spills at head_dim 128."""
PROGRAMS_A_MULTIPROCESSOR = 16
"""Warps of `MAX_REGISTERS` registers that fit a multiprocessor."""
_MASKED = tl.constexpr(-1.0e30)


@triton.jit
def _load_vector_words(base0, base1, chunk_widths: tl.constexpr, lanes):
    words = ()
    for chunk in tl.static_range(len(chunk_widths)):
        offset = lanes * chunk_widths[chunk]
        words = words + load_words(base0 + offset, base1 + offset, chunk_widths[chunk])
        base0 += 32 * chunk_widths[chunk]
        base1 += 32 * chunk_widths[chunk]
    return words


@triton.jit
def _load_16_bits(pointer0, pointer1):
    """pointer0, pointer1: to uint16, [32, 1] -> int32 [32, 2]."""
    both = tl.join(tl.reshape(tl.load(pointer0), [32]), tl.reshape(tl.load(pointer1), [32]))
    return both.to(tl.int32)


@triton.jit
def _spread_half_word(half):
    """The signs of an odd last 3-bit group as they lie in a sign word of parity 0: bytes (b0, b0 << 4, b1, b1 << 4)."""
    return half & 0xF0 | (half & 0x0F) << 12 | (half & 0xF000) << 8 | (half & 0x0F00) << 20


@triton.jit
def _load_key(
    base0, base1, lanes,
    CHUNKS: tl.constexpr, HALF_OFFSET: tl.constexpr, HAS_HALF: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Words and scales of K of 2 micro-blocks at base0 and base1, pointers to int32."""
    words = _load_vector_words(base0, base1, CHUNKS, lanes)
    half0, half1 = base0.to(tl.pointer_type(tl.uint16)), base1.to(tl.pointer_type(tl.uint16))
    if HAS_HALF:
        offset = HALF_OFFSET // 2 + lanes
        words = words + (_spread_half_word(_load_16_bits(half0 + offset, half1 + offset)),)
    scales = ()
    row = SCALES // 2 + lanes // 4 * GROUPS
    if GROUPS % 4 == 0:
        for i in tl.static_range(GROUPS // 4):
            offset = row // 2 + 2 * i
            scales = scales + load_words(base0 + offset, base1 + offset, 2)
    else:
        for i in tl.static_range(GROUPS):
            scales = scales + (_load_16_bits(half0 + row + i, half1 + row + i),)
    return words, scales


@triton.jit
def _load_value(
    base0, base1, lanes,
    CHUNKS: tl.constexpr, HALF_OFFSET: tl.constexpr, HAS_HALF: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Words and scales of V of 2 micro-blocks at base0 and base1, pointers to int32."""
    words = _load_vector_words(base0 + CODES // 4, base1 + CODES // 4, CHUNKS, lanes)
    if HAS_HALF:
        half0, half1 = base0.to(tl.pointer_type(tl.uint16)), base1.to(tl.pointer_type(tl.uint16))
        offset = (CODES + HALF_OFFSET) // 2 + lanes
        words = words + (_spread_half_word(_load_16_bits(half0 + offset, half1 + offset)),)
    scales = ()
    row = SCALES // 4 + lanes % 4 * GROUPS
    if GROUPS % 4 == 0:
        for i in tl.static_range(GROUPS // 4):
            scales = scales + load_words(base0 + row + 4 * i, base1 + row + 4 * i, 4)
    else:
        for i in tl.static_range(GROUPS):
            scales = scales + load_words(base0 + row + i, base1 + row + i, 1)
    return words, scales


@triton.jit
def _decode_group(
    words, scale_words, group: tl.constexpr, is_key: tl.constexpr,
    GROUP_BITS: tl.constexpr, FIRST_WORD: tl.constexpr, SIGN_WORD: tl.constexpr, PARITY: tl.constexpr,
    GROUPS: tl.constexpr, SHIFTING: tl.constexpr,
):  # fmt: skip
    """One group in fp16: K as [32 tokens, 32 channels], V as [32 channels, 32 tokens]."""
    bits: tl.constexpr = GROUP_BITS[group]
    first: tl.constexpr = FIRST_WORD[group]
    second: tl.constexpr = first + (1 if bits == 4 else 0)
    signs = words[SIGN_WORD[group]]
    parity: tl.constexpr = PARITY[group]
    if is_key:
        # bytes [group][n3]: the scale of half h is that of token n3 = h
        if GROUPS % 4 == 0:
            scale0 = scale_pair(scale_words[group // 2], group % 2 * 2, group % 2 * 2)
            scale1 = scale_pair(scale_words[group // 2], group % 2 * 2 + 1, group % 2 * 2 + 1)
        else:
            scale0 = scale_pair(scale_words[group], 0, 0)
            scale1 = scale_pair(scale_words[group], 1, 1)
        half0 = decode_half(words[first], signs, scale0, scale0, 0, bits, parity, SHIFTING)
        half1 = decode_half(words[second], signs, scale1, scale1, 1, bits, parity, SHIFTING)
        result = assemble_key(half0, half1)
    else:
        # bytes [n3][n0]: pairs of codes have n0 = 0 and 1, even pairs n3 = 0
        scale_a = scale_pair(scale_words[group], 0, 1)
        scale_b = scale_pair(scale_words[group], 2, 3)
        half0 = decode_half(words[first], signs, scale_a, scale_b, 0, bits, parity, SHIFTING)
        half1 = decode_half(words[second], signs, scale_a, scale_b, 1, bits, parity, SHIFTING)
        result = assemble_value(half0, half1)
    return result


@triton.jit
def _decode_kernel(
    query, cache, block_table, query_start, seq_lens, partial_output, partial_stats,
    table_stride, block_stride, head_stride, soft_cap,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    MICRO_BLOCKS_A_BLOCK: tl.constexpr, MICRO_BLOCK_WORDS: tl.constexpr,
    GROUP_BITS: tl.constexpr, FIRST_WORD: tl.constexpr, SIGN_WORD: tl.constexpr, PARITY: tl.constexpr,
    CHUNKS: tl.constexpr, HALF_OFFSET: tl.constexpr, HAS_HALF: tl.constexpr,
    VALUE_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, SHIFTING: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = HEAD_DIM // 32
    split, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    if count <= 0:
        return

    first_visible = 0
    if WINDOW > 0:
        first_visible = tl.maximum(0, seq_len - count - WINDOW + 1)
    first_tile = first_visible // 32
    tiles = tl.cdiv(seq_len, 32) - first_tile
    tiles_a_split = tl.cdiv(tiles, SPLITS)
    low = first_tile + split * tiles_a_split
    high = tl.minimum(low + tiles_a_split, first_tile + tiles)

    columns = tl.arange(0, COLUMNS)
    position = columns // QUERY_GROUP
    limit = seq_len - count + position + 1  # a query sees tokens limit - WINDOW .. limit - 1
    channels = tl.arange(0, 32)
    row = ((start + position) * KV_HEADS + head).to(tl.int64) * QUERY_GROUP + columns % QUERY_GROUP
    valid = position < count
    queries = ()
    outputs = ()
    for g in tl.static_range(GROUPS):
        pointers = query + row[None, :] * HEAD_DIM + g * 32 + channels[:, None]
        queries = queries + (tl.load(pointers, mask=valid[None, :], other=0.0),)
        outputs = outputs + (tl.zeros([32, COLUMNS], tl.float32),)
    maximum = tl.full([COLUMNS], _MASKED, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)

    lanes = tl.arange(0, 32)[:, None]
    last_micro_block = (seq_len - 1) // 16
    table = block_table + request.to(tl.int64) * table_stride
    cache_head = cache.to(tl.pointer_type(tl.int32)) + head.to(tl.int64) * head_stride

    if low < high:
        base0, base1 = _tile_bases(cache_head, table, low, last_micro_block, block_stride,
                                   MICRO_BLOCKS_A_BLOCK, MICRO_BLOCK_WORDS)  # fmt: skip
        key_words, key_scales = _load_key(base0, base1, lanes, CHUNKS, HALF_OFFSET, HAS_HALF, GROUPS, KEY_SCALES)
        value_words, value_scales = _load_value(base0, base1, lanes, CHUNKS, HALF_OFFSET, HAS_HALF, GROUPS,
                                                VALUE_CODES, VALUE_SCALES)  # fmt: skip
        for tile in range(low, high):
            base0, base1 = _tile_bases(cache_head, table, tl.minimum(tile + 1, high - 1), last_micro_block,
                                       block_stride, MICRO_BLOCKS_A_BLOCK, MICRO_BLOCK_WORDS)  # fmt: skip
            scores = tl.zeros([32, COLUMNS], tl.float32)
            for g in tl.static_range(GROUPS):
                key = _decode_group(key_words, key_scales, g, True, GROUP_BITS, FIRST_WORD, SIGN_WORD, PARITY,
                                    GROUPS, SHIFTING)  # fmt: skip
                scores = tl.dot(key, queries[g], scores)
            # The next tile's K is under way while this one's V is used, its V while its own K is: each word's
            # registers are free again when its successor is asked for.
            key_words, key_scales = _load_key(base0, base1, lanes, CHUNKS, HALF_OFFSET, HAS_HALF, GROUPS, KEY_SCALES)
            if SHIFTING:
                scores *= 256.0
            if HAS_SOFT_CAP:  # in units of log2 e; tanh(x) = 1 - 2 / (exp(2 x) + 1)
                scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap)) + 1))

            # Only the tiles at the ends hold tokens that some query does not see, or bytes that may be anything:
            # there a scale of 0 makes them 0, not NaN.
            stored = tl.full([32, 2], -1, tl.int32)
            if (tile * 32 + 32 > seq_len - count + 1) | (tile * 32 < seq_len - WINDOW if WINDOW > 0 else False):
                tokens = tile * 32 + tl.arange(0, 32)
                visible = tokens[:, None] < limit[None, :]
                if WINDOW > 0:
                    visible = visible & (tokens[:, None] >= limit[None, :] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
                lane_tokens = tile * 32 + tl.arange(0, 2)[None, :] * 16 + lanes % 4 * 2
                stored = tl.zeros([32, 2], tl.int32)
                for byte in tl.static_range(4):
                    token = lane_tokens + (byte // 2 * 8 + byte % 2)
                    known = (token < seq_len) & (token >= first_visible)
                    stored = stored | tl.where(known, 0xFF << (8 * byte) if byte < 3 else -0x1000000, 0)

            new_maximum = tl.maximum(maximum, tl.max(scores, 0))
            weights = tl.exp2(scores - new_maximum[None, :])
            shrink = tl.exp2(maximum - new_maximum)
            total = total * shrink + tl.sum(weights, 0)
            maximum = new_maximum
            weights = weights.to(tl.float16)

            known_scales = ()
            new_outputs = ()
            for g in tl.static_range(GROUPS):
                known_scales = known_scales + (value_scales[g] & stored,)
            for g in tl.static_range(GROUPS):
                value = _decode_group(value_words, known_scales, g, False, GROUP_BITS, FIRST_WORD, SIGN_WORD, PARITY,
                                      GROUPS, SHIFTING)  # fmt: skip
                new_outputs = new_outputs + (tl.dot(value, weights, outputs[g] * shrink[None, :]),)
            outputs = new_outputs
            value_words, value_scales = _load_value(base0, base1, lanes, CHUNKS, HALF_OFFSET, HAS_HALF, GROUPS,
                                                    VALUE_CODES, VALUE_SCALES)  # fmt: skip

    slot = row * SPLITS + split
    for g in tl.static_range(GROUPS):
        result = outputs[g] * 256.0 if SHIFTING else outputs[g]
        pointers = partial_output + slot[None, :] * HEAD_DIM + g * 32 + channels[:, None]
        tl.store(pointers, result, mask=valid[None, :])
    tl.store(partial_stats + slot * 2, maximum, mask=valid)
    tl.store(partial_stats + slot * 2 + 1, total, mask=valid)


@triton.jit
def _tile_bases(
    cache_head, table, tile, last_micro_block, block_stride,
    MICRO_BLOCKS_A_BLOCK: tl.constexpr, MICRO_BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Pointers to the 2 micro-blocks of a tile; the second is the first again where the sequence has ended."""
    first = tile * 2
    second = tl.minimum(first + 1, last_micro_block)
    block0 = tl.load(table + first // MICRO_BLOCKS_A_BLOCK).to(tl.int64)
    block1 = tl.load(table + second // MICRO_BLOCKS_A_BLOCK).to(tl.int64)
    base0 = cache_head + block0 * block_stride + first % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    base1 = cache_head + block1 * block_stride + second % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    return base0, base1


def split_count(programs: int, multiprocessors: int) -> int:
    """Splits of each request, from the (request, KV head) pairs of a batch: a wave of programs, at most 128.

    It knows no sequence length, so that a CUDA graph can hold the launch.
    """
    return max(1, min(128, PROGRAMS_A_MULTIPROCESSOR * multiprocessors // programs))


def kernel_layout(page: PageLayout) -> dict[str, object]:
    """The constants of `_decode_kernel` that a page's layout decides."""
    vector = page.vector
    first, signs, parity = [], [], []
    word = threes = 0
    for bits in vector.group_bits:
        first.append(word)
        word += CODE_WORDS[bits]
        signs.append(vector.code_words + threes // 2 if bits == 3 else 0)
        parity.append(threes % 2 if bits == 3 else 0)
        threes += bits == 3
    return {
        "MICRO_BLOCK_WORDS": page.micro_block_bytes // 4,
        "GROUP_BITS": vector.group_bits,
        "FIRST_WORD": tuple(first),
        "SIGN_WORD": tuple(signs),
        "PARITY": tuple(parity),
        "CHUNKS": vector.chunks,
        "HALF_OFFSET": 128 * sum(vector.chunks),
        "HAS_HALF": bool(vector.half_words),
        "VALUE_CODES": page.value_codes,
        "KEY_SCALES": page.key_scales,
        "VALUE_SCALES": page.value_scales,
    }


def decode(
    page: PageLayout,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    *,
    max_query_len: int,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    shifting: bool = False,
    max_registers: int | None = None,
) -> None:
    """Launch the kernel on a batch of requests with at most `max_query_len` query tokens each.

    Args:
        page: layout of the cache.
        query: fp16 [tokens, KV heads, queries a KV head, head_dim], contiguous, rotated and multiplied by the
            attention scale and by log2 e.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes], its last two dimensions contiguous, 16-byte aligned.
        block_table: int32 [requests, blocks].
        query_start: int32 [requests + 1]; a request without query tokens is skipped.
        seq_lens: int32 [requests], the query tokens included.
        partial_output: fp32 [tokens, query heads, splits, head_dim], not normalised.
        partial_stats: fp32 [tokens, query heads, splits, 2], maximum score and sum of weights, in powers of 2.
        max_query_len: known on the host, so that a CUDA graph can hold the launch.
        sliding_window: tokens that a query sees, itself included.
        logits_soft_cap: cap of the scores before the softmax.
        shifting: the chip has no e4m3 conversion (before sm_89).
        max_registers: of a thread at head_dim up to 128: `MAX_REGISTERS` on Hopper, elsewhere not tuned.
    """
    _, kv_heads, group, head_dim = query.shape
    splits = partial_output.shape[2]
    assert query.is_contiguous(), query.stride()
    assert cache.stride()[2:] == (cache.shape[3], 1), cache.stride()
    assert not any(stride % 16 for stride in cache.stride()[:2]), cache.stride()
    _decode_kernel[(splits, kv_heads, seq_lens.shape[0])](
        query, cache, block_table, query_start, seq_lens, partial_output, partial_stats,
        block_table.stride(0), cache.stride(0) // 4, cache.stride(1) // 4, (logits_soft_cap or 0.0) * LOG2_E,
        KV_HEADS=kv_heads, QUERY_GROUP=group, HEAD_DIM=head_dim,
        COLUMNS=max(8, triton.next_power_of_2(group * max_query_len)),
        SPLITS=splits, WINDOW=sliding_window or 0, HAS_SOFT_CAP=bool(logits_soft_cap),
        MICRO_BLOCKS_A_BLOCK=cache.shape[2] // 16, SHIFTING=shifting, **kernel_layout(page),
        num_warps=1, num_stages=1, **({} if max_registers is None or head_dim > 128 else {"maxnreg": max_registers}),
    )  # fmt: skip
