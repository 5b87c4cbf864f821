"""Pages that come back from host memory, or from disk after a restart: same tokens and logprobs as with a prefix hit.

On a GPU with vLLM's own copies and all dtypes; on the CPU `cpu_offload` stands in for the copies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from calibration_files import content, write
from cpu_offload import connector, count_copies
from harness import Start, engine, keep_chunks, scheduler
from packed_kv.formats import FORMATS
from packed_kv.sharing.fingerprint import page_format
from recent_windows import ring_specs
from vllm import LLM, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens
from vllm.v1.kv_offload.tiering.fs import thread_pool

ON_GPU = torch.cuda.is_available()
BLOCK = 16 if ON_GPU else 32  # what the CPU's own backend takes, for skipped layers
HEADS, HEAD_DIM = 2, 64
PROMPT = torch.randint(tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
WHOLE = len(PROMPT) // BLOCK * BLOCK
SAMPLING = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False, logprobs=5)
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16" if ON_GPU else "float32", "max_model_len": 256, "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 4 << 20, "block_size": BLOCK,
}  # fmt: skip
Answer = tuple[int, list[int], list[dict[int, float]]]
"""Tokens of the prompt that were found; the tokens that follow, and their logprobs."""


def ask(llm: LLM, length: int = len(PROMPT)) -> Answer:
    """Return what follows the first `length` tokens of the prompt."""
    (result,) = llm.generate({"prompt_token_ids": PROMPT[:length]}, SAMPLING, use_tqdm=False)
    (output,) = result.outputs
    logprobs = [{token: one.logprob for token, one in step.items()} for step in output.logprobs]
    return result.num_cached_tokens, list(output.token_ids), logprobs


def page_bytes(dtype: str, block: int = BLOCK) -> int:
    """Bytes of a block of a layer of `tiny_models`."""
    return block * HEADS * FORMATS[dtype].slot_bytes(HEAD_DIM)


ALL = FORMATS if ON_GPU else ["isoquant4"]
CASES = [*((name, "llama", None) for name in ALL), ("turboquant25", "gemma2", None), ("isoquant3", "mistral", 0)]


@pytest.mark.parametrize(("dtype", "model", "recent_tokens"), CASES, ids=[f"{case[1]}-{case[0]}" for case in CASES])
def test_pages_come_back(dtype: str, model: str, recent_tokens: int | None, tmp_path: Path) -> None:
    """Of full layers, of sliding and full ones, of sliding ones alone. Copied are the packed bytes and no more; a
    default recent window's rings (None) stay where they are."""
    folder = tiny_models.save(getattr(tiny_models, model)(), tmp_path)
    options = {"recent_tokens": recent_tokens, "kv_transfer_config": connector()}
    with engine(folder, dtype, **OPTIONS, **options) as llm, count_copies() as copied:
        layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
        assert check_round_trip(llm, copied)[0] == WHOLE
    page = page_bytes(dtype)
    assert {size for sizes in copied.values() for size in sizes} == {page}
    if model == "llama":
        assert sum(copied["store"]) == sum(copied["load"]) == layers * WHOLE // BLOCK * page


def test_pages_of_latents_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no block of the recent window's."""
    keep_chunks(monkeypatch)
    folder = tiny_models.save(tiny_models.deepseek_v2(), tmp_path)
    options = {"compilation_config": {"custom_ops": ["none"]}, "kv_transfer_config": connector()}
    with engine(folder, "tq4", recent_tokens=None, **OPTIONS, **options) as llm, count_copies() as copied:
        assert len(ring_specs(llm)) == 1
        assert check_round_trip(llm, copied)[0] == WHOLE
    assert sum(copied["store"]) == sum(copied["load"]) == 3 * WHOLE * FORMATS["tq4"].latent_bytes(512, 64)


def test_pages_of_latents_on_disk_are_found_by_engines_of_one_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart all of them, and none by engines of another calibration or another dtype."""
    keep_chunks(monkeypatch)
    folder, root = tiny_models.save(tiny_models.deepseek_v2(), tmp_path / "model"), tmp_path / "kv"
    file = str(write(tmp_path, content(3, 1, 512, 128, version=2)))
    others: list[dict[str, Any]] = [{}, {"additional_config": {"packed_kv": {"calibration": file}}}]
    options = {**OPTIONS, "compilation_config": {"custom_ops": ["none"]}, "kv_transfer_config": connector(root)}
    with engine(folder, "tq4", **options) as llm:
        assert ask(llm)[0] == 0
        hit = ask(llm)
    found = []
    for dtype, more in (("tq4", others[0]), ("tq4", others[1]), ("isoquant4", others[0])):
        with engine(folder, dtype, **options, **more) as llm:
            found.append(ask(llm))
    assert [answer[0] for answer in found] == [WHOLE, 0, 0]
    assert found[0] == hit


def check_round_trip(llm: LLM, copied: dict[str, list[int]]) -> Answer:
    """Check that host memory gives what is in the prefix cache; returns the answer to that."""
    assert ask(llm)[0] == 0
    hit = ask(llm)
    assert not copied["load"]
    llm.reset_prefix_cache()
    assert ask(llm) == hit
    assert copied["load"]
    return hit


def test_pages_beside_skipped_layers_come_back(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.llama(), tmp_path)
    options = {"kv_cache_dtype_skip_layers": ["1"], "kv_transfer_config": connector()}
    with engine(folder, "tq4", **OPTIONS, **options) as llm, count_copies() as copied:
        assert check_round_trip(llm, copied)[0] == WHOLE
        block = llm.llm_engine.vllm_config.cache_config.block_size  # vLLM may take a larger one for two backends
        dense = block * HEADS * 2 * HEAD_DIM * llm.llm_engine.model_config.dtype.itemsize
    packed = page_bytes("tq4", block)
    assert sorted({*copied["store"]}) == [packed, dense]
    assert sum(copied["load"]) == WHOLE // block * (2 * packed + dense)


def test_pages_and_states_come_back(start: Start) -> None:
    """Of a hybrid model, whose states are copied as they are."""
    options = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "max_num_seqs": 4, "max_model_len": 4096}
    options |= {"dtype": OPTIONS["dtype"], "kv_transfer_config": connector(host_bytes=64 << 20)}
    options["max_num_batched_tokens"] = 128  # a step past a block's end is not possible on a CPU
    with start("GraniteMoeHybridForCausalLM", "tq4", **options) as llm, count_copies() as copied:
        block = llm.llm_engine.vllm_config.cache_config.block_size
        prompt = {"prompt_token_ids": (PROMPT * 100)[: 2 * block + 20]}
        found, tokens = [], []
        for is_reset in (False, False, True):
            if is_reset:
                assert not copied["load"]
                llm.reset_prefix_cache()
            (result,) = llm.generate(prompt, SAMPLING, use_tqdm=False)
            found.append(result.num_cached_tokens)
            tokens.append([sorted((t, one.logprob) for t, one in step.items()) for step in result.outputs[0].logprobs])
        groups = scheduler(llm).kv_cache_config.kv_cache_groups
        sizes = {spec_bytes(group.kv_cache_spec) for group in groups}
    assert found[0] == 0
    assert found[1] == found[2] == 2 * block
    assert tokens[1] == tokens[2]
    assert {*copied["store"]} == {*copied["load"]} == sizes


def spec_bytes(spec: Any) -> int:
    """Bytes of a page of attention or a state, without what it is padded with."""
    return replace(spec, page_size_padded=None).page_size_bytes


def test_pages_on_disk_come_back_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All full blocks; if one's file is damaged, those before it, and it is written again."""
    folder, root = tiny_models.save(tiny_models.llama(), tmp_path / "model"), tmp_path / "kv"
    damaged, lines = 3, []
    monkeypatch.setattr(thread_pool.logger, "error", lambda line, *parts: lines.append(line % parts))
    options = {"recent_tokens": None, "kv_transfer_config": connector(root)}
    with engine(folder, "isoquant4", **OPTIONS, **options) as llm:
        ask(llm, damaged * BLOCK + 1)
        some = ask(llm)
        whole = ask(llm)
        assert (some[0], whole[0]) == (damaged * BLOCK, WHOLE)
        path = path_of_block(root, damaged)
        assert page_format(llm.llm_engine.vllm_config, FORMATS["isoquant4"]) in config_beside(path)
    content = bytearray(path.read_bytes())
    with engine(folder, "isoquant4", **OPTIONS, **options) as llm:
        assert ask(llm) == whole
    content[100] ^= 1
    path.write_bytes(content)
    with engine(folder, "isoquant4", **OPTIONS, **options) as llm:
        assert ask(llm) == some
        llm.reset_prefix_cache()  # the host tier has them all by now
        assert ask(llm) == whole
    content[100] ^= 1
    assert path.read_bytes() == content
    (line,) = lines
    assert f"{path} is truncated, corrupted or another engine's: treated as a cache miss and deleted" in line


def path_of_block(root: Path, number: int) -> Path:
    """The file of the prompt's block, which vLLM names by the hash of the prompt up to there."""
    block_hash: BlockHash | None = None
    for first in range(0, (number + 1) * BLOCK, BLOCK):
        block_hash = hash_block_tokens(sha256, block_hash, PROMPT[first : first + BLOCK])
    assert block_hash is not None
    (path,) = root.rglob(f"{block_hash.hex()}.bin")
    return path


def config_beside(path: Path) -> str:
    """Return what vLLM writes down of a folder of pages."""
    folder = path.parents[2]
    return (folder.with_name(folder.name.removesuffix("_r0")) / "config.json").read_text()
