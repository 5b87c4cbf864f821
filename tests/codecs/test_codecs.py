"""Reference codecs: error, rotations, bad numbers, bad input, the scale search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_kv import FORMATS, get_codec
from packed_kv.channel_calibration import MIXES_NEIGHBOURS
from packed_kv.codecs import scalar
from packed_kv.codecs.rotations import ROTATIONS
from packed_kv.formats import CODES, GROUP_SIZE, MAX_SCALE_BYTE

HEAD_DIMS = (64, 96, 128, 192, 256)
MSE_BOUNDS = {(4, None): 0.0066, (3, 4): 0.022, (3, None): 0.027, (2, 3): 0.089}
"""Bits and outlier bits -> relative MSE on Gaussian vectors at head_dim 128, whatever the rotation; other sizes may be
10 % worse."""
WITH_OUTLIERS = [name for name, fmt in FORMATS.items() if fmt.outlier_bits]

every_dtype = pytest.mark.parametrize("name", FORMATS)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS, ids="d{}".format)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mse_bound(name: str) -> float:
    return MSE_BOUNDS[FORMATS[name].bits, FORMATS[name].outlier_bits]


def relative_mse(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((x.double() - decoded).square().sum() / x.double().square().sum())


# --- error ---


@every_dtype
@every_head_dim
def test_error_on_gaussian_vectors(name, head_dim):
    x = gaussian(2000, head_dim)
    codec = get_codec(name, head_dim)
    bound = mse_bound(name) * (1 if head_dim == 128 else 1.1)
    assert relative_mse(x, codec.decode(codec.encode(x))) <= bound


@every_dtype
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4], ids="x{:g}".format)
def test_error_does_not_depend_on_the_scale(name, scale):
    x = gaussian(500, 128) * scale
    codec = get_codec(name, 128)
    assert relative_mse(x, codec.decode(codec.encode(x))) <= 1.05 * mse_bound(name)


# --- rotations ---


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("size", [32, 64, 96, 128, 192, 224, 256])
def test_rotations_are_orthonormal(rotation, size):
    rotate = ROTATIONS[rotation](size, torch.device("cpu"))
    matrix = rotate.forward(torch.eye(size)).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-6)
    x = gaussian(50, size)
    assert torch.allclose(rotate.inverse(rotate.forward(x)), x, atol=1e-5)
    assert torch.allclose(rotate.forward(rotate.inverse(x)), x, atol=1e-5)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_every_block_of_a_rotation_mixes(rotation):
    matrix = ROTATIONS[rotation](96, torch.device("cpu")).forward(torch.eye(96))
    assert ((matrix.abs() > 1e-3).sum(-1) >= 2).all()


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotations_of_neighbours_are_listed(rotation):
    """Rotations that mix four channels at most: a calibration file orders the channels of their dtypes."""
    matrix = ROTATIONS[rotation](128, torch.device("cpu")).forward(torch.eye(128))
    within = torch.block_diag(*[torch.ones(4, 4)] * 32)
    assert bool((matrix[within == 0] == 0).all()) == (rotation in MIXES_NEIGHBOURS), "see MIXES_NEIGHBOURS"


@every_dtype
def test_rotation_preserves_dot_products(name):
    codec = get_codec(name, 128)
    q, k = gaussian(64, 128), gaussian(64, 128, seed=1)
    assert torch.allclose((codec.rotate(q) * codec.rotate(k)).sum(-1), (q * k).sum(-1), atol=1e-4)


@every_dtype
def test_attention_may_stay_in_the_rotated_space(name):
    codec = get_codec(name, 128)
    x = gaussian(8, 128)
    rotated = codec.dequantize(*codec.unpack(codec.encode(x)))
    assert torch.equal(codec.unrotate(rotated), codec.decode(codec.encode(x)))


# --- numbers that are not ordinary ---


@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_non_finite_channel_counts_as_zero(name, bad):
    codec = get_codec(name, 128)
    x = gaussian(4, 128)
    as_zero = x.clone()
    x[1, 5], as_zero[1, 5] = bad, 0.0
    x[1, 77], as_zero[1, 77] = bad, 0.0
    assert torch.equal(codec.encode(x), codec.encode(as_zero))
    assert codec.decode(codec.encode(x)).isfinite().all()


@every_dtype
@pytest.mark.parametrize("zero", [0.0, -0.0, math.nan], ids=str)
def test_zero_stays_zero(name, zero):
    codec = get_codec(name, 128)
    packed = codec.encode(torch.full((2, 128), zero))
    assert (codec.unpack(packed)[1] == 0).all()
    assert (codec.decode(packed) == 0).all()


@every_dtype
@pytest.mark.parametrize(
    "value", [1e-45, 1e-38, 6e-8, 65504.0, torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max], ids=str
)
def test_extreme_values_give_finite_results(name, value):
    """Tiny vectors vanish below the smallest scale, 2^-17; large ones are clamped to 2^15 and saturate, signs kept."""
    codec = get_codec(name, 128)
    x = gaussian(16, 128).sign() * value
    packed = codec.encode(x)
    decoded = codec.decode(packed)
    assert codec.unpack(packed)[1].max() <= MAX_SCALE_BYTE
    assert decoded.isfinite().all()
    if value > 1:
        assert (decoded.sign() == x.sign()).float().mean() > 0.85
        assert relative_mse(x.clamp(-32768, 32768), decoded) < 0.25
    else:
        assert decoded.abs().max() < 2**-17


@every_dtype
def test_the_largest_bfloat16_in_one_channel_spares_other_vectors(name):
    codec = get_codec(name, 128)
    x = gaussian(3, 128)
    alone = codec.encode(x)
    x[1, 9] = torch.finfo(torch.bfloat16).max
    packed = codec.encode(x)
    assert torch.equal(packed[[0, 2]], alone[[0, 2]])
    assert codec.decode(packed).isfinite().all()


# --- centred and scaled channels ---


def transforms(heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    """Means, scales and first means of channels, another of each head."""
    mean = 20 * gaussian(heads, head_dim, seed=11)
    return dict(mean=mean, scale=(2 * gaussian(heads, head_dim, seed=12)).exp2(), first_mean=mean.flip(0) / 3)


@every_dtype
def test_transforms_that_change_nothing_change_no_bit(name):
    x = gaussian(40, 3, 128) * torch.logspace(-9, 6, 40)[:, None, None]
    x[5, 1, 7], x[6, 1, 8] = math.nan, -0.0
    identity = dict(mean=torch.zeros(3, 128), scale=torch.ones(128), first_mean=torch.zeros(3, 128))
    codec, plain = get_codec(name, 128, **identity), get_codec(name, 128)
    positions = torch.arange(40)[:, None] % 2
    packed = codec.encode(x, positions)
    assert torch.equal(packed, plain.encode(x))
    assert torch.equal(codec.decode(packed, positions), plain.decode(packed))


@every_dtype
@pytest.mark.parametrize(
    "given", [("mean",), ("scale",), ("mean", "first_mean"), ("mean", "scale", "first_mean")], ids=str
)
def test_what_is_coded_is_centred_and_scaled(name, given):
    chosen = {key: value for key, value in transforms(3, 128).items() if key in given}
    codec, plain = get_codec(name, 128, **chosen), get_codec(name, 128)
    x = gaussian(20, 3, 128) + chosen.get("mean", 0.0)
    positions = torch.arange(20)[:, None] % 5
    mean = chosen.get("mean", torch.zeros(3, 128)).repeat(20, 1, 1)
    mean[positions[:, 0] == 0] = chosen.get("first_mean", mean[0].clone())
    scale = chosen.get("scale", torch.ones(3, 128))
    packed = codec.encode(x, positions)
    assert torch.equal(packed, plain.encode((x - mean) * scale))
    assert torch.equal(codec.decode(packed, positions), plain.decode(packed) / scale + mean)
    later = plain.encode((x - chosen.get("mean", 0.0)) * scale)
    assert torch.equal(codec.encode(x, torch.tensor(10**6)), later)
    if "first_mean" not in given:
        assert torch.equal(codec.encode(x), later)


@every_dtype
def test_bad_numbers_are_cleaned_before_the_mean_and_clamped_after_the_scale(name):
    codec, plain = get_codec(name, 64, mean=torch.full((64,), 8.0), scale=[4.0] * 64), get_codec(name, 64)
    x = gaussian(4, 64)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6] = math.nan, math.inf, 30000.0, torch.finfo(torch.float32).min
    cleaned = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(codec.encode(x), plain.encode(((cleaned - 8) * 4).clamp(-32768, 32768)))


@pytest.mark.parametrize("name", ["tq4", "turboquant35", "isoquant3"])
def test_centred_keys_lose_less(name):
    """A large constant in a few channels, as k biases leave it, costs nothing once it is taken off."""
    mean = torch.zeros(128)
    mean[::17] = 25.0
    noise = gaussian(500, 128)
    error = [
        float((codec.decode(codec.encode(noise + mean)) - noise - mean).square().sum() / noise.square().sum())
        for codec in (get_codec(name, 128), get_codec(name, 128, mean=mean))
    ]
    assert error[1] <= 1.05 * mse_bound(name) < 0.3 * error[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mean": [0.0] * 64}, r"mean must be numbers \[128\] or \[heads, 128\], got \(64,\)"),
        ({"scale": torch.ones(2, 2, 128)}, r"scale must be numbers .*, got \(2, 2, 128\)"),
        ({"scale": [[1.0] * 128, [1.0]]}, r"scale must be numbers .*, got \[\[1.0"),
        ({"first_mean": ["one"]}, r"first_mean must be numbers .*, got \['one'\]"),
        ({"mean": [math.nan] * 128}, r"mean must be in \[-32768, 32768\], got nan"),
        ({"first_mean": [1e30] * 128}, r"first_mean must be in \[-32768, 32768\], got 1e\+30"),
        ({"scale": [1.0] * 127 + [0.0]}, r"scale must be in \[0.000976562, 1024\], got 0"),
        ({"scale": [1.0] * 127 + [-2.0]}, r"scale must be in .*, got -2"),
        ({"scale": [1.0] * 127 + [math.inf]}, r"scale must be in .*, got inf"),
        ({"mean": torch.zeros(2, 128), "scale": torch.ones(3, 128)}, "numbers of heads: mean for 2, scale for 3"),
    ],
    ids=["size", "dimensions", "ragged", "words", "NaN", "large mean", "zero", "negative", "infinite", "heads"],
)  # fmt: skip
def test_bad_transforms_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        get_codec("tq4", 128, **given)


def test_heads_of_transforms_are_those_of_the_input():
    codec = get_codec("tq4", 64, mean=torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"for 2 heads; expected \[..., 2, 64\], got \(5, 3, 64\)"):
        codec.encode(gaussian(5, 3, 64))


# --- shapes and dtypes ---


@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_shapes(name, shape):
    codec = get_codec(name, 96)
    packed = codec.encode(gaussian(*shape, 96))
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape, FORMATS[name].vector_bytes(96))
    decoded = codec.decode(packed)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (*shape, 96)


@every_dtype
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_float_types_are_read_as_float32(name, dtype):
    codec = get_codec(name, 64)
    x = gaussian(9, 64).to(dtype)
    assert torch.equal(codec.encode(x), codec.encode(x.float()))


@every_dtype
def test_vectors_are_independent_and_strides_do_not_matter(name):
    codec = get_codec(name, 128)
    x = gaussian(128, 6, 4)
    strided = x.permute(2, 1, 0)
    packed = codec.encode(strided)
    assert torch.equal(packed, codec.encode(strided.contiguous()))
    assert torch.equal(packed[1, 2], codec.encode(strided[1, 2].clone()))
    wide = torch.zeros(4, 6, 2 * codec.vector_bytes, dtype=torch.uint8)
    wide[..., ::2] = packed
    assert torch.equal(codec.decode(wide[..., ::2]), codec.decode(packed))


@every_dtype
def test_decoding_changes_nothing_and_repeats(name):
    codec = get_codec(name, 128)
    x = gaussian(10, 128)
    before = x.clone()
    packed = codec.encode(x)
    kept = packed.clone()
    first = codec.decode(packed)
    assert torch.equal(first, codec.decode(packed))
    assert torch.equal(packed, kept)
    assert torch.equal(x, before)


# --- bad input ---


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'int4'; known: .*tq4"):
        get_codec("int4", 128)


@every_dtype
def test_bad_arguments_are_refused(name):
    with pytest.raises(ValueError, match="multiple of 16, got 72"):
        get_codec(name, 72)
    with pytest.raises(ValueError, match='must be "key" or "value", got \'k\''):
        get_codec(name, 128, role="k")


@every_dtype
@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 64), torch.zeros(128, 2), torch.tensor(1.0), torch.zeros(2, 128, dtype=torch.int32),
     torch.zeros(2, 128, dtype=torch.complex64)],
    ids=lambda x: f"{x.dtype}{tuple(x.shape)}",
)  # fmt: skip
def test_encode_refuses_other_tensors(name, x):
    with pytest.raises(ValueError, match=r"expected a floating-point tensor \[..., 128\], got"):
        get_codec(name, 128).encode(x)


@every_dtype
def test_decode_refuses_other_tensors(name):
    codec = get_codec(name, 128)
    for packed in (
        torch.zeros(2, codec.vector_bytes),
        torch.zeros(codec.vector_bytes, dtype=torch.int8),
        torch.zeros(3, codec.vector_bytes + 1, dtype=torch.uint8),
        torch.tensor(1, dtype=torch.uint8),
    ):
        with pytest.raises(ValueError, match=rf"expected uint8 \[..., {codec.vector_bytes}\], got"):
            codec.decode(packed)


@every_dtype
@pytest.mark.parametrize("other", FORMATS)
def test_decode_refuses_vectors_of_another_size_of_format(name, other):
    """Formats of equal size differ in rotation only, which bytes do not show."""
    codec, packed = get_codec(name, 128), get_codec(other, 128).encode(gaussian(2, 128))
    if FORMATS[other].vector_bytes(128) != codec.vector_bytes:
        with pytest.raises(ValueError, match="packed by another format"):
            codec.decode(packed)


# --- the scale search ---

group_values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=GROUP_SIZE, max_size=GROUP_SIZE)
widths = st.sampled_from(sorted(CODES))


@settings(max_examples=200, deadline=None)
@given(bits=widths, values=group_values)
def test_searched_scale_is_never_worse_than_absmax_over_largest_magnitude(bits, values):
    x = torch.tensor(values)
    searched, absmax = scalar.search_scale(x, bits), scalar.absmax_scale(x, bits)
    assert searched <= MAX_SCALE_BYTE
    assert scalar.group_error(x, searched, bits) <= scalar.group_error(x, absmax, bits)


@settings(max_examples=200, deadline=None)
@given(bits=widths, values=group_values)
def test_every_code_is_the_nearest(bits, values):
    x = torch.tensor(values)
    codes, scale = scalar.quantize(x, bits)
    step = scalar.decode_scale(scale).double()
    levels = torch.tensor(CODES[bits].magnitudes, dtype=torch.float64)
    nearest = (x.double().abs().unsqueeze(-1) - step * levels).abs()
    chosen = (x.double().abs() - step * levels[codes.long() % len(levels)]).abs()
    assert torch.equal(chosen, nearest.amin(-1))
    assert torch.equal(codes.long() // len(levels), (x < 0).long())
    if step > 0:
        assert torch.equal(nearest.argmin(-1), codes.long() % len(levels))  # argmin: a tie takes the lower


def test_the_search_is_that_of_the_document():
    assert {bits: code.search for bits, code in CODES.items()} == {5: (6, 0), 4: (4, 2), 3: (2, 4), 2: (0, 10)}


@pytest.mark.parametrize("bits", CODES)
def test_values_beyond_the_largest_scale_start_the_search_at_it(bits):
    assert scalar.absmax_scale(torch.full((GROUP_SIZE,), 1e9), bits) == MAX_SCALE_BYTE


def test_of_two_scales_of_equal_error_the_larger_is_kept():
    """9/8 is magnitude 9/8 of scale 1 and magnitude 3/2 of scale 3/4."""
    codes, scale = scalar.quantize(torch.full((GROUP_SIZE,), 9 / 8), 4)
    assert scalar.decode_scale(scale) == 1
    assert (codes == CODES[4].magnitudes.index(9 / 8)).all()


@pytest.mark.parametrize("bits", CODES)
def test_a_value_between_two_magnitudes_takes_the_lower(bits):
    levels = torch.tensor(CODES[bits].magnitudes)
    for lower in range(len(levels) - 1):
        x = levels.repeat(GROUP_SIZE // len(levels))
        x[0] = (levels[lower] + levels[lower + 1]) / 2
        codes, scale = scalar.quantize(-x, bits)
        assert scalar.decode_scale(scale) == 1
        assert codes[0] == len(levels) + lower


def test_with_scale_zero_values_take_the_largest_magnitude():
    x = torch.zeros(GROUP_SIZE)
    x[:2] = torch.tensor([1e-20, -1e-20])
    codes, scale = scalar.quantize(x, 3)
    assert scale == 0
    assert codes[:3].tolist() == [3, 7, 0]


@pytest.mark.parametrize("bits", CODES)
def test_the_search_visits_exactly_the_candidates_of_the_document(bits):
    """All 243 scales by brute force, restricted to b0 - below .. b0 + above; the highest of equal error wins."""
    above, below = CODES[bits].search
    x = gaussian(400, GROUP_SIZE) * torch.logspace(-7, 5, 400).unsqueeze(-1)
    errors = torch.stack([scalar.group_error(x, torch.tensor([s], dtype=torch.uint8), bits) for s in range(243)], -1)
    start = scalar.absmax_scale(x, bits).long().unsqueeze(-1)
    scales = torch.arange(243)
    errors = errors.masked_fill((scales > start + above) | (scales < start - below), math.inf)
    assert torch.equal(scalar.search_scale(x, bits).long(), 242 - errors.flip(-1).argmin(-1))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(FORMATS)), head_dim=st.sampled_from(HEAD_DIMS), seed=st.integers(0, 2**31),
       log_scale=st.floats(-3, 3), tail=st.sampled_from((0.0, 0.5, 1.0)))  # fmt: skip
def test_a_second_round_trip_adds_nothing_but_rounding(name, head_dim, seed, log_scale, tail):
    """docs/formats.md: the kept scale is found again, so only the rotations' fp32 rounding is added."""
    noise = gaussian(16, head_dim, seed=seed)
    x = noise * torch.exp(tail * gaussian(16, head_dim, seed=seed + 1)) * 10**log_scale
    codec = get_codec(name, head_dim)
    once = codec.decode(codec.encode(x))
    twice = codec.decode(codec.encode(once))
    first, second = (x - once).double().square().sum(-1), (once - twice).double().square().sum(-1)
    assert (second < 1e-9 * first).all()


@settings(max_examples=100, deadline=None)
@given(bits=widths, seed=st.integers(0, 2**31), log_scale=st.floats(-3, 4), tail=st.sampled_from((0.0, 1.0)))
def test_coding_a_decoded_group_again_is_exact(bits, seed, log_scale, tail):
    x = gaussian(32, GROUP_SIZE, seed=seed) * torch.exp(tail * gaussian(32, GROUP_SIZE, seed=seed + 1)) * 10**log_scale
    once = scalar.dequantize(*scalar.quantize(x, bits), bits)
    assert torch.equal(scalar.dequantize(*scalar.quantize(once, bits), bits), once)


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("largest", [12, 20, 24])
def test_what_is_not_exact_when_coded_again(bits, largest):
    """Whole numbers, which fall on thresholds. The document's cases alone: of 4 bits, where the scale is 12 or 24 and
    b0 of the largest value, which is as large, 4 bytes below; of 5 bits, where it is 32 and b0 of 20 6 bytes below."""
    x = torch.randint(-largest, largest + 1, (40000, GROUP_SIZE), generator=torch.Generator().manual_seed(0)).float()
    codes, scale = scalar.quantize(x, bits)
    once = scalar.dequantize(codes, scale, bits)
    differ = (scalar.dequantize(*scalar.quantize(once, bits), bits) != once).any(-1)
    assert differ.any() == ((bits, largest) in ((4, 12), (4, 24), (5, 20)))
    x, scale = x[differ], scale[differ]
    mantissa, above, share = {5: (0, 6, 20 / 32)}.get(bits, (4, 4, 1.0))
    assert (scale & 7 == mantissa).all() and torch.equal(scalar.absmax_scale(x, bits), scale - above)
    assert torch.equal(x.abs().amax(-1), scalar.decode_scale(scale) * share)
