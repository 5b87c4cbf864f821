"""The workspace of the decodes in C++: one a process, large enough for all steps of an engine before the first."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from typing import Any

import batches
import psutil
import pytest
import torch
from packed_kv.attention import cpu as pairs_cpu
from packed_kv.attention.latent.cpu import CpuLatents
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu import decode, jobs
from packed_kv.kernels.cpu.decode import CpuDecode
from packed_kv.kernels.cpu.jobs import Largest
from packed_kv.kernels.cpu.latent_decode import CpuLatentDecode
from packed_kv.reference.attention import AttentionOptions

HEADS, SCALE, FMT = 16, 0.07, FORMATS["tq4"]
BLOCK = 32


class Layer:
    """A layer of latents, and a step with one query token of each request; their tokens are in the same pages."""

    def __init__(self, lengths: list[int], heads: int = HEADS, rank: int = 96) -> None:
        numbers, self.codec = torch.Generator().manual_seed(len(lengths)), LatentCodec(FMT, rank, 32)
        self.kernel, self.lengths = CpuLatentDecode(self.codec, SCALE), torch.tensor(lengths)
        tokens = -(-max(lengths) // BLOCK) * BLOCK
        self.cache = torch.zeros(tokens // BLOCK, BLOCK, self.codec.slot_bytes, dtype=torch.uint8)
        new = [torch.randn(tokens, channels, generator=numbers) for channels in (rank, 32)]
        self.codec.write(self.cache, torch.arange(tokens), *new)
        self.queries = [torch.randn(len(lengths), heads, channels, generator=numbers) for channels in (rank, 32)]

    def decode(self, rows: slice = slice(None)) -> torch.Tensor:
        """Output of these requests, fp32 [requests, heads, rank]."""
        lengths, queries = self.lengths[rows], [query[rows] for query in self.queries]
        table = torch.arange(len(self.cache), dtype=torch.int32).expand(len(lengths), -1)
        output = torch.full(queries[0].shape, torch.nan)
        self.kernel(self.cache, table, torch.arange(len(lengths) + 1), lengths, *queries, output)
        return output


def address(layer: Any) -> int:
    return layer._jobs.workspace.address(0)


def held() -> int:
    """Bytes of the process's workspace."""
    return sum(workspace._memory.numel() for workspace in jobs._workspaces.values())


@pytest.fixture(autouse=True)
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever layers of other tests hold."""
    monkeypatch.setattr(jobs, "_workspaces", type(jobs._workspaces)())


def test_layers_of_one_process_share_a_workspace() -> None:
    """Of pairs and of latents, of whatever size; it goes with the last of them."""
    first, second = Layer([3000] * 8), Layer([3000] * 8, heads=4)
    pairs = CpuDecode(PagedCodec(FMT, 64), 8, 2, AttentionOptions(0.1))
    first.decode()
    size = held()
    second.decode()
    assert size and held() == size
    assert address(first.kernel) == address(second.kernel) == address(pairs)
    del first, second, pairs
    gc.collect()
    assert held() == 0


def test_a_step_bound_before_the_workspace_grows() -> None:
    batch = batches.Batch("tq4", [700, (33, 2)])
    wanted, options = batch.decode(AttentionOptions(0.1)), AttentionOptions(0.1)
    kernel, output = CpuDecode(batch.codec, 6, 2, options), torch.full(wanted.shape, torch.nan)
    attend = kernel.bind(batch.query, batch.cache, batch.table, batch.query_start, batch.seq_lens, output)
    attend()
    large = Layer([4000] * 40)
    large.decode()
    attend()
    assert torch.equal(output, wanted)


def test_engines_in_two_threads() -> None:
    """Each call has the workspace to itself."""
    layers = [Layer([900 + 7 * i for i in range(12)]), Layer([1500 - 11 * i for i in range(9)], heads=8)]
    wanted = [layer.decode() for layer in layers]
    wrong = [0, 0]

    def serve(number: int) -> None:
        for _ in range(60):
            wrong[number] += not torch.equal(layers[number].decode(), wanted[number])

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


def calls_within(largest: Largest, count: int = 300) -> list[tuple[list[int], list[int]]]:
    """Query tokens and tokens of the requests of steps that an engine can make: at random, and all of one length."""
    numbers = random.Random(1)
    lengths = [*range(1, largest.tokens + 1, 509), 4095, 4096, 4097, 4111, largest.tokens]
    found = [([largest.query_tokens] * largest.requests, [min(n, largest.tokens)] * largest.requests) for n in lengths]
    for _ in range(count):
        requests = numbers.randint(1, largest.requests)
        queries = [numbers.randint(1, largest.query_tokens) for _ in range(requests)]
        found.append((queries, [numbers.randint(n, largest.tokens) for n in queries]))
    return found


def check_reserved(layer: Any, fixed: decode.Arguments, largest: Largest) -> None:
    """Check that no step of an engine asks for more than was reserved, and that one asks for nearly as much."""
    reserved, most = held() - jobs.ALIGNMENT, 0
    fixed.layer, fixed.threads = ctypes.pointer(layer.layer), torch.get_num_threads()
    for queries, lengths in calls_within(largest):
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        seq_lens, first = torch.tensor(lengths).int(), torch.zeros(len(lengths), dtype=torch.int32)
        fixed.requests, fixed.query_start, fixed.seq_lens = len(lengths), starts.data_ptr(), seq_lens.data_ptr()
        if largest.has_ring:
            fixed.ring.data, fixed.ring_first, fixed.ring_window = 1, first.data_ptr(), 100
        most = max(most, layer._jobs._bytes(fixed))
    assert most <= reserved < 1.1 * most, (most, reserved)


LARGEST = (Largest(64, 1, 4160, False), Largest(3, 5, 33000, True), Largest(256, 1, 131072, False))


@pytest.mark.parametrize("largest", LARGEST, ids=str)
@pytest.mark.parametrize("heads", [4, 128])
def test_the_largest_step_of_latents(largest: Largest, heads: int) -> None:
    layer = CpuLatents(LatentCodec(FMT, 512, 64), heads, SCALE, None, largest)
    check_reserved(layer.decode, decode.Arguments(kv_heads=1, group=heads), largest)


@pytest.mark.parametrize("largest", LARGEST, ids=str)
@pytest.mark.parametrize("window", [None, 700, 5000])
def test_the_largest_step_of_pairs(largest: Largest, window: int | None) -> None:
    codec = PagedCodec(FMT, 128)
    layer = pairs_cpu.CpuPairs(codec, 8, 2, AttentionOptions(0.1, sliding_window=window), largest).decode
    check_reserved(layer, decode.Arguments.from_buffer_copy(layer._call), largest)


def test_the_workspace_counts_in_what_the_process_holds() -> None:
    """vLLM sizes the KV cache by the resident memory."""
    process = psutil.Process()
    before = process.memory_info().rss
    layer = CpuLatents(LatentCodec(FMT, 512, 64), 128, SCALE, None, Largest(64, 1, 4160, False))
    assert process.memory_info().rss - before > 0.9 * held() > 5e7, layer


def test_a_batch_of_many_results_is_served_in_halves() -> None:
    """41 requests of 128 heads have 100 MB of results; outputs have the bits of each request alone."""
    layer = Layer([2000 + 3 * i for i in range(41)], heads=128, rank=512)
    together = layer.decode()
    assert 4e7 < held() < 8e7
    for row in (0, 19, 20, 21, 40):
        assert torch.equal(layer.decode(slice(row, row + 1)), together[row : row + 1])
