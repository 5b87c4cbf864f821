"""The recent window beside KV connectors: behind pages from elsewhere it fills, and what it holds is no page."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import tiny_models
import torch
from checkout import DEMO_MODEL
from cpu_offload import connector, count_copies
from harness import Start, engine, mean_kl, newest_logits, scheduler
from packed_kv.window.layer import WindowLayer
from packed_kv.window.metadata import WindowMetadataBuilder
from recent_windows import layout, ring_specs
from vllm import LLM, SamplingParams

ON_GPU = torch.cuda.is_available()
DTYPE, WINDOW, HIT, TAIL = "turboquant25", 32, 256, 120
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16" if ON_GPU else "float32", "max_model_len": 512, "block_size": 128, "skip_tokenizer_init": True,
    "recent_tokens": WINDOW,
}  # fmt: skip
Reads = list[tuple[int, int]]
"""Reads of each step of one request: tokens before it, and the first of them that is in the ring."""


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def several(*children: dict[str, Any]) -> dict[str, Any]:
    """`--kv-transfer-config` of a MultiConnector."""
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found: Reads = []
    build = WindowMetadataBuilder.build

    def kept(self: WindowMetadataBuilder, prefix: int, common: Any, *arguments: Any, **options: Any) -> Any:
        made = build(self, prefix, common, *arguments, **options)
        lengths = common.seq_lens - common.query_start_loc.diff()
        found.extend(zip(lengths.tolist(), made.first.tolist(), strict=True))
        return made

    monkeypatch.setattr(WindowMetadataBuilder, "build", kept)
    return found


def clear_free_blocks(llm: LLM) -> None:
    """Clear them of what rings have left there. vLLM's CPU attention multiplies what lies behind a request's end in its
    last page by 0, and a ring's bytes, read as floats, may be NaN."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    free = [block.block_id for block in pool.blocks if not (block.ref_cnt or block.block_hash or block.is_null)]
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, WindowLayer):
            layer.kv_cache.unflatten(0, (pool.num_gpu_blocks, -1))[free] = 0


def behind_pages(llm: LLM, text: list[int], reads: Reads) -> torch.Tensor:
    """Logits of a text's tokens behind the first `HIT`, in chunks of 8, where these come from host memory. In the
    prefix cache they are the same pages, and the same follows."""
    assert llm.llm_engine.vllm_config.cache_config.block_size > TAIL, "the tail has no page of its own"
    llm.generate({"prompt_token_ids": text[: HIT + 1]}, SamplingParams(max_tokens=1), use_tqdm=False)
    clear_free_blocks(llm)
    hit = newest_logits(llm, text)
    with count_copies() as copied:
        llm.reset_prefix_cache()
        clear_free_blocks(llm)
        reads.clear()
        loaded = newest_logits(llm, text)
    assert copied["load"]
    assert len(loaded) == TAIL
    assert torch.equal(loaded, hit)
    return loaded


cpu_only = pytest.mark.skipif(ON_GPU, reason="`reads` follows the calls and the steps of vLLM's CPU runner only")
FULL = [(before, max(HIT, before - WINDOW + 1)) for before in range(HIT, HIT + TAIL, 8)]
"""Reads of rings that fill behind the pages."""


@cpu_only
def test_the_window_fills_behind_pages_from_host_memory_and_disk(tmp_path: Path, reads: Reads) -> None:
    """Well behind them little is left to pay for. With several connectors, and in an engine that finds the pages of
    another on disk."""
    demo, found = str(DEMO_MODEL), {}
    with engine(demo, "auto", dtype=OPTIONS["dtype"]) as llm:
        text = llm.get_tokenizer().encode(topics["assignment"])[: HIT + TAIL]
        truth = newest_logits(llm, text)[HIT:]
    for window in (0, WINDOW, WINDOW):
        transfer = several(connector(tmp_path / str(window)), connector())
        options = {**OPTIONS, "recent_tokens": window, "kv_transfer_config": transfer}
        with engine(demo, DTYPE, **options) as llm:
            if window in found:
                assert len(newest_logits(llm, text)) == TAIL, "nothing comes from disk"
            found.setdefault(window, []).append(behind_pages(llm, text, reads))
            assert reads == (FULL if window else [])
    (pages,), (ring, of_disk) = found.values()
    assert torch.equal(ring, of_disk)
    costs = [mean_kl(truth[3 * WINDOW :], rows[3 * WINDOW :]) for rows in (pages, ring)]
    print(f"KL of pages {costs[0]:.4f}, with a ring {costs[1]:.4f}")
    assert costs[1] < costs[0] / 5


@cpu_only
def test_the_window_fills_behind_pages_and_states(start: Start, reads: Reads) -> None:
    """Parts of several rings lie in a block there."""
    states = {"mamba_cache_mode": "align", "enable_prefix_caching": True, "max_num_batched_tokens": 128}
    transfer = connector(host_bytes=64 << 20)
    with start("Lfm2ForCausalLM", DTYPE, **OPTIONS, **states, kv_transfer_config=transfer) as llm:
        behind_pages(llm, random_tokens(HIT + TAIL), reads)
        (spec,) = ring_specs(llm)
        assert spec.ring_blocks_a_block > 1
    assert reads == FULL


@cpu_only
def test_the_window_fills_behind_pages_of_several_sizes(tmp_path: Path, reads: Reads) -> None:
    """Those of skipped layers lie side by side with packed ones."""
    model = tiny_models.save(tiny_models.llama(), tmp_path)
    with engine(model, DTYPE, kv_cache_dtype_skip_layers=["1"], kv_transfer_config=connector(), **OPTIONS) as llm:
        behind_pages(llm, random_tokens(HIT + TAIL), reads)
        assert layout(llm) == "BLHNC"
    assert reads == FULL


@pytest.mark.parametrize(("kv_heads", "expected"), [(2, "LBHNC"), (1, "BLHNC")])
def test_pages_of_a_draft_come_back_beside_a_window(kv_heads: int, expected: str, tmp_path: Path) -> None:
    config = tiny_models.llama()
    model = tiny_models.save(config, tmp_path)
    draft = tiny_models.eagle(tmp_path / "draft", kv_heads, 64 if kv_heads == 2 else 96, config)
    speculation = {"method": "eagle", "model": draft, "num_speculative_tokens": 3}
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    prompt, found = {"prompt_token_ids": random_tokens(HIT + 20)}, []
    with engine(model, DTYPE, speculative_config=speculation, kv_transfer_config=connector(), **OPTIONS) as llm:
        assert layout(llm) == expected and ring_specs(llm)
        with count_copies() as copied:
            for is_reset in (False, False, True):
                if is_reset:
                    llm.reset_prefix_cache()
                    copied["load"].clear()
                (result,) = llm.generate(prompt, sampling, use_tqdm=False)
                found.append((result.num_cached_tokens, result.outputs[0].token_ids, result.outputs[0].logprobs))
        assert copied["load"]
    assert found[1] == found[2]
    assert found[1][0] > 0


@pytest.mark.skipif(ON_GPU, reason="copies are played, each as late as can be")
def test_a_ring_waits_for_the_store_of_the_page_it_overwrites(tmp_path: Path) -> None:
    """A prompt's pages are copied to host memory a step later, when it has ended and the next one has its blocks."""
    model = tiny_models.save(tiny_models.llama(num_hidden_layers=2), tmp_path)
    prompts, sampling = [random_tokens(100, seed) for seed in (0, 1)], SamplingParams(max_tokens=1, logprobs=5)
    options = {**OPTIONS, "max_model_len": 128, "block_size": 16, "max_num_seqs": 1, "recent_tokens": 40}
    found = []
    for blocks in (200, 21):
        with engine(model, DTYPE, num_gpu_blocks_override=blocks, kv_transfer_config=connector(), **options) as llm:
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
            llm.reset_prefix_cache()
            with count_copies() as copied:
                (result,) = llm.generate({"prompt_token_ids": prompts[0]}, sampling, use_tqdm=False)
            assert copied["load"]
            found.append(result.outputs[0].logprobs)
    assert found[0] == found[1]
