"""Disaggregated prefill: over NIXL, an engine goes on with the pages of another as with those of its prefix cache."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
from calibration_files import content, write
from packed_kv.formats import FORMATS
from peer import Peer

pytest.importorskip("nixl", reason="pip install nixl; runs without a GPU, too")

LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 128, 16
FULL_BLOCKS, TOKENS = 3, 8
PROMPT = random.Random(0).choices(range(3, 4000), k=FULL_BLOCKS * BLOCK + 1)
OPTIONS = {"kv_cache_dtype": "isoquant4", "dtype": "float32", "block_size": BLOCK, "max_model_len": 256}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def peers(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """A prefill engine of one rank and a decode engine of two, which have one calibration, of channels at random."""
    folder = tmp_path_factory.mktemp("peers")
    calibration = {"calibration": str(write(folder, content(LAYERS, KV_HEADS, HEAD_DIM)))}
    options = OPTIONS | {"skip_tokenizer_init": True, "additional_config": {"packed_kv": calibration}}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    started = []
    try:
        for role, more in (("kv_producer", {}), ("kv_consumer", ranks)):
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": free_port()}
            started.append(Peer(demo_model, role, folder / role, environment, options | more))
        for peer in started:
            peer.wait()
        prefill, decode = started
        yield prefill, decode
    finally:
        for peer in started:
            peer.close()


def test_decode_engine_goes_on_with_pages_of_another(peers: tuple[Peer, Peer]) -> None:
    """Its two ranks read a head each out of the blocks of an engine that has both."""
    prefill, decode = peers
    sent = prefill.prefill(PROMPT)
    got = decode.ask(PROMPT, sent.params, TOKENS)
    own = prefill.ask(PROMPT, None, TOKENS)  # from its prefix cache
    assert got.tokens == own.tokens
    assert got.logprobs[0] == pytest.approx(own.logprobs[0], abs=1e-4)  # later ones depend on codes of their own
    moved = sum(nbytes for nbytes, _, _ in got.transfers)
    assert moved == (FULL_BLOCKS + 1) * BLOCK * LAYERS * KV_HEADS * FORMATS["isoquant4"].slot_bytes(HEAD_DIM)
    again = decode.prefill(PROMPT)
    assert not again.transfers
    pages = [
        peer.pages(answer.params["remote_block_ids"][0][:FULL_BLOCKS])
        for peer, answer in ((prefill, sent), (decode, again))
    ]
    assert len(pages[0]) == LAYERS * KV_HEADS * FULL_BLOCKS == len({*pages[0]})
    assert pages[0] == pages[1]
