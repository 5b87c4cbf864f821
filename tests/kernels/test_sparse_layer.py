"""Sparse attention of a layer by the kernels of CUDA. FlashMLA, vLLM's, is emulated where there is no GPU."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention import choice
from packed_kv.attention.latent.in_pytorch import PrefixChunk, ReferenceLatentPrefix
from packed_kv.attention.layouts import SparseLayout
from packed_kv.attention.sparse import flash
from packed_kv.attention.sparse.flash import HEADS, padded_heads
from packed_kv.attention.sparse.hopper import hopper_kernel
from packed_kv.attention.sparse.layer import SparseKernels
from packed_kv.attention.sparse.metadata import SparseLatentMetadata
from packed_kv.attention.step import StepCache
from packed_kv.attention.warmup import warm_up_sparse
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.kernels.cuda import latent_launch, latent_pick_launch
from packed_kv.kernels.precompile import Precompiler, current
from packed_kv.kernels.triton.launch import Launch
from packed_kv.kernels.triton.sparse_picks import CountPicksLaunch
from packed_kv.reference.sparse_latents import attend_picks, count_picks
from sparse_batches import (
    BLOCK_SIZE,
    DEVICE,
    ON_CUDA,
    PICKS,
    SCALE,
    Batch,
    codec_of,
    cuda_kernels,
    errors_of,
    relative_rms,
    sinks_of,
)
from test_cuda_latent import runs
from test_shares import Workspace

TOLERANCE = 1e-2 if ON_CUDA else 2e-2
"""Relative RMS error of bf16 rows, weights and results; Triton's interpreter truncates where a GPU rounds."""


def emulated_flash(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, *, topk_length: Any, out: torch.Tensor
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """`flash_mla_sparse_fwd` of vLLM 0.33.0, with what it asks of its arguments; what it does not promise is NaN."""
    tokens, heads, width = q.shape
    assert q.dtype == kv.dtype == out.dtype == torch.bfloat16 and indices.dtype == torch.int32
    assert heads in HEADS and width == 576 and kv.shape[1:] == (1, 576) and indices.shape == (tokens, 1, PICKS)
    assert all(x.is_contiguous() for x in (q, kv, indices, out)) and out.shape == (tokens, heads, 512)
    picks = indices[:, 0].clone()
    assert picks.max() < len(kv)
    if topk_length is not None:
        assert topk_length.dtype == torch.int32 and topk_length.shape == (tokens,) and topk_length.min() > 0
        picks[torch.arange(PICKS) >= topk_length[:, None]] = -1
        assert torch.equal(picks, indices[:, 0]), "picks behind their number"
    found, lse = attend_picks(kv[:, 0], picks, q[..., :512], q[..., 512:], sm_scale)
    empty = (picks < 0).all(1)
    found[empty], lse[empty] = float("nan"), float("nan")
    out.copy_(found)
    return out, None, lse


class EmulatedPicks(latent_pick_launch.CudaPickDecode):
    """The CUDA kernel over rows where there is no GPU."""

    def __init__(self, page, cache, heads, query, output, constant=None, *, has_lse=False) -> None:
        self.has_lse = has_lse
        self.page, self.heads, self.block_size, self.dtypes = page, heads, cache.shape[1], (query, output)
        self.constant, self.layer = constant, latent_launch.layer_arguments(cache, constant)

    def __call__(self, step, query, rope_query, output, picks) -> None:
        import emulated

        has_constant, shape = self.constant is not None, step.step.grid
        variant = latent_launch.LatentVariant(
            self.heads, shape.rows, self.block_size, *self.dtypes, has_constant, self.has_lse
        )
        call = latent_launch.call_arguments(output, query, rope_query)
        layer = latent_pick_launch.pick_arguments(step, picks) + self.layer
        emulated.run_latent(latent_launch.constants(self.page, variant), call, step.step, layer, self.heads)

    def compile_variants(self, longest_decode: int = 1) -> None:
        noted = current()
        if noted is not None:
            noted.note("the CUDA kernel", None)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    monkeypatch.setattr(flash, "current_workspace_manager", lambda: workspace)
    if not ON_CUDA:
        monkeypatch.setattr(flash, "flash_mla_sparse_fwd", emulated_flash)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        card = SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
        monkeypatch.setattr(latent_pick_launch, "CudaPickDecode", EmulatedPicks)


def kernels_of(
    codec: LatentRowCodec, heads: int, most_rows: int = 400, *, reads_rows: bool = False,
    sinks: torch.Tensor | None = None,
) -> SparseKernels:  # fmt: skip
    return cuda_kernels(codec, heads, codec.output_constant(), most_rows, reads_rows=reads_rows, sinks=sinks)


def attend_nothing(query: torch.Tensor, *_arguments: Any, out: torch.Tensor, **_options: Any) -> Any:
    """`flash_mla_sparse_fwd` where nothing reads what it leaves."""
    return out, None, out.new_zeros(query.shape[:2], dtype=torch.float32)


READS_ROWS = pytest.mark.parametrize(
    "reads_rows", [pytest.param(False, id="gathered"), pytest.param(True, id="rows", marks=runs)]
)


@READS_ROWS
@pytest.mark.parametrize("most_rows", [120, 400], ids=["in parts", "at once"])
@pytest.mark.parametrize(
    ("name", "heads", "has_sinks"), [("tq4", 16, False), ("turboquant25", 5, False), ("tq4", 5, True)]
)
def test_a_batch(
    name: str, heads: int, has_sinks: bool, most_rows: int, monkeypatch: pytest.MonkeyPatch, *, reads_rows: bool
) -> None:
    """Also in slices of 16 query tokens."""
    monkeypatch.setattr(flash, "SLICE_TOKENS", 16)
    codec, sinks = codec_of(name), sinks_of(heads) if has_sinks else None
    batch = Batch(codec, heads, most_rows)
    kernels = kernels_of(codec, heads, most_rows, reads_rows=reads_rows, sinks=sinks)
    assert (len(batch.metadata.prompts), len(kernels.take().query)) == (2 if most_rows == 120 else 1, 16)
    assert max(errors_of(batch, kernels, sinks, torch.bfloat16)) < TOLERANCE


def test_prefixes() -> None:
    """Prefixes of dense prompts, of more tokens than the workspace has rows, by the kernel that gathers picks."""
    codec = codec_of("tq4")
    batch, kernels = Batch(codec, 16, 400), kernels_of(codec, 16, 100)
    starts, counts = torch.tensor([0, 64, 16]), torch.tensor([150, 6, 20])
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), counts)).cumsum(0).to(DEVICE, torch.int32)
    chunk = PrefixChunk(starts.to(DEVICE, torch.int32), ends, 150, counts)
    rows, expected = torch.full((2, 176, 576), float("nan"), dtype=torch.float16, device=DEVICE)
    table = batch.metadata.block_table[[0, 1, 3]]
    kernels.prefix.gather(batch.cache, table, chunk, rows)
    ReferenceLatentPrefix(codec).gather(batch.cache, table, chunk, expected)
    assert torch.equal(rows, expected)


@READS_ROWS
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_warm_up_notes_what_steps_launch(
    has_sinks: bool, monkeypatch: pytest.MonkeyPatch, *, reads_rows: bool
) -> None:
    """Variants that a step asks for are those that were noted. Nothing is launched: nothing reads the output."""
    codec = codec_of("tq4")
    kernels = kernels_of(codec, 16, reads_rows=reads_rows, sinks=sinks_of(16) if has_sinks else None)
    noted: set[Any] = set()
    monkeypatch.setattr(Precompiler, "note", lambda _ahead, variant, _compile: noted.add(variant))
    warm_up_sparse(kernels, BLOCK_SIZE)
    count = (8 if reads_rows else 6) + has_sinks
    assert len(noted) == count, "store, picks (or counts, schedule, CUDA), prefixes, split, merges, sinks"
    launched: set[Any] = set()

    def remember(launch: Launch, grid: Any, tensors: Any, arguments: Any) -> None:
        launched.add(launch.variant(tensors, arguments))

    monkeypatch.setattr(Launch, "__call__", remember)
    monkeypatch.setattr(latent_pick_launch.CudaPickDecode, "__call__", lambda *_arguments: None)

    monkeypatch.setattr(flash, "flash_mla_sparse_fwd", attend_nothing)
    batch = Batch(codec, 16, 400)
    new = tuple(x.bfloat16() for x in batch.new)
    slots = torch.full((len(batch.picks),), -1, dtype=torch.int64, device=DEVICE)
    kernels.store.store(batch.cache, slots, *new, None, None)
    kernels.attend(batch.metadata, batch.cache, tuple(x.bfloat16() for x in batch.queries), batch.picks, new)
    assert launched <= noted and len(launched) == (6 if reads_rows else 5) + has_sinks


def test_layers_of_a_kind_share_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken once a step, for decodes and prompts of all of them. Nothing is launched."""
    codec, taken = codec_of("tq4"), []
    layers, batch = [kernels_of(codec, 16) for _ in range(2)], Batch(codec, 16, 400)
    monkeypatch.setattr(Launch, "__call__", lambda *_arguments: None)
    monkeypatch.setattr(flash, "flash_mla_sparse_fwd", attend_nothing)
    manager = flash.current_workspace_manager
    monkeypatch.setattr(flash, "current_workspace_manager", lambda: taken.append(None) or manager())
    queries, new = (tuple(x.bfloat16() for x in pair) for pair in (batch.queries, batch.new))
    for step in (1, 2):
        batch.metadata.steps = StepCache()
        outputs = [kernels.attend(batch.metadata, batch.cache, queries, batch.picks, new) for kernels in layers]
        assert len(taken) == step and outputs[0].data_ptr() == outputs[1].data_ptr()


def test_padded_heads() -> None:
    assert [padded_heads(n) for n in (1, 16, 64, 65, 128)] == [64, 64, 64, 128, 128]


@pytest.mark.parametrize("tokens", [6, 300])
def test_counts_of_picks(tokens: int) -> None:
    """Requests of 1 to 4 query tokens have them; an empty one behind has none, nor padding, mapped to the first one."""
    random = torch.Generator().manual_seed(tokens)
    lengths = torch.randint(1, 5, (tokens // 3,), generator=random)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths, torch.zeros(1, dtype=torch.int64))).cumsum(0)
    seq_lens = torch.cat((lengths + torch.randint(0, 200, lengths.shape, generator=random), torch.zeros(1)))
    requests = torch.zeros(tokens, dtype=torch.int64)
    known = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:tokens]
    requests[: len(known)] = known
    tensors = [x.to(DEVICE, torch.int32) for x in (requests, starts, seq_lens)]
    counts = torch.full((tokens + 1,), -7, dtype=torch.int32, device=DEVICE)
    grid, arguments = CountPicksLaunch.step(tokens, PICKS)
    CountPicksLaunch()(grid, (counts, *tensors), arguments)
    assert torch.equal(counts[:-1], count_picks(*tensors, PICKS)) and counts[-1] == -7


GATHERED = "Triton gathers picked latents to bf16 for FlashMLA, 1.3 to 1.7 times fp8_ds_mla's time on an H200"
NO_WGMMA = "latents on compute capability 10.0 (only 9.0, for its wgmma)"


@pytest.mark.parametrize(
    ("option", "capability", "line"),
    [
        ("auto", (9, 0), "CUDA (picked latents, 16 query heads, 3 query tokens per request)"),
        ("triton", (9, 0), f"{GATHERED} (the CUDA kernel is disabled by decode_kernel=triton)"),
        ("auto", (10, 0), f"{GATHERED} (the CUDA kernel does not support {NO_WGMMA})"),
    ],
)
def test_one_line_names_the_kernel(
    option: str, capability: tuple[int, int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(choice.logger, "info_once", lambda text, found, **_: lines.append(text % found), raising=False)
    layer = SparseLayout(codec_of("tq4"), 16, SCALE, None, PICKS)
    assert (hopper_kernel(layer, option, 8, 3) is not None) == line.startswith("CUDA")
    assert lines == [f"decode kernel: {line}"]


@runs
def test_layers_of_a_kind_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those with other heads or with sinks, nor the next step. What a step keeps goes with its metadata, without a
    collection."""
    codec, made = codec_of("tq4"), []
    make = CountPicksLaunch.step
    monkeypatch.setattr(CountPicksLaunch, "step", lambda tokens, picks: made.append(tokens) or make(tokens, picks))
    batch = Batch(codec, 16, 400)
    queries, whole = tuple(x.bfloat16() for x in batch.queries), batch.metadata
    layers = [kernels_of(codec, heads, reads_rows=True) for heads in (16, 16, 5)]
    layers.append(kernels_of(codec, 5, reads_rows=True, sinks=sinks_of(5)))

    def step(tokens: int) -> tuple[list[torch.Tensor], SparseLatentMetadata]:
        metadata = SparseLatentMetadata(
            num_reqs=2, max_query_len=3, max_seq_len=150, num_actual_tokens=tokens, slot_mapping=whole.seq_lens.long(),
            query_start_loc=whole.query_start_loc, block_table=whole.block_table, seq_lens=whole.seq_lens,
            req_id_per_token=whole.req_id_per_token, num_decodes=2, num_decode_tokens=tokens,
        )  # fmt: skip
        found = []
        for kernels in layers:
            of_layer = tuple(x[:tokens, : kernels.layer.heads] for x in queries)
            picks = batch.picks[:tokens]
            found.append(kernels.attend(metadata, batch.cache, of_layer, picks, None).clone())
        return found, metadata

    expected, batch.queries = batch.expected(codec.output_constant()), tuple(x[:, :5] for x in batch.queries)
    of_sinks = batch.expected(codec.output_constant(), sinks_of(5))
    gc.disable()
    try:
        for tokens in (4, 1):
            made.clear()
            found, metadata = step(tokens)
            assert made == [tokens] * 3, "one for both layers of 16 heads, one for that of 5, and one for sinks"
            for output, kernels in zip(found, layers, strict=True):
                rows = [0, 2, 3][:tokens]  # token 1 has no picks
                truth = expected[:, : kernels.layer.heads] if kernels.sinks is None else of_sinks
                assert relative_rms(output[rows], truth[rows]) < TOLERANCE
            kept = weakref.ref(metadata)
            del metadata
            assert kept() is None
    finally:
        gc.enable()
