"""The store kernel writes the bytes of PagedCodec.write: on a GPU where there is one, else under the interpreter."""

from __future__ import annotations

import pytest
import torch
from launchers import rotate_query, run, store_tokens
from packed_kv import FORMATS
from packed_kv.channel_calibration import MIXES_NEIGHBOURS
from packed_kv.codecs.pages import PagedCodec
from packed_kv.kernels.triton import store_section
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.rotate import QueryRotation, RotateQueryLaunch, rotation_matrix
from packed_kv.kernels.triton.store import StoreLaunch
from packed_kv.kernels.units import LOG2_E
from packed_kv.layout import MEAN_BLOCK
from page_codecs import page_codec
from test_decode import rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 3

every_dtype = pytest.mark.parametrize("name", FORMATS)
with_outliers = pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.outlier_bits])

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # fp32 -> fp16 of a large ratio


@pytest.fixture(autouse=True)
def large_programs(monkeypatch):
    """The interpreter pays for operations, not for lanes."""
    if DEVICE == "cpu":
        monkeypatch.setattr(store_section, "ROWS", 4096)


def vectors(tokens: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """[2, tokens, HEADS, head_dim] of many magnitudes, with ties and numbers that are none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, HEADS, head_dim, generator=generator)
    x *= torch.logspace(-9, 6, tokens)[torch.randperm(tokens, generator=generator), None, None]
    x[:, 1::4] = x[:, 1::4].to(torch.float8_e5m2).float().nan_to_num(0, 0, 0)  # few bits: ties
    x[:, 2::8] = torch.randint(-3, 4, x[:, 2::8].shape, generator=generator).float()
    x[:, 3::16] = 0.0
    x[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    x[1, 4, 1, 5::7] = float("nan")
    x[1, 5, 0] = 1e-30
    x[0, 6, 1, 3] = 3e38
    return x.to(dtype)


def check(
    codec: PagedCodec,
    cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> None:
    """Store on DEVICE; compare with the reference on the CPU, the bytes between pages too."""
    expected = clone(cache)
    codec.write(expected, slots, key, value, positions)
    channels = channels_of(codec.key, "key") | channels_of(codec.value, "value")
    sizes = {"head_dim": codec.key.head_dim, "value_dim": codec.value.head_dim}
    on_device = page_codec(codec.key.fmt, device=DEVICE, **sizes, **channels)
    actual = to_device(cache)
    on_device_positions = None if positions is None else positions.to(DEVICE)
    store_tokens(on_device, actual, slots.to(DEVICE), to_device(key), to_device(value), on_device_positions)
    assert torch.equal(storage(actual).cpu(), storage(expected))


def storage(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def clone(x: torch.Tensor) -> torch.Tensor:
    return storage(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def to_device(x: torch.Tensor) -> torch.Tensor:
    return clone(x) if DEVICE == "cpu" else storage(x).to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def channels_of(codec, role: str) -> dict[str, torch.Tensor]:
    transform = codec.transform
    parts = ("scale", "mean", "first_mean") if role == "key" else ("scale",)
    numbers = {part: getattr(transform, part) for part in parts}
    given = {f"{role}_{part}": None if x is None else x[..., : codec.head_dim] for part, x in numbers.items()}
    if role == "key":
        given["key_rope"] = transform.rope
        given["positions"] = None if transform.grows else transform.mean_blocks * MEAN_BLOCK
    if codec.order is not None and codec.outlier_count:
        given[f"{role}_outlier_channels"] = codec.order[..., : codec.outlier_count]
    elif codec.order is not None:
        given[f"{role}_channel_order"] = codec.order[..., : codec.head_dim]
    return given


def poisoned(codec: PagedCodec, blocks: int, block_size: int) -> torch.Tensor:
    shape = (blocks, HEADS, block_size, codec.slot_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def shuffled(tokens: int, blocks: int, block_size: int) -> torch.Tensor:
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[5::9] = -1
    return slots


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 320], ids="d{}".format)
def test_bytes(name, head_dim):
    codec = PagedCodec(FORMATS[name], head_dim)
    check(codec, poisoned(codec, 4, 32), shuffled(90, 4, 32), *vectors(90, head_dim))


@every_dtype
@pytest.mark.parametrize(("value_dim", "calibrated"), [(128, False), (80, True)], ids=["v128", "v80 calibrated"])
def test_bytes_of_values_of_fewer_channels(name, value_dim, calibrated):
    """The values are views whose rows go on behind their channels, with what is none of theirs."""
    channels = {}
    if calibrated:
        order = torch.stack([torch.randperm(80, generator=torch.Generator().manual_seed(i)) for i in range(HEADS)])
        channels = {"value_scale": (2 * torch.randn(HEADS, 80)).exp2()}
        if count := FORMATS[name].outlier_channels(192):
            channels["value_outlier_channels"] = order[:, :count].sort(-1).values
        else:
            channels["value_channel_order"] = order
    codec = page_codec(FORMATS[name], 192, value_dim=value_dim, **channels)
    key, value = vectors(40, 192)
    check(codec, poisoned(codec, 2, 32), shuffled(40, 2, 32), key, value[..., :value_dim])


@every_dtype
def test_bytes_with_the_rows_of_a_launch(name, monkeypatch):
    monkeypatch.setattr(store_section, "ROWS", 8)
    codec = PagedCodec(FORMATS[name], 96)
    check(codec, poisoned(codec, 1, 16), shuffled(7, 1, 16), *vectors(7, 96))


@every_dtype
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_input_types(name, dtype):
    codec = PagedCodec(FORMATS[name], 64)
    check(codec, poisoned(codec, 6, 16), shuffled(80, 6, 16), *vectors(80, 64, dtype))


@every_dtype
@pytest.mark.parametrize("block_size", [16, 48, 128], ids="block{}".format)
def test_block_sizes_and_whole_micro_blocks(name, block_size):
    """All slots of the pages, in order, as int32."""
    codec = PagedCodec(FORMATS[name], 64)
    slots = torch.arange(2 * block_size, dtype=torch.int32)
    check(codec, poisoned(codec, 2, block_size), slots, *vectors(len(slots), 64))


@with_outliers
@pytest.mark.parametrize("roles", ["key", "value", "both"])
def test_outliers_of_each_head(name, roles):
    count = FORMATS[name].outlier_channels(128)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(128, generator=generator)[:count].sort().values for _ in range(HEADS)])
    given = {"key": (chosen, None), "value": (None, chosen[0]), "both": (chosen, chosen.flip(0))}
    key, value = given[roles]
    codec = page_codec(FORMATS[name], 128, key_outlier_channels=key, value_outlier_channels=value)
    check(codec, poisoned(codec, 4, 16), shuffled(50, 4, 16), *vectors(50, 128))


@pytest.mark.parametrize("roles", ["key", "value", "both"])
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.rotation in MIXES_NEIGHBOURS])
def test_channel_order_of_each_head(name, roles):
    generator = torch.Generator().manual_seed(1)
    orders = torch.stack([torch.randperm(96, generator=generator) for _ in range(HEADS)])
    given = {"key": (orders, None), "value": (None, orders[0]), "both": (orders, orders.flip(0))}
    key_channel_order, value_channel_order = given[roles]
    codec = page_codec(FORMATS[name], 96, key_channel_order=key_channel_order, value_channel_order=value_channel_order)
    check(codec, poisoned(codec, 4, 16), shuffled(50, 4, 16), *vectors(50, 96))


def transforms(head_dim: int) -> dict[str, torch.Tensor]:
    """Means and scales with all their bits, so that another order of operations shows."""
    generator = torch.Generator().manual_seed(5)
    mean, first_mean, scale, value_scale = torch.randn(4, HEADS, head_dim, generator=generator)
    return dict(
        key_mean=mean, key_scale=scale.exp2(), key_first_mean=30 * first_mean, value_scale=(2 * value_scale).exp2()
    )


@every_dtype
@pytest.mark.parametrize(("head_dim", "ordered"), [(96, True), (128, False)], ids=["d96 ordered", "d128"])
def test_centred_and_scaled_bytes(name, head_dim, ordered):
    channels = {}
    if ordered:
        order = torch.stack(
            [torch.randperm(head_dim, generator=torch.Generator().manual_seed(i)) for i in range(HEADS)]
        )
        if count := FORMATS[name].outlier_channels(head_dim):
            chosen = order[:, :count].sort(-1).values
            channels = {"key_outlier_channels": chosen, "value_outlier_channels": chosen[0]}
        else:
            channels = {"key_channel_order": order, "value_channel_order": order[0]}
    codec = page_codec(FORMATS[name], head_dim, **transforms(head_dim), **channels)
    positions = torch.arange(90) % 7
    check(codec, poisoned(codec, 4, 32), shuffled(90, 4, 32), *vectors(90, head_dim), positions)


@every_dtype
@pytest.mark.parametrize("has_first", [False, True], ids=["as its block", "first"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_bytes_centred_by_blocks_of_positions(name, interleaved, has_first):
    """Positions of several requests in any order, 0 and the borders of blocks among them, and some beyond the table."""
    channels = transforms(96)
    if not has_first:
        del channels["key_first_mean"]
    order = torch.stack([torch.randperm(80, generator=torch.Generator().manual_seed(i)) for i in range(HEADS)])
    channels = {key: x[:, :80] for key, x in channels.items()}
    if count := FORMATS[name].outlier_channels(80):
        channels["key_outlier_channels"] = order[:, :count].sort(-1).values
    else:
        channels["key_channel_order"] = order
    channels |= {"key_rope": rope(33, interleaved=interleaved), "positions": 5 * MEAN_BLOCK - 3}
    codec = page_codec(FORMATS[name], 80, **channels)
    borders = MEAN_BLOCK * torch.arange(9)
    positions = torch.cat((borders, borders[1:] - 1, borders + 1, 31 * torch.arange(64)))
    positions = positions[torch.randperm(90, generator=torch.Generator().manual_seed(2))]
    check(codec, poisoned(codec, 4, 32), shuffled(90, 4, 32), *vectors(90, 80), positions)


def test_bytes_of_one_block_that_turns():
    codec = page_codec(FORMATS["tq4"], 64, **transforms(64), key_rope=rope(32), positions=MEAN_BLOCK)
    assert codec.key.transform.mean_blocks == 1
    check(codec, poisoned(codec, 4, 16), shuffled(40, 4, 16), *vectors(40, 64), torch.arange(40) % 30)


@pytest.mark.parametrize(
    "given",
    [("key_mean",), ("key_scale",), ("key_first_mean",), ("value_scale",), ("key_mean", "value_scale")],
    ids=str,
)
@pytest.mark.parametrize("per_head", [False, True], ids=["one", "each"])
def test_each_transform_alone(given, per_head):
    chosen = {key: value if per_head else value[0] for key, value in transforms(64).items() if key in given}
    codec = page_codec(FORMATS["turboquant25"], 64, **chosen)
    positions = torch.arange(40) % 3 if "key_first_mean" in given else None
    check(codec, poisoned(codec, 4, 16), shuffled(40, 4, 16), *vectors(40, 64, torch.float32), positions)


def test_a_mean_of_first_tokens_needs_positions():
    codec = page_codec(FORMATS["tq4"], 64, device=DEVICE, key_first_mean=[1.0] * 64)
    key = torch.zeros(3, HEADS, 64, device=DEVICE)
    with pytest.raises(AssertionError):
        store_tokens(codec, poisoned(codec, 1, 16).to(DEVICE), torch.arange(3, device=DEVICE), key, key)


@every_dtype
def test_strided_inputs_and_padded_pages(name):
    """K and V as slices of one QKV tensor, more rows than slots, pages of another layer between ours."""
    head_dim, tokens, blocks, block_size = 128, 40, 3, 16
    codec = PagedCodec(FORMATS[name], head_dim)
    qkv = torch.full((tokens + 3, 2 * HEADS + 5, head_dim), float("nan"), dtype=torch.bfloat16)
    key, value = qkv[:, 5 : 5 + HEADS], qkv[:, 5 + HEADS :]
    key[:tokens], value[:tokens] = vectors(tokens, head_dim)
    head_bytes = block_size * codec.slot_bytes + 4
    buffer = torch.full((blocks * 2 * HEADS * head_bytes + 52,), 0xAB, dtype=torch.uint8)
    strides = (2 * HEADS * head_bytes + 16, head_bytes, codec.slot_bytes, 1)
    cache = buffer.as_strided((blocks, HEADS, block_size, codec.slot_bytes), strides, 4)
    slots = shuffled(tokens, blocks, block_size)
    expected = clone(cache)
    codec.write(expected, slots, key[:tokens], value[:tokens])
    actual = to_device(cache)
    on_device = PagedCodec(FORMATS[name], head_dim, device=DEVICE)
    store_tokens(on_device, actual, slots.to(DEVICE), to_device(key), to_device(value))
    assert torch.equal(storage(actual).cpu(), storage(expected))


def test_a_launch_owns_no_memory():
    """CUDA graphs keep its addresses when another launch has taken its place, so all are of tensors that others own."""
    codec = page_codec(FORMATS["tq4"], 64, device=DEVICE, **transforms(64))
    cache, key = poisoned(codec, 2, 16).to(DEVICE), vectors(20, 64)[0].to(DEVICE)
    first, second = (StoreLaunch(codec, cache, key, key) for _ in range(2))
    assert first.fixed.raw == second.fixed.raw


def test_nothing_to_store():
    codec = PagedCodec(FORMATS["turboquant35"], 64, device=DEVICE)
    cache = poisoned(codec, 1, 16).to(DEVICE)
    kept, key = cache.clone(), torch.full((9, HEADS, 64), float("nan"), device=DEVICE)
    store_tokens(codec, cache, torch.full((9,), -1, device=DEVICE), key, key)
    store_tokens(codec, cache, torch.zeros(0, dtype=torch.int64, device=DEVICE), key[:0], key[:0])
    assert torch.equal(cache, kept)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 3 GB of GPU memory")
def test_offsets_beyond_2_gib():
    codec = PagedCodec(FORMATS["tq4"], 128, device=DEVICE)
    page = HEADS * 16 * codec.slot_bytes
    blocks = (2**31 + 2**29) // page
    cache = torch.full((blocks, HEADS, 16, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    key, value = vectors(16, 128).to(DEVICE)
    slots = torch.arange(16, device=DEVICE) + 16 * (blocks - 1)
    expected = cache[-1:].clone()
    codec.write(expected, slots % 16, key, value)
    store_tokens(codec, cache, slots, key, value)
    assert torch.equal(cache[-1:], expected)
    assert (cache[:-1] == 0xFF).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_cuda_graph():
    codec = PagedCodec(FORMATS["turboquant35"], 128, device=DEVICE)
    cache, key, value = poisoned(codec, 4, 16).to(DEVICE), *vectors(32, 128).to(DEVICE)
    slots = shuffled(32, 4, 16).to(DEVICE)
    expected, padded = cache.clone(), torch.full_like(slots, -1)
    codec.write(expected, slots, key, value)
    store_tokens(codec, cache, padded, key, value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_tokens(codec, cache, padded, key, value)
    padded.copy_(slots)
    graph.replay()
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("head_dim", "means", "tokens"),
    [(64, "", 40), (80, "one", 7), (96, "one", 1), (80, "blocks", 7), (64, "blocks", 40)],
)
def test_queries_are_rotated_in_the_same_launch(head_dim, means, tokens):
    """As by `rotate_query`, those of the first tokens; and the pages are as without."""
    given = {}
    if means:
        given = {"key_mean": torch.randn(HEADS, head_dim), "key_first_mean": torch.randn(HEADS, head_dim)}
    if means == "blocks":
        given |= {"key_rope": rope(head_dim // 2), "positions": 20000}
    check_rotated_queries(page_codec(FORMATS["isoquant4"], head_dim, device=DEVICE, **given), tokens)


def check_rotated_queries(codec, tokens):
    head_dim = codec.key.head_dim
    group, decodes = 5, -(-tokens // 2)
    query = to_device(torch.randn(tokens, HEADS * group + 2, head_dim).to(torch.bfloat16))[:, 1:-1]
    rotation = QueryRotation(rotation_matrix(codec.key, HEADS), 0.3, Means.of(codec.key.transform))
    assert (rotation.means is not None) == codec.key.transform.centres
    shape = (decodes, HEADS, group, codec.key.stored_dim)
    rotated, expected = (torch.full(shape, 7.0, dtype=torch.float16, device=DEVICE) for _ in range(2))
    bias = expected_bias = None
    if rotation.means is not None:
        of_bias = (decodes, HEADS * group, 1 + rotation.means.blocks)
        bias, expected_bias = (torch.full(of_bias, 7.0, device=DEVICE) for _ in range(2))
    slots, positions = shuffled(tokens, 3, 16).to(DEVICE), (137 * torch.arange(tokens, device=DEVICE) + 200)
    rotate_query(query[:decodes], rotation.matrix, expected, rotation.scale, rotation.means, positions, expected_bias)

    key, value = map(to_device, vectors(40, head_dim)[:, :tokens].contiguous())
    pages, alone = (to_device(poisoned(codec, 3, 16)) for _ in range(2))
    store_tokens(codec, alone, slots, key, value, positions)
    launch = StoreLaunch(codec, pages, key, value, None, (query, rotation))
    rotate = RotateQueryLaunch.step(rotated, rotation, positions, bias)
    run(launch, StoreLaunch.step(codec, HEADS, slots, positions, None, rotate), key, value, query)
    assert torch.equal(pages, alone)
    assert torch.equal(rotated, expected) if DEVICE == "cpu" else torch.allclose(rotated, expected, atol=2e-3)
    assert bias is None or torch.allclose(bias, expected_bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "rows"), [(32, 1), (80, 7), (128, 11), (192, 5)])
def test_rotated_queries_are_products(head_dim, rows, dtype):
    """With the matrix of each head, in fp32; rows and channels of which there are none stay as they are."""
    generator = torch.Generator().manual_seed(0)
    stored_dim, group = -(-head_dim // 32) * 32, 3
    matrix = torch.randn(HEADS, stored_dim, stored_dim, generator=generator).half()
    query = torch.randn(rows, HEADS * group + 1, head_dim, generator=generator).to(dtype)[:, 1:]
    room = torch.full((rows + 1, HEADS, group, stored_dim), 7.0, dtype=torch.float16, device=DEVICE)
    rotate_query(to_device(query), matrix.to(DEVICE), room[:rows], 0.01)
    padded = torch.nn.functional.pad(query.half().float(), (0, stored_dim - head_dim)).unflatten(1, (HEADS, group))
    expected = torch.einsum("thgd,hde->thge", padded, matrix.float()) * 0.01 * LOG2_E
    assert torch.allclose(room[:rows].cpu().float(), expected, rtol=1e-3, atol=1e-3)
    assert (room[rows] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "positions"), [(80, None), (64, 3 * MEAN_BLOCK), (128, 5000)])
def test_biases(head_dim, positions, dtype):
    """In float64 from what the reference takes off keys, at scales where less than fp32 would show."""
    given = transforms(head_dim)
    given["key_mean"] *= 100
    if positions is not None:
        given |= {"key_rope": rope(head_dim // 2 - 1), "positions": positions}
    codec = page_codec(FORMATS["tq4"], head_dim, device=DEVICE, **given)
    means, group = Means.of(codec.key.transform), 3
    last = torch.tensor([5, 4990, 191, 192, 0, 1100, 1001], device=DEVICE).clamp(max=(positions or 9999) - 1)
    query = torch.randn(7, HEADS * group, head_dim, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    rotated = torch.empty(7, HEADS, group, codec.key.stored_dim, dtype=torch.float16, device=DEVICE)
    bias = torch.full((7, HEADS * group, 1 + means.blocks), float("nan"), device=DEVICE)
    rotate_query(query, rotation_matrix(codec.key, HEADS), rotated, 0.5, means, last, bias)
    block = torch.arange(means.blocks, device=DEVICE)
    of_blocks = codec.key.transform.means((block * MEAN_BLOCK).clamp(min=1)[:, None]).expand(means.blocks, HEADS, -1)
    of_first = codec.key.transform.means(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)) - of_blocks[:1]
    removed = torch.cat((of_first, of_blocks))[..., :head_dim].double().repeat_interleave(group, 1)
    expected = torch.einsum("thd,bhd->thb", query.double(), removed) * 0.5 * LOG2_E
    needed = (block * MEAN_BLOCK <= last[:, None] + 63) if positions else block == block + 0 * last[:, None]
    needed = torch.nn.functional.pad(needed, (1, 0), value=True)[:, None].expand(bias.shape)
    bound = 2**-11 if dtype == torch.float32 else 1e-6  # queries in fp32 are rounded to 11 bits
    assert (bias - expected)[needed].norm() < bound * expected[needed].norm()
    assert bias[-1, 0, -1].isnan() == (means.blocks > 16)
