"""The table of dtypes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest
from checkout import REPO
from packed_kv import FORMATS
from packed_kv.formats import CODES, CODES_PER_LANE, FORMAT_VERSION, MAX_SCALE_BYTE
from packed_kv.layout import MICRO_BLOCK, page_layout

PACKAGE = REPO / "overlay" / "packed_kv"
SLOT_BYTES = {
    "isoquant3": 104, "isoquant4": 136, "planarquant3": 104, "planarquant4": 136,
    "turboquant25": 80, "turboquant35": 112, "tq3": 104, "tq4": 136,
}  # fmt: skip
BITS_PER_CHANNEL = {"3": 3.25, "4": 4.25, "25": 2.5, "35": 3.5}
"""Digits at the end of a dtype's name -> its bits, with scale bytes, per channel of heads of 128."""

head_dims = pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)


def test_slot_bytes_of_the_design():
    assert {name: fmt.slot_bytes(128) for name, fmt in FORMATS.items()} == SLOT_BYTES


def test_the_page_on_formats_describes_this_version():
    assert f"format version {FORMAT_VERSION};" in (PACKAGE.parents[1] / "docs" / "formats.md").read_text()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_bits_per_channel(fmt):
    digits = re.search(r"[0-9]*$", fmt.name)[0]
    assert digits in BITS_PER_CHANNEL, f"the name of a dtype ends in one of {', '.join(BITS_PER_CHANNEL)}"
    assert 8 * fmt.vector_bytes(128) / 128 == BITS_PER_CHANNEL[digits]
    assert fmt.slot_bytes(128) == 2 * fmt.vector_bytes(128)
    assert fmt.compression(128) == 16 / BITS_PER_CHANNEL[digits]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@head_dims
def test_groups_cover_the_head_and_fill_the_slot(fmt, head_dim):
    bits = fmt.group_bits(head_dim)
    assert len(bits) * 32 == head_dim
    assert fmt.slot_bytes(head_dim) == 2 * sum(4 * b + 1 for b in bits)
    assert set(bits) <= set(CODES)
    assert list(bits) == sorted(bits, reverse=True)


@pytest.mark.parametrize(
    ("head_dim", "outliers"),
    [(32, 0), (48, 32), (64, 32), (80, 32), (96, 32), (128, 32), (160, 32), (176, 64), (192, 64), (256, 64)],
)
def test_outlier_channels_are_a_quarter_rounded_half_up(head_dim, outliers):
    assert FORMATS["turboquant25"].outlier_channels(head_dim) == outliers
    assert FORMATS["tq4"].outlier_channels(head_dim) == 0


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("head_dim", [0, -32, 1, 31, 72, 130, 128.0, "128", None])
def test_bad_head_dim_is_refused(fmt, head_dim):
    with pytest.raises(ValueError, match="multiple of 16, got"):
        fmt.slot_bytes(head_dim)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@head_dims
def test_a_micro_block_is_sixteen_slots(fmt, head_dim):
    layout = page_layout(fmt, head_dim)
    assert layout.micro_block_bytes == MICRO_BLOCK * fmt.slot_bytes(head_dim)
    ends = [plane.offset for plane in layout.planes] + [layout.micro_block_bytes]
    assert [high - low for low, high in itertools.pairwise(ends)] == [plane.bytes for plane in layout.planes]
    assert all(plane.offset % 16 == 0 for plane in layout.planes)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_one_vector_may_be_all_of_a_page(fmt):
    """One that serves as K and as V has the planes of a pair's first vector, one behind the other."""
    pair, single = page_layout(fmt, 96), page_layout(fmt, 96, ("key",))
    assert [plane[:-1] for plane in single.planes] == [plane[:-1] for plane in pair.planes if plane.vector == 0]
    assert single.micro_block_bytes == MICRO_BLOCK * fmt.vector_bytes(96)


@pytest.mark.parametrize("bits", CODES)
def test_magnitudes_are_ascending_bytes(bits):
    """Integers below 256 over 128, so that a kernel may look them up as bytes; up to 4 bits exact in e4m3, too."""
    torch = pytest.importorskip("torch")
    levels = torch.tensor(CODES[bits].magnitudes)
    assert len(levels) == 2 ** (bits - 1)
    assert (levels.diff() > 0).all()
    assert torch.equal(128 * levels, (128 * levels).round()) and 128 * levels.max() < 256
    assert torch.equal(levels.to(torch.float8_e4m3fn).float(), levels) or bits == 5


@pytest.mark.parametrize("code", CODES.values(), ids="{0.bits} bits".format)
def test_a_lane_s_codes_fill_its_words(code):
    """Codes of 16 channels, each bit of a word once: magnitudes and signs, or signs in words of their own."""
    assert 32 * code.code_words == CODES_PER_LANE * (code.bits - code.has_sign_words)
    taken = []
    for e in range(CODES_PER_LANE):
        first = 32 * (e * code.code_words // CODES_PER_LANE)
        taken += [first + code.magnitude_shift[e] + bit for bit in range(code.bits - 1)]
        taken += [first + shift for shift in code.sign_shift[e : e + 1]]
    assert sorted(taken) == list(range(32 * code.code_words))
    for shifts in filter(None, (code.magnitude_shift, code.sign_shift)):
        assert all(shifts[e] - shifts[0] == sum(shifts[e & 1 << i] - shifts[0] for i in range(4)) for e in range(16))


def test_magnitudes_turn_into_fp16_as_the_document_says():
    torch = pytest.importorskip("torch")
    four, three, two = (torch.tensor(CODES[bits].magnitudes) for bits in (4, 3, 2))
    assert torch.equal((128 * four).to(torch.uint8).float(), 128 * four)
    assert torch.equal(three.to(torch.float8_e5m2).float(), three)
    bits = two.half().view(torch.int16)
    assert (bits & 0x3FF == 0).all() and int(bits[0] ^ bits[1]).bit_count() == 1


def test_up_to_the_largest_scale_byte_every_value_is_finite_in_fp16():
    torch = pytest.importorskip("torch")
    scales = (torch.arange(MAX_SCALE_BYTE + 2, dtype=torch.int16) << 7).view(torch.float16)
    largest = scales * max(code.magnitudes[-1] for code in CODES.values())
    assert largest[:-1].isfinite().all()
    assert largest[-1].isinf()


def test_the_table_imports_no_torch():
    code = (
        "import sys, packed_kv, packed_kv.formats, packed_kv.layout\n"
        "packed_kv.FORMATS['tq4'].slot_bytes(128)\n"
        "sys.exit(', '.join({'torch', 'vllm', 'triton', 'transformers'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
