"""Bytes of packed vectors and pages: docs/formats.md describes them, and they never change within a format version."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from checkout import REPO
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_kv import FORMATS, get_codec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMAT_VERSION, GROUP_SIZE, MAX_SCALE_BYTE
from plain_decoder import decode as plain_decode

HEAD_DIMS = (48, 64, 80, 96, 128, 192, 256)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(FORMATS)), head_dim=st.sampled_from(HEAD_DIMS),
       seed=st.integers(0, 2**31), chosen=st.booleans())  # fmt: skip
def test_a_decoder_written_from_the_document_agrees(name, head_dim, seed, chosen):
    """On any codes and any finite scales, not only those that an encoder writes."""
    fmt = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    outliers = None
    if chosen and fmt.outlier_bits:
        shuffled = torch.randperm(head_dim, generator=generator)
        outliers = shuffled[: fmt.outlier_channels(head_dim)].sort().values.tolist()
    packed = torch.randint(0, 256, (fmt.vector_bytes(head_dim),), generator=generator).to(torch.uint8)
    packed[-len(fmt.group_bits(head_dim)) :].clamp_(max=MAX_SCALE_BYTE)
    decoded = get_codec(name, head_dim, outliers=outliers).decode(packed)
    assert np.array_equal(plain_decode(name, head_dim, bytes(packed.tolist()), outliers), decoded.numpy())


def fixed_vectors(head_dim: int) -> torch.Tensor:
    """64 vectors of integer arithmetic, bell-shaped, from 2^-8 to 2^7 in size, with larger channels here and there."""
    vector, channel = torch.meshgrid(torch.arange(64), torch.arange(head_dim), indexing="ij")
    draws = [(vector * 7919 + channel * 104729 + vector * channel * 31 + k * 1299709) % 2003 for k in range(4)]
    x = (torch.stack(draws).sum(0) - 4004).float() / 1024
    x = torch.where((channel * 7 + vector) % 29 == 0, 8 * x, x)
    return x * torch.exp2((vector % 16 - 8).float())


FORMAT_VERSION_OF_GOLDEN = 3
GOLDEN = {
    "isoquant3": "46fd2972e6fd07feae7e638b8267337b3bdb45cd866902ed03e5b3e6efa8da37",
    "isoquant4": "bd41006cf92ab204adaa62bb9d6695a421a7e1a5a7c827d7f1f6bed1158605a7",
    "planarquant3": "db55cf07dd0612575ff49b076e67dbe7753c00c205eaf55a3614d7b4d2a830cd",
    "planarquant4": "553bfe52ea06e8914629218c0813bfe45528c090083df9fd298d36a5de47f8df",
    "turboquant25": "9cfc65dcea9ba391ca8c6a0cb25785b425416a2bc1df03c3086fdc6ea90d1f41",
    "turboquant35": "f208b85857abb73a488a6204171430ab286236304bab523da224ba0541d7714d",
    "tq3": "a41b10ccd6e840108ed8591449296ca2ee17a442c61ad30a8edfc12dbba7f427",
    "tq4": "16f86a8f6b98206a36204c2697b9811c21ef35a90e29133496a0b868e7ec75d7",
}
"""sha256 of the packed `fixed_vectors(128)`. A change here changes the format: caches written before are misread,
unless `FORMAT_VERSION` is incremented with it."""


def worked_example(name: str, head_dim: int) -> dict[str, list[str]]:
    """The document's example: first word of a line -> what follows up to the dots, there and in lines below without."""
    document = (REPO / "docs" / "formats.md").read_text()
    begin = document.index(f"\n`{name}`, head_dim {head_dim}, ")
    word, lines = "", {}
    for line in document[begin:].split("\n\n")[1].splitlines():
        word = line[4:16].strip() or word
        lines.setdefault(word, []).append(line[16:].partition(", ...")[0])
    return lines


def example_vector(head_dim: int) -> torch.Tensor:
    return (torch.arange(head_dim) % 7 - 3).float()


@pytest.mark.parametrize(("name", "head_dim"), [("planarquant4", 32), ("turboquant25", 64)])
def test_worked_examples_of_the_document(name, head_dim):
    lines, codec, x = worked_example(name, head_dim), get_codec(name, head_dim), example_vector(head_dim)
    packed = codec.encode(x)
    assert bytes(packed.tolist()).hex(" ") == lines["packed"][0]
    codes = codec.unpack(packed)[0].view(-1, GROUP_SIZE)[:, :8].tolist()
    assert codes == [[int(code) for code in line.split(", ")] for line in lines["codes"]]
    for word, numbers in (("rotated", codec.rotate(x)), ("decoded", codec.decode(packed))):
        for group, line in enumerate(lines[word]):
            written = [float(value.replace("\N{MINUS SIGN}", "-")) for value in line.split(", ")]
            there = numbers[GROUP_SIZE * group :][:4].tolist()
            assert there == pytest.approx(written, rel=1e-7, abs=5e-9), word


@pytest.mark.parametrize(
    ("name", "head_dim", "places"),
    [
        ("planarquant4", 32, {68: "e9 ca 12 28", 517: "84", 534: "84"}),
        ("turboquant25", 64, {64: "40 00 00 44 e0 00 d2 00", 272: "44 10", 649: "87", 651: "85", 682: "87", 686: "85"}),
    ],
)
def test_worked_pages_of_the_document(name, head_dim, places):
    codec = PagedCodec(FORMATS[name], head_dim)
    page = torch.zeros(1, 1, 16, codec.slot_bytes, dtype=torch.uint8)
    x = example_vector(head_dim).view(1, 1, -1)
    codec.write(page, torch.tensor([10]), x, x)
    written = bytes(page.flatten().tolist())
    assert {at: written[at:][: len(bytes.fromhex(value))].hex(" ") for at, value in places.items()} == places


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_never_change(name):
    assert FORMAT_VERSION == FORMAT_VERSION_OF_GOLDEN
    packed = get_codec(name, 128).encode(fixed_vectors(128))
    digest = hashlib.sha256(packed.numpy().tobytes()).hexdigest()
    assert digest == GOLDEN.get(name), "the digest of a new dtype goes into GOLDEN"
