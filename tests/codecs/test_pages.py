"""Packed pages: what PagedCodec writes and reads, against a bit-by-bit model of the drawing in layout.py."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS
from packed_kv.codecs.pages import PagedCodec
from page_codecs import page_codec

HEADS = 2

every_dtype = pytest.mark.parametrize("name", FORMATS)
every_head_dim = pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
every_block_size = pytest.mark.parametrize("block_size", [16, 32, 64, 128], ids="block{}".format)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_slots(count: int, total: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]


def poisoned(codec: PagedCodec, blocks: int, block_size: int, poison: str) -> torch.Tensor:
    cache = torch.full((blocks, HEADS, block_size, codec.slot_bytes), 0xFF, dtype=torch.uint8)
    if poison == "random":
        cache.random_(0, 256, generator=torch.Generator().manual_seed(9))
    return cache


def read_all(
    codec: PagedCodec, cache: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, rotated, [slots, heads, head_dim]; K as stored, or with the means of positions."""
    micro_blocks = torch.arange(cache.shape[0] * cache.shape[2] // 16)
    key, value = codec.read(cache, micro_blocks, positions)
    return key.transpose(0, 1), value.transpose(0, 1)


def expected(codec: PagedCodec, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codec.key.dequantize(*codec.key.quantize(key)), codec.value.dequantize(*codec.value.quantize(value))


@every_dtype
@every_head_dim
@every_block_size
def test_tokens_come_back_from_shuffled_slots_of_poisoned_pages(name, head_dim, block_size):
    codec = PagedCodec(FORMATS[name], head_dim)
    cache = poisoned(codec, 3, block_size, "0xFF")
    slots = some_slots(2 * block_size + 3, 3 * block_size)
    key, value = gaussian(len(slots), HEADS, head_dim), gaussian(len(slots), HEADS, head_dim, seed=1)
    codec.write(cache, slots, key, value)
    stored_key, stored_value = read_all(codec, cache)
    expected_key, expected_value = expected(codec, key, value)
    assert torch.equal(stored_key[slots], expected_key)
    assert torch.equal(stored_value[slots], expected_value)


def check_rotations_cancel(codec: PagedCodec) -> None:
    """Scores and outputs over stored pages equal those over decoded vectors."""
    cache = poisoned(codec, 1, 16, "random")
    key, value = gaussian(16, HEADS, 128), gaussian(16, HEADS, 128, seed=1)
    positions = (torch.arange(16) - 5) % 16
    codec.write(cache, torch.arange(16), key, value, positions)
    stored_key, stored_value = read_all(codec, cache, positions)
    query = gaussian(16, HEADS, 3, 128, seed=2)
    scores = (codec.rotate_query(query) * stored_key.unsqueeze(2)).sum(-1)
    places = positions[:, None]
    plain = (query * codec.key.decode(codec.key.encode(key, places), places).unsqueeze(2)).sum(-1)
    assert torch.allclose(scores, plain, atol=1e-4)
    output = codec.unrotate_output(stored_value.unsqueeze(2))
    assert torch.allclose(output.squeeze(2), codec.value.decode(codec.value.encode(value)), atol=1e-5)


@every_dtype
def test_rotations_around_the_pages_cancel(name):
    codec = PagedCodec(FORMATS[name], 128)
    check_rotations_cancel(codec)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.outlier_bits])
def test_outliers_per_head_reach_pages_queries_and_outputs(name):
    outliers = torch.stack((torch.arange(96, 128), torch.arange(0, 64, 2)))
    codec = page_codec(FORMATS[name], 128, key_outlier_channels=outliers, value_outlier_channels=outliers.flip(0))
    check_rotations_cancel(codec)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.outlier_bits])
def test_channel_orders_per_head_reach_pages_queries_and_outputs(name):
    orders = torch.stack((torch.arange(127, -1, -1), torch.arange(128).view(32, 4).T.flatten()))
    codec = page_codec(FORMATS[name], 128, key_channel_order=orders, value_channel_order=orders.flip(0))
    check_rotations_cancel(codec)


def transforms(head_dim: int) -> dict[str, torch.Tensor]:
    mean = gaussian(HEADS, head_dim, seed=11)
    scale = gaussian(HEADS, head_dim, seed=12).exp2()
    return dict(key_mean=mean, key_scale=scale, key_first_mean=mean.flip(0) / 2, value_scale=scale.flip(0))


@every_dtype
@pytest.mark.parametrize("without", [(), ("key_mean",), ("key_first_mean",), ("key_scale", "value_scale")], ids=str)
def test_transforms_per_head_reach_pages_queries_and_outputs(name, without):
    given = {key: value for key, value in transforms(128).items() if key not in without}
    order = torch.stack((torch.arange(127, -1, -1), torch.arange(128).view(32, 4).T.flatten()))
    if count := FORMATS[name].outlier_channels(128):
        given |= {"key_outlier_channels": order[:, :count].sort(-1).values}
    else:
        given |= {"key_channel_order": order, "value_channel_order": order[0]}
    check_rotations_cancel(page_codec(FORMATS[name], 128, **given))


def test_a_mean_of_first_tokens_needs_positions():
    codec = page_codec(FORMATS["tq4"], 64, key_first_mean=[1.0] * 64)
    cache = poisoned(codec, 1, 16, "0xFF")
    with pytest.raises(ValueError, match="pass the tokens' positions"):
        codec.write(cache, torch.arange(3), gaussian(3, HEADS, 64), gaussian(3, HEADS, 64))


@every_dtype
@pytest.mark.parametrize("poison", ["0xFF", "random"])
def test_untouched_tokens_keep_every_bit(name, poison):
    codec = PagedCodec(FORMATS[name], 96)
    cache = poisoned(codec, 4, 32, poison)
    before = cache.clone()
    slots = torch.tensor([3, 40, 41, 63, 100])
    codec.write(cache, slots, gaussian(5, HEADS, 96), gaussian(5, HEADS, 96, seed=1))
    changed = torch.zeros(4 * 32, dtype=torch.bool)
    for slot, bits in _bits_by_slot(name, 96, cache ^ before).items():
        changed[slot] = any(bits)
    assert changed.nonzero().flatten().tolist() == slots.tolist()


@every_dtype
def test_padding_slots_are_skipped(name):
    codec = PagedCodec(FORMATS[name], 64)
    cache, sparse = poisoned(codec, 2, 16, "random"), poisoned(codec, 2, 16, "random")
    key, value = gaussian(6, HEADS, 64), gaussian(6, HEADS, 64, seed=1)
    slots = torch.tensor([-1, 31, -1, 0, 17, -1])
    codec.write(cache, slots, key, value)
    codec.write(sparse, slots[slots >= 0], key[slots >= 0], value[slots >= 0])
    assert torch.equal(cache, sparse)
    kept = cache.clone()
    codec.write(cache, torch.full((6,), -1), key, value)
    codec.write(cache, slots[:0], key[:0], value[:0])
    assert torch.equal(cache, kept)


@every_dtype
def test_nothing_to_read(name):
    codec = PagedCodec(FORMATS[name], 64)
    key, value = codec.read(poisoned(codec, 2, 16, "0xFF"), torch.zeros(0, dtype=torch.int64))
    assert key.shape == value.shape == (HEADS, 0, 64)


@every_dtype
def test_one_write_equals_many_into_the_same_micro_blocks(name):
    codec = PagedCodec(FORMATS[name], 128)
    whole, pieces = poisoned(codec, 2, 32, "random"), poisoned(codec, 2, 32, "random")
    slots = some_slots(64, 64, seed=4)
    key, value = gaussian(64, HEADS, 128), gaussian(64, HEADS, 128, seed=1)
    codec.write(whole, slots, key, value)
    for part in torch.arange(64).split([1, 2, 7, 30, 24]):
        codec.write(pieces, slots[part], key[part], value[part])
    assert torch.equal(whole, pieces)
    codec.write(whole, slots[:9], value[:9], key[:9])  # a slot is used again
    reread, _ = read_all(codec, whole)
    assert torch.equal(reread[slots[:9]], expected(codec, value[:9], key[:9])[0])
    assert torch.equal(reread[slots[9:]], expected(codec, key, value)[0][9:])


@every_dtype
def test_pages_may_be_padded_and_interleaved_with_other_layers(name):
    codec = PagedCodec(FORMATS[name], 128)
    blocks, block_size = 3, 32
    head_bytes = block_size * codec.slot_bytes
    buffer = torch.full((blocks * (2 * HEADS * head_bytes + 48),), 0xAB, dtype=torch.uint8)
    page = HEADS * head_bytes
    padded = buffer.as_strided(
        (blocks, HEADS, block_size, codec.slot_bytes), (2 * page + 48, head_bytes, codec.slot_bytes, 1), page + 16
    )
    dense = padded.clone()
    slots = some_slots(70, 96)
    key, value = gaussian(70, HEADS, 128), gaussian(70, HEADS, 128, seed=1)
    codec.write(dense, slots, key, value)
    codec.write(padded, slots, key, value)
    assert torch.equal(padded, dense)
    for strided, plain in zip(read_all(codec, padded), read_all(codec, dense), strict=True):
        assert torch.equal(strided.nan_to_num(), plain.nan_to_num())
    outside = buffer.view(blocks, -1).clone()
    outside[:, page + 16 : 2 * page + 16] = 0xAB
    assert (outside == 0xAB).all()


@every_dtype
def test_float_types_and_bad_numbers_are_those_of_the_codec(name):
    codec = PagedCodec(FORMATS[name], 64)
    key = gaussian(16, HEADS, 64).to(torch.bfloat16)
    key[3, 1, 7], key[4, 0, 0] = float("nan"), float("inf")
    cache = poisoned(codec, 1, 16, "0xFF")
    codec.write(cache, torch.arange(16), key, key)
    stored, _ = read_all(codec, cache)
    assert stored.isfinite().all()
    assert torch.equal(stored, expected(codec, key, key)[0])


# --- the bit-by-bit model ---


def _places(name: str, head_dim: int, role: str) -> tuple[dict[tuple[int, int, int], int], list[list[int]]]:
    """Bit positions in a micro-block, from the docstring of layout.py alone.

    Returns {(token, channel, bit of the code): bit position} and [token][group] -> byte of the scale.
    """
    fmt = FORMATS[name]
    group_bits = fmt.group_bits(head_dim)
    threes = group_bits.count(3)
    code_words = sum({4: 2, 3: 1, 2: 1}[bits] for bits in group_bits)
    words = code_words + threes // 2

    # A word of a lane -> byte in the codes of a role: chunks of 4, then 2, then 1, [32 lanes][words of the chunk].
    start, word_place, chunk_at = 0, {}, 0
    while start < words:
        width = 4 if words - start >= 4 else 2 if words - start >= 2 else 1
        for lane in range(32):
            for inner in range(width):
                word_place[lane, start + inner] = chunk_at + 4 * (lane * width + inner)
        chunk_at += 32 * 4 * width
        start += width
    halves_at = chunk_at
    code_bytes = halves_at + (64 if threes % 2 else 0)
    base = 0 if role == "key" else code_bytes

    places = {}
    for token in range(16):
        n3, n210, n0 = token >> 3, token & 7, token & 1
        n21 = token >> 1 & 3
        word = three = 0
        for group, bits in enumerate(group_bits):
            for d in range(32):
                d4, d3, d210, d21, d0 = d >> 4, d >> 3 & 1, d & 7, d >> 1 & 3, d & 1
                if role == "key":
                    lane, e = n210 * 4 + d21, n3 << 3 | d4 << 2 | d3 << 1 | d0
                else:
                    lane, e = d210 * 4 + n21, d4 << 3 | d3 << 2 | n3 << 1 | n0
                k, nibble = e & 7, 4 * (e >> 2 & 1) + 2 * (e & 1) + (e >> 1 & 1)
                in_word = word
                if bits == 4:
                    in_word += e >> 3
                    magnitude, sign = 4 * k, 8 * (k & 3) + (7 if k < 4 else 3)
                elif bits == 3:
                    magnitude, sign = 4 * nibble + 2 * (e >> 3), None
                else:
                    sign = 16 * (e & 1) + 15 - (e >> 1 & 1) - 2 * (e >> 2 & 1) - 8 * (e >> 3)
                    magnitude = sign - 4
                at = 8 * (base + word_place[lane, in_word])
                for bit in range(bits - 1):
                    places[token, 32 * group + d, bit] = at + magnitude + bit
                if sign is not None:
                    sign_at = at + sign
                elif three < threes // 2 * 2:
                    shift = 4 * nibble + 3 - 2 * (three % 2) - (e >> 3)
                    sign_at = 8 * (base + word_place[lane, code_words + three // 2]) + shift
                else:
                    shift = 4 * (nibble & 3) + 3 - 2 * (e >> 2 & 1) - (e >> 3)
                    sign_at = 8 * (base + halves_at + 2 * lane) + shift
                places[token, 32 * group + d, bits - 1] = sign_at
            word += 2 if bits == 4 else 1
            three += bits == 3
    groups = len(group_bits)
    scales_at = 2 * code_bytes + (0 if role == "key" else 16 * groups)
    if role == "key":  # [token & 7][group][token >> 3]
        offsets = [[(n & 7) * 2 * groups + 2 * group + (n >> 3) for group in range(groups)] for n in range(16)]
    else:  # [bits 2, 1 of the token][group][bit 3][bit 0]
        of_token = [4 * groups * (n >> 1 & 3) + 2 * (n >> 3) + (n & 1) for n in range(16)]
        offsets = [[offset + 4 * group for group in range(groups)] for offset in of_token]
    return places, [[scales_at + offset for offset in row] for row in offsets]


def _bits_by_slot(name: str, head_dim: int, cache: torch.Tensor) -> dict[int, list[int]]:
    """Every bit of a cache, sorted by the slot that it belongs to; each bit belongs to one."""
    blocks, heads, block_size, slot_bytes = cache.shape
    flat = cache.reshape(blocks, heads, block_size // 16, 16 * slot_bytes)
    result = {}
    key, key_scales = _places(name, head_dim, "key")
    value, value_scales = _places(name, head_dim, "value")
    for token in range(16):
        positions = [at for places in (key, value) for (t, _, _), at in places.items() if t == token]
        positions += [8 * byte + bit for byte in key_scales[token] + value_scales[token] for bit in range(8)]
        index = torch.tensor(positions)
        bits = flat[..., index // 8].int() >> (index % 8) & 1
        for block in range(blocks):
            for inner in range(block_size // 16):
                result[block * block_size + inner * 16 + token] = bits[block, :, inner].flatten().tolist()
    return result


@every_dtype
@every_head_dim
def test_the_drawing_gives_each_bit_one_owner(name, head_dim):
    owners = []
    for role in ("key", "value"):
        places, scales = _places(name, head_dim, role)
        owners += [*places.values(), *(8 * byte + bit for row in scales for byte in row for bit in range(8))]
    assert sorted(owners) == list(range(8 * 16 * FORMATS[name].slot_bytes(head_dim)))


@every_dtype
@every_head_dim
def test_bytes_are_those_of_the_drawing(name, head_dim):
    codec = PagedCodec(FORMATS[name], head_dim)
    cache = poisoned(codec, 1, 32, "random")
    key, value = gaussian(32, HEADS, head_dim), gaussian(32, HEADS, head_dim, seed=1)
    codec.write(cache, torch.arange(32), key, value)
    pages = cache.reshape(HEADS, 2, 16 * codec.slot_bytes)
    for role, vectors in (("key", key), ("value", value)):
        codes, scales = getattr(codec, role).quantize(vectors)
        places, scale_bytes = _places(name, head_dim, role)
        where = torch.tensor(list(places))
        at = torch.tensor(list(places.values()))
        for head in range(HEADS):
            for inner in range(2):
                page = pages[head, inner]
                mine = codes[16 * inner : 16 * inner + 16, head]
                drawn = mine[where[:, 0], where[:, 1]].int() >> where[:, 2] & 1
                assert torch.equal(page[at // 8].int() >> (at % 8) & 1, drawn)
                assert torch.equal(page[torch.tensor(scale_bytes)], scales[16 * inner : 16 * inner + 16, head])
