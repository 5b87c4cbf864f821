"""Decode attention of a layer of latents, by either kernel: alone, with its recent window, as a rank's part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_cuda_latent
import torch
from packed_kv.attention.latent import decode
from packed_kv.attention.latent.decode import HopperLatents, TritonLatents
from packed_kv.attention.latent.impl import LatentAttentionImpl
from packed_kv.attention.latent.kernels import LatentKernels
from packed_kv.attention.latent.metadata import LatentDecodeMetadata
from packed_kv.attention.layouts import LatentLayout
from packed_kv.attention.limits import Limits
from packed_kv.attention.step import StepCache
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch, latent_ring_launch
from packed_kv.reference.latent_attention import attend
from packed_kv.window.metadata import WindowMetadata
from packed_kv.window.step import WindowStep
from test_latent import DEVICE, SCALE, codec_of
from test_latent_ring import Batch, cuda_ring
from test_shares import Workspace

HEADS, WINDOW = 6, 32
REQUESTS, COUNTS = ((70, 0), (3, 0), (129, 0)), (2, 1, 2)
KERNELS = [
    pytest.param(TritonLatents, 96, 32, id="triton"),
    pytest.param(HopperLatents, 512, 64, id="cuda", marks=test_cuda_latent.runs),
]


class Emulated(latent_launch.CudaLatentDecode):
    """The CUDA kernel where there is no GPU."""

    def __init__(self, page, cache, heads, query, output, constant=None, *, has_lse=False) -> None:
        self.heads, self.has_constant, self.has_lse = heads, constant is not None, has_lse
        self.layout, self.block_size, self.dtypes = page, cache.shape[1], (query, output)
        self.layer = latent_launch.layer_arguments(cache, constant)

    def __call__(self, step, query, rope_query, output) -> None:
        import emulated

        assert self.dtypes == (query.dtype, None if output is None else output.dtype)
        flags = self.has_constant, self.has_lse
        variant = latent_launch.LatentVariant(self.heads, step.grid.rows, self.block_size, *self.dtypes, *flags)
        call = latent_launch.call_arguments(output, query, rope_query)
        emulated.run_latent(latent_launch.constants(self.layout, variant), call, step, self.layer, self.heads)

    def compile_variants(self, longest_decode: int) -> None:
        pass


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    monkeypatch.setattr(decode, "current_workspace_manager", lambda: workspace)
    if DEVICE == "cpu":
        card = SimpleNamespace(multi_processor_count=2, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
        monkeypatch.setattr(latent_launch, "CudaLatentDecode", Emulated)
        monkeypatch.setattr(latent_ring_launch, "CudaLatentRing", cuda_ring())


@pytest.mark.parametrize("kind", ["alone", "window", "part"])
@pytest.mark.parametrize(("kernel", "rank", "rope_dim"), KERNELS)
def test_a_layer(kernel: type[TritonLatents | HopperLatents], rank: int, rope_dim: int, kind: str) -> None:
    """In memory that was reserved for any batch; a second layer of the same kind takes the step of the first."""
    codec = codec_of(FORMATS["turboquant25"], rank, rope_dim)
    batch = Batch(codec, REQUESTS, COUNTS, WINDOW)
    random = torch.Generator().manual_seed(7)
    query = torch.randn(sum(COUNTS), HEADS, rank + rope_dim, generator=random).to(DEVICE).half()
    q_latent, q_rope = query.split([rank, rope_dim], dim=-1)  # side by side, as vLLM gathers them of ranks
    constant = torch.randn(rank, generator=random).to(DEVICE)
    window = WINDOW if kind == "window" else 0
    sizes = HEADS, SCALE, torch.float16, Limits(max(COUNTS), 4)
    layers = [kernel(LatentLayout(codec, *sizes, constant, window, is_shard=kind == "part")) for _ in range(2)]
    metadata = LatentDecodeMetadata(
        block_table=batch.table, seq_lens=batch.seq_lens, dcp_tot_seq_lens=None, query_start=batch.starts,
        query_starts=batch.starts.cpu(), max_query_len=max(COUNTS),
    )  # fmt: skip
    of_batch: Any = SimpleNamespace(decode=metadata, num_decodes=len(COUNTS), steps=StepCache())
    rings = WindowMetadata(batch.ring.block_table, batch.ring.block_table, batch.ring.first)
    step = WindowStep(SimpleNamespace(kv_cache=batch.ring.cache, window=WINDOW), rings, is_shared=False)

    def forward(decode: TritonLatents | HopperLatents) -> tuple[torch.Tensor, torch.Tensor | None]:
        impl: Any = object.__new__(LatentAttentionImpl)
        impl.kernels, impl.kv_lora_rank, impl.qk_rope_head_dim = LatentKernels(None, decode, None), rank, rope_dim
        impl._window_step = lambda: step if window else None
        return impl.forward_mqa(query, batch.cache, of_batch, None)

    tables = (batch.cache, batch.table, batch.starts, batch.seq_lens)
    ring = batch.ring if window else None
    expected_lse = torch.zeros(sum(COUNTS), HEADS, device=DEVICE)
    added = None if kind == "part" else constant
    expected = attend(codec, *tables, q_latent, q_rope, SCALE, added, ring, expected_lse)
    for layer in layers:
        layer.reserve()
        output, lse = forward(layer)
        error = (output - expected).norm() / (expected if added is None else expected - added).norm()
        assert error < 2e-3, error
        assert output.dtype == (torch.float32 if kind == "part" else torch.float16)
        if kind == "part":
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)
        else:
            assert lse is None
    assert len(of_batch.steps.made) == 1
