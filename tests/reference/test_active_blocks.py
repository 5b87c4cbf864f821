"""Decompress-active-blocks attention against plain attention over the decoded K and V.

The yardstick is flash-attention's: the error against float64 may be at most twice that of the naive float32
computation on the same decoded K and V. A millionth is added, since both errors are a few roundings.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from packed_kv import FORMATS
from packed_kv.codecs.pages import PagedCodec
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope
from packed_kv.reference import attention as active_blocks
from packed_kv.reference.attention import AttentionOptions, attend
from packed_kv.reference.context_shard import ContextShard
from page_codecs import page_codec

HEAD_DIM = 64
SINKS = torch.tensor([-1.0, 1.5, 3.0, 6.0])
OPTIONS = {
    "plain": AttentionOptions(HEAD_DIM**-0.5),
    "window 1": AttentionOptions(HEAD_DIM**-0.5, sliding_window=1),
    "window 37": AttentionOptions(HEAD_DIM**-0.5, sliding_window=37),
    "window beyond": AttentionOptions(HEAD_DIM**-0.5, sliding_window=4096),
    "soft cap": AttentionOptions(1.0, logits_soft_cap=5.0),
    "window and cap": AttentionOptions(0.5, sliding_window=50, logits_soft_cap=2.0),
    "sinks": AttentionOptions(HEAD_DIM**-0.5, sinks=SINKS),
    "sinks, window and cap": AttentionOptions(0.5, sliding_window=50, logits_soft_cap=2.0, sinks=SINKS.bfloat16()),
}
every_dtype = pytest.mark.parametrize("name", FORMATS)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Request:
    """A request of `seq_len` tokens, stored in shuffled blocks of a cache that is 0xFF (NaN scales) elsewhere."""

    def __init__(self, name: str, seq_len: int, heads: tuple[int, int] = (4, 2), block_size: int = 16, **codec) -> None:
        query_heads, kv_heads = heads
        self.codec = page_codec(FORMATS[name], HEAD_DIM, **codec)
        blocks = -(-seq_len // block_size)
        self.cache = torch.full((blocks + 3, kv_heads, block_size, self.codec.slot_bytes), 0xFF, dtype=torch.uint8)
        self.table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(5))[:blocks].to(torch.int32)
        positions = torch.arange(seq_len)
        slots = self.table[positions // block_size].long() * block_size + positions % block_size
        key, value = gaussian(seq_len, kv_heads, HEAD_DIM), gaussian(seq_len, kv_heads, HEAD_DIM, seed=1)
        self.raw_key, self.raw_value = key, value
        self.codec.write(self.cache, slots, key, value, positions)
        places = positions[:, None]
        self.key = self.codec.key.decode(self.codec.key.encode(key, places), places)
        self.value = self.codec.value.decode(self.codec.value.encode(value))
        self.query = gaussian(seq_len, query_heads, HEAD_DIM, seed=2)
        self.seq_len = seq_len

    def attend(self, options: AttentionOptions, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Output of the tokens start .. end when `end` is the newest."""
        end = self.seq_len if end is None else end
        return attend(self.codec, self.cache, self.table, end, self.query[start:end], options)[0]

    def naive(self, options: AttentionOptions, dtype: torch.dtype) -> torch.Tensor:
        """Textbook attention of all tokens over the decoded K and V."""
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (x.to(dtype).repeat_interleave(group, dim=1) for x in (self.key, self.value))
        scores = torch.einsum("qhd,khd->hqk", self.query.to(dtype), key) * options.scale
        if options.logits_soft_cap:
            scores = options.logits_soft_cap * torch.tanh(scores / options.logits_soft_cap)
        distance = torch.arange(self.seq_len)[:, None] - torch.arange(self.seq_len)
        hidden = (distance < 0) | (distance >= (options.sliding_window or self.seq_len))
        scores = scores.masked_fill(hidden, float("-inf"))
        if options.sinks is not None:  # of each head one more key, whose value is 0
            sinks = options.sinks.to(dtype)[:, None, None].expand(scores[..., :1].shape)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : self.seq_len]
        return torch.einsum("hqk,khd->qhd", weights, value)

    def assert_correct(self, options: AttentionOptions) -> None:
        truth = self.naive(options, torch.float64)
        allowed = 2 * relative_rms(self.naive(options, torch.float32), truth) + 1e-6
        assert relative_rms(self.attend(options), truth) <= allowed


def relative_rms(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x - truth).square().mean().sqrt() / truth.square().mean().sqrt())


@pytest.fixture(params=[16, 64, 1024], ids="tile{}".format)
def tile(request, monkeypatch) -> int:
    monkeypatch.setattr(active_blocks, "KV_TILE", request.param)
    return request.param


@every_dtype
@every_option
@pytest.mark.usefixtures("tile")
def test_equals_naive_attention(name, options):
    Request(name, 200).assert_correct(options)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 2)], ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("block_size", [16, 32, 128], ids="block{}".format)
@pytest.mark.usefixtures("tile")
def test_head_groups_and_block_sizes(heads, block_size):
    Request("tq4", 150, heads, block_size).assert_correct(OPTIONS["window 37"])
    Request("isoquant3", 150, heads, block_size).assert_correct(OPTIONS["plain"])


@pytest.mark.parametrize("seq_len", [1, 2, 15, 16, 17, 63, 64, 65, 129, 1000])
@every_option
def test_ragged_lengths(seq_len, options, monkeypatch):
    monkeypatch.setattr(active_blocks, "KV_TILE", 64)
    Request("turboquant25", seq_len).assert_correct(options)


def test_several_tiles_of_the_real_size():
    Request("tq4", 2 * active_blocks.KV_TILE + 5, heads=(2, 1)).assert_correct(OPTIONS["plain"])


@every_option
def test_rows_wait_for_their_turn_when_scores_are_many(options, monkeypatch):
    monkeypatch.setattr(active_blocks, "KV_TILE", 32)
    monkeypatch.setattr(active_blocks, "MAX_SCORES", 4 * 32 * 7)  # 7 query rows at a time
    Request("isoquant4", 130).assert_correct(options)


@every_option
@pytest.mark.parametrize("cuts", [[1] * 5, [64, 64], [100], [3, 90, 1, 60]], ids=str)
@pytest.mark.usefixtures("tile")
def test_chunks_of_a_prompt_equal_the_whole(options, cuts):
    request = Request("isoquant4", 170)
    whole = request.attend(options)
    bounds = [0, *torch.tensor(cuts).cumsum(0).tolist(), request.seq_len]
    chunks = [request.attend(options, a, b) for a, b in itertools.pairwise(bounds)]
    assert relative_rms(torch.cat(chunks), whole) < 1e-6


def test_decoding_token_by_token_equals_the_prompt():
    request = Request("planarquant3", 50)
    steps = [request.attend(OPTIONS["plain"], i, i + 1) for i in range(request.seq_len)]
    assert relative_rms(torch.cat(steps), request.attend(OPTIONS["plain"])) < 1e-6


@every_dtype
@pytest.mark.parametrize("start", [0, 77], ids="from{}".format)
def test_tokens_after_the_newest_are_not_seen(name, start):
    """A prefix that others share, or slots that speculation filled, may hold more than this request has."""
    request = Request(name, 170)
    before = request.attend(OPTIONS["plain"], start, 100)
    later = request.table.long()[100 // 16 + 1 :]
    request.cache[later] = 0xFF
    assert torch.equal(request.attend(OPTIONS["plain"], start, 100), before)
    assert before.isfinite().all()


def test_blocks_before_the_window_may_be_gone(tile):
    """vLLM frees them and points the table at a null block."""
    request = Request("tq4", 170)
    options = AttentionOptions(0.1, sliding_window=37)
    before = request.attend(options, 160)
    request.cache[request.table[: (160 - 36) // 16].long()] = 0xFF
    request.table[: (160 - 36) // 16] = 0
    assert torch.equal(request.attend(options, 160), before)


def test_outliers_per_head():
    outliers = torch.stack((torch.arange(32, 64), torch.arange(0, 64, 2)))
    request = Request("turboquant35", 90, key_outlier_channels=outliers, value_outlier_channels=outliers.flip(0))
    request.assert_correct(OPTIONS["plain"])


def transforms(kv_heads: int = 2) -> dict[str, torch.Tensor]:
    mean = 2 * gaussian(kv_heads, HEAD_DIM, seed=11)
    scale = gaussian(kv_heads, HEAD_DIM, seed=12).exp2()
    return dict(key_mean=mean, key_scale=scale, key_first_mean=mean.flip(0) / 2, value_scale=scale.flip(0))


@every_dtype
@every_option
def test_centred_and_scaled_pages(name, options, monkeypatch):
    monkeypatch.setattr(active_blocks, "KV_TILE", 64)
    Request(name, 150, **transforms()).assert_correct(options)


def by_position() -> dict[str, object]:
    """Transforms as in `transforms`, with the mean before RoPE."""
    frequencies = tuple(100.0 ** (-pair / 24) for pair in range(24))
    return transforms() | {"key_rope": Rope(frequencies, interleaved=True), "positions": 4096}


@every_option
@pytest.mark.usefixtures("tile")
def test_pages_centred_by_position(options):
    Request("isoquant4", 2 * MEAN_BLOCK + 30, **by_position()).assert_correct(options)


@pytest.mark.parametrize(("ranks", "run"), [(2, 1), (4, 16), (3, 5)])
def test_ranks_of_a_request_add_up_to_it(ranks, run, monkeypatch):
    """Tokens dealt out, also in runs that cut blocks of positions; results are weighed by their lse."""
    monkeypatch.setattr(active_blocks, "KV_TILE", 64)
    request, options = Request("tq4", MEAN_BLOCK + 50, **by_position()), AttentionOptions(HEAD_DIM**-0.5)
    outputs, lses = [], []
    for rank in range(ranks):
        shard = ContextShard(ranks, rank, run)
        mine = shard.position(torch.arange(shard.count(request.seq_len)))
        cache = torch.full((len(mine) // 16 + 1, 2, 16, request.codec.slot_bytes), 0xFF, dtype=torch.uint8)
        table = torch.randperm(len(cache), generator=torch.Generator().manual_seed(rank)).to(torch.int32)
        index = torch.arange(len(mine))
        slots = table[index // 16].long() * 16 + index % 16
        request.codec.write(cache, slots, request.raw_key[mine], request.raw_value[mine], mine)
        batch = (cache, table, request.seq_len, request.query[-40:], options)
        output, lse = attend(request.codec, *batch, shard=shard)
        outputs.append(output)
        lses.append(lse)
    weights = torch.stack(lses).softmax(0).unsqueeze(-1)
    whole = request.attend(options, request.seq_len - 40)
    assert relative_rms((torch.stack(outputs) * weights).sum(0), whole) < 1e-6


class ExactCodec(PagedCodec):
    """Keeps vectors as they are, in float64 beside the pages, where `PagedCodec` would code them."""

    def write(self, cache, slots, key, value, positions=None):
        self.stored = torch.full((2, cache.shape[0] * cache.shape[2], *key.shape[1:]), math.nan, dtype=torch.float64)
        for i, (codec, x) in enumerate(zip(self.codecs, (key, value), strict=True)):
            self.stored[i, slots] = codec.rotate(codec.transform.forward(x.double(), positions[:, None]))

    def read(self, cache, micro_blocks, positions):
        tokens = (micro_blocks[:, None] * 16 + torch.arange(16)).flatten()
        key, value = (x[tokens].transpose(0, 1) for x in self.stored)
        return self.whole(key, value, positions)

    def rotate_query(self, query):
        return super().rotate_query(query.double())


CENTRED = {
    "all": transforms(),
    "without mean": {key: value for key, value in transforms().items() if key != "key_mean"},
    "without first mean": {key: value for key, value in transforms().items() if key != "key_first_mean"},
    "by position": by_position(),
}


@pytest.mark.parametrize("chosen", CENTRED.values(), ids=CENTRED)
@every_option
def test_without_quantisation_centred_and_scaled_attention_is_plain_attention(options, chosen, monkeypatch):
    monkeypatch.setattr(active_blocks, "KV_TILE", 64)
    request = Request("tq4", MEAN_BLOCK + 50, kind=ExactCodec, **chosen)
    request.key, request.value = request.raw_key, request.raw_value
    assert relative_rms(request.attend(options), request.naive(options, torch.float64)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_query_of_lower_precision_is_read_as_float32(dtype):
    request = Request("tq4", 60)
    request.query = request.query.to(dtype)
    output = request.attend(OPTIONS["plain"])
    assert output.dtype == torch.float32
    request.query = request.query.float()
    assert torch.equal(request.attend(OPTIONS["plain"]), output)


def test_large_scores_do_not_overflow():
    request = Request("tq4", 100)
    request.query *= 1e4
    request.assert_correct(OPTIONS["plain"])


def test_workspace_is_bounded_by_the_tile(monkeypatch):
    """Of a long request no more than one tile is dequantised at a time."""
    monkeypatch.setattr(active_blocks, "KV_TILE", 64)
    request = Request("tq4", 500)
    sizes: list[int] = []
    read = request.codec.read

    def spy(cache, micro_blocks, positions):
        sizes.append(len(micro_blocks))
        return read(cache, micro_blocks, positions)

    monkeypatch.setattr(request.codec, "read", spy)
    request.attend(OPTIONS["plain"], 499)
    assert max(sizes) * 16 == 64
    assert len(sizes) == 8
    sizes.clear()
    request.attend(AttentionOptions(0.1, sliding_window=20), 499)
    assert sum(sizes) * 16 <= 64
