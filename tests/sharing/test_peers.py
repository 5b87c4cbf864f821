"""Disaggregated prefill: over NIXL, an engine goes on with the pages of another as with those of its prefix cache."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from calibration_files import content, write
from checkout import LATENT_MODEL, REPO
from coverage_models import MODELS
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from page_codecs import page_codec
from transfers import RegisterHybrid, behind_a_hit_as_behind_a_transfer
from vllm.distributed.kv_transfer.kv_connector.utils import kv_postprocess_blksize_on_receive

sys.path.append(str(REPO / "benchmarks"))
from nixl_engine import Answer, Peer, Prepare

LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 128, 16
FULL_BLOCKS, TOKENS, FIRST_RECENT = 3, 12, 56
PROMPT = random.Random(0).choices(range(3, 4000), k=FULL_BLOCKS * BLOCK + 1)
SMALL_PROMPT = random.Random(0).choices(range(3, 250), k=len(PROMPT))
HYBRID, HYBRID_BLOCK = "GraniteMoeHybridForCausalLM", 1024
OPTIONS = {"kv_cache_dtype": "isoquant4", "dtype": "float32", "block_size": BLOCK, "max_model_len": 256}


def pages_of(codec: PagedCodec, key: torch.Tensor, value: torch.Tensor, block_size: int) -> torch.Tensor:
    """uint8 [blocks, KV heads, block_size, bytes] of vectors [tokens, KV heads, head_dim] that fill the blocks."""
    tokens, heads, _ = key.shape
    cache = torch.zeros(tokens // block_size, heads, block_size, codec.slot_bytes, dtype=torch.uint8)
    codec.write(cache, torch.arange(tokens), key, value)
    return cache


@pytest.mark.parametrize("name", FORMATS)
def test_what_nixl_takes_for_granted_of_a_block(name: str) -> None:
    """A rank of more reads its heads as one run of bytes of each block; blocks that are smaller than one's own are
    merged by vLLM's own function."""
    fmt, heads, tokens = FORMATS[name], 4, 8 * BLOCK
    order = [random.Random(head).sample(range(HEAD_DIM), HEAD_DIM) for head in range(heads)]
    outliers = [sorted(channels[: HEAD_DIM // 4]) for channels in order] if fmt.outlier_bits else None
    tables: dict[str, Any] = {"key_outlier_channels": outliers, "value_outlier_channels": outliers}
    if fmt.rotation != "hadamard":
        tables |= {"key_channel_order": order}
    key, value = torch.randn(2, tokens, heads, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    sent = pages_of(page_codec(fmt, HEAD_DIM, **tables), key, value, BLOCK)
    for rank, own in enumerate((slice(0, 2), slice(2, 4))):
        part = {field: table and table[own] for field, table in tables.items()}
        kept = pages_of(page_codec(fmt, HEAD_DIM, **part), key[:, own], value[:, own], BLOCK)
        assert torch.equal(sent.flatten(1).chunk(2, dim=1)[rank], kept.flatten(1))
    if "# use physical order" in getsource(kv_postprocess_blksize_on_receive):
        return  # before 0.32, tokens first: peers of another block size are refused (test_page_keys.py)
    larger = pages_of(page_codec(fmt, HEAD_DIM, **tables), key, value, 4 * BLOCK)
    received = sent.reshape(larger.shape).clone()
    assert not torch.equal(received, larger)
    kv_postprocess_blksize_on_receive(received, torch.arange(len(larger)), 4)
    assert torch.equal(received, larger)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.contextmanager
def two_engines(
    model: str, folder: Path, ranks: tuple[int, int] = (1, 2), environment: dict[str, str] | None = None,
    prepare: tuple[Prepare, Prepare] = (int, int), **options: Any,
) -> Iterator[tuple[Peer, Peer]]:  # fmt: skip
    """A prefill engine and a decode engine; `prepare`: what each does first."""
    pytest.importorskip("nixl", reason="nixl is not installed (60 MB; it runs without a GPU, too)")
    if torch.cuda.is_available():
        pytest.skip("on GPUs, benchmarks/peers.py does the same")
    options = OPTIONS | {"skip_tokenizer_init": True} | options
    started = []
    try:
        for role, count, first in zip(("kv_producer", "kv_consumer"), ranks, prepare, strict=True):
            variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": free_port(), **(environment or {})}
            several = {"tensor_parallel_size": count, "distributed_executor_backend": "mp"} if count > 1 else {}
            started.append(Peer(model, role, folder / role, variables, options | several, first))
        for peer in started:
            peer.wait()
        prefill, decode = started
        yield prefill, decode
    finally:
        for peer in started:
            peer.close()


@pytest.fixture(scope="module")
def peers(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """Two engines that have one calibration, of channels at random."""
    folder = tmp_path_factory.mktemp("peers")
    calibration = {"calibration": str(write(folder, content(LAYERS, KV_HEADS, HEAD_DIM)))}
    with two_engines(demo_model, folder, additional_config={"packed_kv": calibration}) as both:
        yield both


def test_decode_engine_goes_on_with_pages_of_another(peers: tuple[Peer, Peer]) -> None:
    """Its two ranks read a head each out of the blocks of an engine that has both. Its recent window has what it
    generates from the next ring block on; that of the other begins a token earlier, behind its prefix cache."""
    prefill, decode = peers
    sent = prefill.prefill(PROMPT)
    got = decode.ask(PROMPT, sent.params, TOKENS)
    for windows in decode.windows():
        assert {first for _, first in windows} == {FIRST_RECENT}, "nothing of the prompt"
        assert windows[0][0] == len(PROMPT) - 1
        assert max(before for before, _ in windows) == len(PROMPT) + TOKENS - 2 > FIRST_RECENT
    own = prefill.ask(PROMPT, None, TOKENS)  # from its prefix cache
    assert got.tokens[0] == own.tokens[0]
    assert got.logprobs[0] == pytest.approx(own.logprobs[0], abs=1e-4)  # later ones depend on codes of their own
    moved = sum(nbytes for nbytes, _, _ in got.transfers)
    assert moved == (FULL_BLOCKS + 1) * BLOCK * LAYERS * KV_HEADS * FORMATS["isoquant4"].slot_bytes(HEAD_DIM)
    assert_same_pages(prefill, sent, decode)


def assert_same_pages(prefill: Peer, sent: Answer, decode: Peer) -> None:
    """Compare the prompt's full blocks in both engines, once the decode engine has them."""
    again = decode.prefill(PROMPT)
    assert not again.transfers
    pages = [
        peer.pages(answer.params["remote_block_ids"][0][:FULL_BLOCKS])
        for peer, answer in ((prefill, sent), (decode, again))
    ]
    assert len(pages[0]) == LAYERS * KV_HEADS * FULL_BLOCKS == len({*pages[0]})
    assert pages[0] == pages[1]


def test_one_rank_reads_the_heads_of_two(demo_model: str, tmp_path: Path) -> None:
    """Its pages are those of the ranks, a head of each, and its first token is theirs."""
    with two_engines(demo_model, tmp_path, ranks=(2, 1)) as (prefill, decode):
        sent = prefill.prefill(PROMPT)
        got = decode.ask(PROMPT, sent.params, TOKENS)
        (windows,) = decode.windows()
        assert min(first for _, first in windows) == FIRST_RECENT, "nothing of the prompt"
        own = prefill.ask(PROMPT, None, TOKENS)  # from its prefix cache
        assert got.tokens[0] == own.tokens[0] and len(got.tokens) == TOKENS
        assert got.logprobs[0] == pytest.approx(own.logprobs[0], abs=1e-4)  # later ones depend on codes of their own
        assert_same_pages(prefill, sent, decode)


def test_each_rank_reads_all_latents(tmp_path: Path) -> None:
    options = {"kv_cache_dtype": "tq4", "compilation_config": {"custom_ops": ["none"]}}
    with two_engines(str(LATENT_MODEL), tmp_path, **options) as (prefill, decode):
        got = decode.ask(PROMPT, prefill.prefill(PROMPT).params, TOKENS)
        own = prefill.ask(PROMPT, None, TOKENS)
    assert got.tokens == own.tokens
    a_layer = (FULL_BLOCKS + 1) * BLOCK * FORMATS["tq4"].latent_bytes(512, 64)
    assert [nbytes for nbytes, _, _ in got.transfers] == [5 * a_layer] * 2


def assert_same_as_without_transfer(prefill: Peer, decode: Peer, prompt: list[int], brought: int) -> None:
    """The decode engine reads the window where an engine without transfer does, none of the tokens that are `brought`,
    and its answer is the same."""
    got = decode.ask(prompt, prefill.prefill(prompt).params, TOKENS)
    assert got.finish_reason == "length", decode.log.read_text()[-3000:]
    prefill.ask(prompt)  # keeps the states behind the prompt's full blocks, too
    prefill.windows()
    own = prefill.ask(prompt, None, TOKENS)
    (windows,), read = prefill.windows(), decode.windows()
    assert read == [windows] * len(read)
    assert windows[0][0] == len(prompt) - 1, "of a prefix-cache hit"
    assert any(first <= before for before, first in windows)
    assert min(first for _, first in windows) >= brought
    assert got.tokens == own.tokens
    assert got.logprobs == pytest.approx(own.logprobs, abs=1e-4)


@pytest.mark.parametrize(("kv_heads", "head_dim", "ranks"), [(2, 64, (1, 2)), (1, 96, (1, 1))])
def test_window_beside_drafts(kv_heads: int, head_dim: int, ranks: tuple[int, int], tmp_path: Path) -> None:
    """A draft's pages travel too; where they are of another size, pages of a block lie side by side."""
    config = tiny_models.llama()
    model = tiny_models.save(config, tmp_path)
    draft = tiny_models.eagle(tmp_path / "draft", kv_heads, head_dim, config)
    speculation = {"method": "eagle", "model": draft, "num_speculative_tokens": 3}
    prepare = behind_a_hit_as_behind_a_transfer, int
    with two_engines(model, tmp_path, ranks, prepare=prepare, speculative_config=speculation) as both:
        for prompt in (SMALL_PROMPT, SMALL_PROMPT[::-1]):
            assert_same_as_without_transfer(*both, prompt, len(prompt))


def test_window_beside_skipped_layers(tmp_path: Path) -> None:
    """On a CPU, blocks of 32 tokens, as vLLM's own attention wants them there."""
    model, options = tiny_models.save(tiny_models.llama(), tmp_path), {"kv_cache_dtype_skip_layers": ["1"]}
    prepare = behind_a_hit_as_behind_a_transfer, int
    with two_engines(model, tmp_path, (1, 1), prepare=prepare, block_size=32, **options) as both:
        prompt = [*SMALL_PROMPT[:16], *SMALL_PROMPT]
        assert_same_as_without_transfer(*both, prompt, len(prompt))


def test_window_beside_state_layers(tmp_path: Path) -> None:
    """A state is one of a whole block; the decode engine gets that of all tokens but the last."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[HYBRID]))
    options = {
        "mamba_cache_mode": "align", "enable_prefix_caching": True, "load_format": "dummy", "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
    }  # fmt: skip
    register = RegisterHybrid(HYBRID)
    environment = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
    with two_engines(str(tmp_path), tmp_path, (1, 1), environment, (register, register), **options) as both:
        prompt = random.Random(0).choices(range(3, 250), k=HYBRID_BLOCK + 1)
        assert_same_as_without_transfer(*both, prompt, HYBRID_BLOCK)
