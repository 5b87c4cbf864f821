"""A layer of latents whose tokens are dealt out to two ranks against one that has them all, by the kernels of CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention import context_parallel
from packed_kv.attention.latent import decode
from packed_kv.attention.latent.decode import TritonLatents
from packed_kv.attention.latent.impl import LatentAttentionImpl
from packed_kv.attention.latent.kernels import LatentKernels
from packed_kv.attention.latent.metadata import LatentDecodeMetadata
from packed_kv.attention.latent.prefix import TritonLatentPrefix
from packed_kv.attention.layouts import LatentLayout
from packed_kv.attention.limits import Limits
from packed_kv.attention.step import StepCache
from packed_kv.attention.store import LatentStore
from packed_kv.attention.triton_store import TritonLatentStore
from packed_kv.formats import FORMATS
from packed_kv.reference.context_shard import ContextShard
from packed_kv.reference.latent_attention import attend
from test_decode import DEVICE
from test_latent import SCALE, codec_of, poisoned, tokens
from test_shares import RANKS, Group, Together, Workspace
from vllm.model_executor.layers.attention.mla_attention import build_mla_chunked_context_metadata

RANK, ROPE, HEADS, BLOCK, RUN = 96, 32, 6, 16, 4
LENGTHS = (150, 1, 37)
ONE = ContextShard()


class Layer:
    """Stand-in for a layer's implementation, of one rank or of the only one. `workspace`: rows for a prefix."""

    def __init__(self, shard: ContextShard, together: Together, workspace: int = 64) -> None:
        self.codec = codec_of(FORMATS["turboquant25"], RANK, ROPE)
        self.kv_lora_rank, self.qk_rope_head_dim, self.shard = RANK, ROPE, shard
        self.config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16))
        constant = torch.randn(RANK, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        self.weights = SimpleNamespace(constant=constant)
        sizes = (HEADS, SCALE, torch.float16, Limits(1, len(LENGTHS)))
        decode = TritonLatents(LatentLayout(self.codec, *sizes, constant, is_shard=True))
        store = LatentStore(TritonLatentStore(self.codec), decode.kind)
        self.kernels = LatentKernels(store, decode, TritonLatentPrefix(self.codec))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context_parallel, "get_dcp_group", lambda: Group(together, shard.rank))
            self.ranks = context_parallel.Ranks(shard)
        self.cache, self.table = self._filled()
        own, ranks = shard.rank, shard.ranks

        def kv_gather(of_all: torch.Tensor, rows: torch.Tensor) -> None:
            of_all.copy_(torch.cat(together.exchange(own, rows)))

        starts = torch.arange(len(LENGTHS) + 1)
        self.context = build_mla_chunked_context_metadata(
            context_lens_cpu=torch.tensor(LENGTHS), prefill_query_start_loc_cpu=starts,
            chunked_prefill_workspace=torch.full((workspace + workspace // ranks, RANK + ROPE), float("nan"),
                                                 dtype=torch.float16, device=DEVICE),
            chunked_prefill_workspace_size=workspace, block_size=BLOCK * ranks, align_chunk_to_block=True,
            device=torch.device(DEVICE), dcp_world_size=ranks, dcp_local_block_size=RUN,
            dcp_virtual_block_size=RUN * ranks, dcp_manager=SimpleNamespace(kv_gather=kv_gather),
        )  # fmt: skip

    def _filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages with the rank's tokens, and the block table."""
        wide = -(-max(LENGTHS) // (BLOCK * self.shard.ranks))
        table = torch.randperm(len(LENGTHS) * wide, generator=torch.Generator().manual_seed(5)).view(-1, wide)
        cache = poisoned(self.codec, table.numel(), BLOCK)
        for request, count in enumerate(LENGTHS):
            own = torch.arange(self.shard.count(count))
            slots = table[request, own // BLOCK] * BLOCK + own % BLOCK
            latent, rope = (x[self.shard.position(own)] for x in tokens(self.codec, count, seed=request))
            self.codec.write(cache, slots.to(DEVICE), latent, rope)
        return cache, table.to(DEVICE, torch.int32)

    def decode(self, q_latent: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        lens = torch.tensor([self.shard.count(n) for n in LENGTHS], dtype=torch.int32, device=DEVICE)
        starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
        metadata = LatentDecodeMetadata(
            block_table=self.table, seq_lens=lens, dcp_tot_seq_lens=None, query_start=starts.to(DEVICE),
            query_starts=starts, max_query_len=1,
        )  # fmt: skip
        if self.shard == ONE:
            tables = (self.cache, self.table, starts.to(DEVICE), lens)
            return attend(self.codec, *tables, q_latent, q_rope, SCALE, self.weights.constant)
        batch: Any = SimpleNamespace(decode=metadata, num_decodes=len(LENGTHS), steps=StepCache())
        part, lse = LatentAttentionImpl.forward_mqa(self, (q_latent, q_rope), self.cache, batch, None)  # type: ignore[arg-type]
        asked: dict[str, Any] = {"seq_lens": lens, "query_start_loc": starts}
        return LatentAttentionImpl.combine(self, part, lse, **asked)  # type: ignore[arg-type]

    def _window_step(self) -> None:
        """None: there is no window."""

    def prefix(self) -> torch.Tensor:
        """Rows of all chunks of the prefix."""
        gather, chunks = LatentAttentionImpl._gather_over_ranks, self.context.chunks
        assert len(chunks) > 2 and any(chunk.is_continuation for chunk in chunks)
        tables = (self.table[chunk.request_slice] for chunk in chunks)
        return torch.cat(
            [gather(self, self.cache, table, self.context, chunk) for table, chunk in zip(tables, chunks, strict=True)]  # type: ignore[arg-type]
        )


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "current_workspace_manager", Workspace)
    if DEVICE == "cpu":
        card = SimpleNamespace(multi_processor_count=1, major=8, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)


def test_decodes_of_two_ranks_are_as_of_one() -> None:
    """One request has a token on the first rank alone. What means lack is added once."""
    random = torch.Generator().manual_seed(7)
    q_latent, q_rope = (torch.randn(len(LENGTHS), HEADS, n, generator=random).to(DEVICE).half() for n in (RANK, ROPE))
    together = Together()
    layers = [Layer(ContextShard(RANKS, rank, RUN), together) for rank in range(RANKS)]
    ours = torch.cat(together.run(lambda rank: layers[rank].decode(q_latent, q_rope)), 1)
    one = Layer(ONE, together)
    expected = one.decode(q_latent, q_rope)
    error = (ours - expected).norm() / (expected - one.weights.constant).norm()
    assert ours.dtype == torch.float16 and error < 2e-3, error


def test_prefixes_of_two_ranks_are_as_of_one() -> None:
    """In several parts; all ranks have all tokens of a part, those of a request rank by rank."""
    together = Together()
    layers = [Layer(ContextShard(RANKS, rank, RUN), together) for rank in range(RANKS)]
    ours = together.run(lambda rank: layers[rank].prefix())
    assert torch.equal(*ours)
    one = Layer(ONE, together)
    rows, at = [], 0
    for request, count in enumerate(LENGTHS):
        numbers = torch.arange(-(-count // 16), device=DEVICE)
        blocks = one.table[request, numbers // (BLOCK // 16)].long()
        rows.append(torch.cat(one.codec.read(one.cache, blocks), -1)[:count].half())
    for chunk in layers[0].context.chunks:
        starts = [0] * chunk.num_requests
        if chunk.is_continuation:
            starts[0] = at
        for request, start, count in zip(
            range(chunk.request_slice.start, chunk.request_slice.stop), starts, chunk.seq_lens.tolist(), strict=True
        ):
            found, ours[0] = ours[0][:count], ours[0][count:]
            positions = torch.arange(start, start + count)
            of_ranks = [positions[positions // RUN % RANKS == rank] for rank in range(RANKS)]
            assert torch.equal(found, rows[request][torch.cat(of_ranks).to(DEVICE)])
            at = start + count
    assert not len(ours[0])
