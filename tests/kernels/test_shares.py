"""A layer whose tokens are dealt out to two ranks against the same layer on one, both on the routes of CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention import context_parallel as ranks
from packed_kv.attention import decode as fused
from packed_kv.attention.layer import PairAttention, PairKernels
from packed_kv.attention.layouts import PairLayout
from packed_kv.attention.limits import Limits
from packed_kv.attention.metadata import Batch, PackedMetadata
from packed_kv.attention.prefill import FlashAttention, FlashPrefill
from packed_kv.attention.store import PairStore
from packed_kv.attention.triton_store import TritonPairStore
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.reference.attention import AttentionOptions
from packed_kv.reference.context_shard import UNSHARDED, ContextShard
from page_codecs import page_codec
from test_decode import DEVICE, relative_rms, rope, transforms
from test_gather import flash_attention
from vllm.v1.worker import workspace

HEADS, HEAD_DIM, BLOCK, RANKS = 4, 64, 16, 2


class Together:
    """The ranks as threads, of which one runs at a time: each until it has to wait for what the others send."""

    def __init__(self) -> None:
        self.turn, self.all_here, self.sent = threading.Lock(), threading.Barrier(RANKS), [torch.empty(0)] * RANKS

    def run(self, of_rank: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        results, errors = [torch.empty(0)] * RANKS, []

        def target(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = of_rank(rank)
                except BaseException as error:
                    errors.append(error)
                    self.all_here.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.sent[rank] = x.clone()
        self.turn.release()
        self.all_here.wait()
        self.turn.acquire()
        received = list(self.sent)
        self.turn.release()
        self.all_here.wait()
        self.turn.acquire()
        return received


class Group:
    """Stand-in for vLLM's group, as far as `Ranks` asks it. Without NCCL it scatters as vLLM's does then: nothing."""

    def __init__(self, together: Together, rank: int, has_nccl: bool = True) -> None:
        self.together, self.rank, self.has_nccl = together, rank, has_nccl
        self.device_communicator = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=not has_nccl), group=self)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.together.exchange(self.rank, x), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.reduce_scatter_by_pytorch(x, dim) if self.has_nccl else torch.full_like(x.chunk(RANKS, dim)[0], 9e9)

    def reduce_scatter_by_pytorch(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        summed = torch.stack(self.together.exchange(self.rank, x)).float().sum(0).to(x.dtype)
        return summed.chunk(RANKS, dim)[self.rank].contiguous()


class Workspace:
    """One memory for all who ask, as vLLM's."""

    def __init__(self) -> None:
        self.memory = torch.full((1 << 26,), 0xFF, dtype=torch.uint8, device=DEVICE)

    def get_simultaneous(self, *asked: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        given, at = [], 0
        for shape, dtype in asked:
            size = torch.Size(shape).numel() * dtype.itemsize
            given.append(self.memory[at : at + size].view(dtype).view(shape))
            at += -(-size // 256) * 256
        return given


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memories: dict[int, Workspace] = {}
    manager = lambda: memories.setdefault(threading.get_ident(), Workspace())  # noqa: E731  # of a rank
    monkeypatch.setattr(fused, "current_workspace_manager", manager)
    monkeypatch.setattr(workspace, "current_workspace_manager", manager)
    if DEVICE == "cpu":
        card = SimpleNamespace(multi_processor_count=1, major=8, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)


def layer(
    codec: PagedCodec,
    shard: ContextShard,
    group: Group | None,
    options: AttentionOptions,
    *,
    in_pytorch: bool,
    kernel: str = "auto",
    max_tokens: int = 0,
    mixed_graphs: bool = False,
) -> PairAttention | ranks.ContextParallelAttention:
    shape = (codec, HEADS, 1, options)
    flash = FlashAttention(flash_attention, HEAD_DIM)
    prefill = None if in_pytorch else FlashPrefill(*shape, 64, 8, flash, shard)
    layout = PairLayout(*shape, Limits(1, 8, max_tokens, mixed_graphs), shard)
    decode = fused.pair_kernel(layout, fused.rotation_of(layout), kernel)
    store = PairStore(TritonPairStore(codec, 1, decode.splits.rotation), decode.kind)
    kernels = PairKernels(codec, HEADS // shard.ranks, 1, options, store, decode, prefill, shard)
    if group is None:
        return PairAttention(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "get_dcp_group", lambda: group)
        return ranks.ContextParallelAttention(kernels)


def batch(shard: ContextShard, lengths: list[tuple[int, int]]) -> tuple[PackedMetadata, list[torch.Tensor]]:
    """Metadata of requests with (tokens, new tokens), and where vLLM would put all tokens of each."""
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
    seq_lens = torch.tensor([tokens for tokens, _ in lengths], dtype=torch.int32, device=DEVICE)
    wide = -(-max(tokens for tokens, _ in lengths) // (BLOCK * shard.ranks))
    order = torch.randperm(len(lengths) * wide, generator=torch.Generator().manual_seed(0))
    table = order.view(len(lengths), wide).to(torch.int32)
    slots = []
    for request, (tokens, _) in enumerate(lengths):
        places = torch.arange(tokens)
        within = places % (BLOCK * shard.ranks)
        inside = within // (shard.ranks * shard.run) * shard.run + within % shard.run
        slot = table[request, places // (BLOCK * shard.ranks)].long() * BLOCK + inside
        slots.append(torch.where(within // shard.run % shard.ranks == shard.rank, slot, -1).to(DEVICE))
    new_slots = torch.cat([slot[-new:] for slot, (_, new) in zip(slots, lengths, strict=True)])
    positions = torch.cat([torch.arange(tokens - new, tokens) for tokens, new in lengths]).to(DEVICE)
    decodes = next((i for i, (_, new) in enumerate(lengths) if new > 1), len(lengths))
    metadata = PackedMetadata(
        num_actual_tokens=int(starts[-1]), block_table=table.to(DEVICE), slot_mapping=new_slots, positions=positions,
        query_start_loc=starts.to(DEVICE, torch.int32), seq_lens=seq_lens, query_starts=starts.tolist(),
        context=seq_lens.tolist(), decodes=decodes, decode_tokens=int(starts[decodes]), decode_query_len=1,
        stored_lens=shard.count(seq_lens), shard=shard,
        lse=torch.full((int(starts[-1]) * HEADS,), float("nan"), device=DEVICE),
    )  # fmt: skip
    return metadata, slots


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([(1, 1), (37, 1), (40, 3), (3, 3), (3, 2)], {"run": 4}),
        ([(24, 2)], {"soft_cap": 5.0}),
        ([(40, 1), (2, 2)], {"run": 16}),
        ([(2, 2)], {}),
        ([(24, 1), (40, 3), (3, 3)], {"value_dim": 48}),
        ([(20, 1), (20, 2)], {"in_pytorch": True}),
        ([(40, 1), (20, 2)], {"has_nccl": False}),
        ([(530, 1), (290, 2)], {"run": 4, "turns": True}),
        ([(1, 1), (37, 1), (40, 3), (3, 3), (3, 2)], {"run": 4, "centred": True}),
    ],
    ids=str,
)
def test_two_ranks_are_as_one(
    lengths: list[tuple[int, int]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pytorch = lambda communicator, x, dim: communicator.group.reduce_scatter_by_pytorch(x, dim)  # noqa: E731
    monkeypatch.setattr(ranks.DeviceCommunicatorBase, "reduce_scatter", by_pytorch)
    generator = torch.Generator().manual_seed(1)
    value_dim = options.get("value_dim", HEAD_DIM)
    channels = transforms(HEAD_DIM, 1)
    channels["value_scale"] = channels["value_scale"][:, :value_dim]
    if options.get("turns"):
        channels |= {"key_rope": rope(HEAD_DIM // 2), "positions": 1000}
    if options.get("centred"):  # of rank 1, no token has the mean of position 0
        channels |= {
            "value_mean": channels["key_mean"].flip(-1),
            "value_first_mean": channels["key_first_mean"].flip(-1),
        }
    codec = page_codec(FORMATS["turboquant35"], HEAD_DIM, device=DEVICE, value_dim=value_dim, **channels)
    attention = AttentionOptions(HEAD_DIM**-0.5, logits_soft_cap=options.get("soft_cap"))
    vectors = [torch.randn(2, tokens, 1, HEAD_DIM, generator=generator).to(DEVICE).half() for tokens, _ in lengths]
    new = [x[:, -count:] for x, (_, count) in zip(vectors, lengths, strict=True)]
    key, value = (torch.cat([x[i] for x in new]) for i in (0, 1))
    value = value[..., :value_dim]
    query = torch.randn(len(key), HEADS, HEAD_DIM, generator=generator).to(DEVICE).half()

    def forward(shard: ContextShard, group: Group | None) -> torch.Tensor:
        metadata, slots = batch(shard, lengths)
        served = layer(codec, shard, group, attention, in_pytorch=options.get("in_pytorch", False))
        shape = (metadata.block_table.numel(), 1, BLOCK, codec.slot_bytes)
        cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
        for (tokens, count), (k, v), slot in zip(lengths, vectors, slots, strict=True):
            old = slice(0, tokens - count)
            codec.write(cache, slot[old], k[old], v[old][..., :value_dim], torch.arange(tokens, device=DEVICE)[old])
        heads = slice(shard.rank * served.kernels.query_heads, (shard.rank + 1) * served.kernels.query_heads)
        output = torch.full_like(query[:, heads, :value_dim], float("nan"))
        served.forward(Batch(query[:, heads], key, value, cache, metadata, output))
        return output

    together = Together()
    of_ranks = together.run(
        lambda rank: forward(
            ContextShard(RANKS, rank, options.get("run", 1)), Group(together, rank, options.get("has_nccl", True))
        )
    )
    expected = forward(UNSHARDED, None)
    assert not expected.isnan().any()
    assert relative_rms(torch.cat(of_ranks, 1).double(), expected.double()) < 2e-3
