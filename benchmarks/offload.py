"""KV pages to host memory, to disk and back: GB/s by block size, and the time to the first token of a context.

    python benchmarks/offload.py copies [--csv FILE]                 # no engine: copies of the pages of 10k tokens
    python benchmarks/offload.py contexts --folder DIR [--csv FILE]  # in an engine with a host tier and one on disk

Pages are those of an 8B-shaped model: 36 layers, 8 KV heads of 128 channels. A block, of `--blocks` tokens, is one
piece a layer. `copies` moves the blocks of 10,240 tokens from and to random blocks with

- vLLM: what its offloading does with these pieces, descriptors made in Python included;
- DMA: the same descriptors for the copy engines (cudaMemcpyBatchAsync), without the Python;
- kernel: the same pieces copied by vLLM's Triton kernel, on 12 SMs, from the store side too;
- whole: all bytes in one copy, the limit of the bus.

`contexts` asks `--prompts` prompts of 10,240 tokens and one more, one at a time, for one token: when nothing is known
of them, when the GPU's prefix cache has them, when the host tier has (the prefix cache emptied), when the disk has (the
host tier emptied, too, as after a restart), with the files in the operating system's cache and dropped from it. Rows
have the times to the first token, and the bytes and GB/s of the copies from host memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_engine
import torch
from packed_kv.formats import FORMATS
from rows import append, commit_here, machine, percentiles

if TYPE_CHECKING:
    from vllm import LLM

LAYERS, KV_HEADS, HEAD_DIM, TOKENS = 36, 8, 128, 10240
REPEATS = 7
CHUNK_TOKENS = 8192
"""Tokens of a prefill's step."""


def page_bytes(dtype: str, block: int) -> int:
    """Return the bytes of a layer's page of `block` tokens; `auto` is bf16."""
    slot = FORMATS[dtype].slot_bytes(HEAD_DIM) if dtype in FORMATS else 2 * 2 * HEAD_DIM
    return block * KV_HEADS * slot


class Pages:
    """Pages on the GPU and in host memory, with vLLM's worker between them."""

    def __init__(self, dtype: str, block: int) -> None:
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
            GPULoadStoreSpec,
        )
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        page, count = page_bytes(dtype, block), TOKENS // block
        self.bytes = LAYERS * page * count
        cache = torch.randint(-128, 128, (LAYERS, 2 * count, page), dtype=torch.int8, device="cuda")
        refs = [CanonicalKVCacheRef(layer, page) for layer in range(LAYERS)]
        row = -(-LAYERS * page // SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT) * SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
        region = SharedOffloadRegion(f"bench_{os.getpid()}_{block}_{dtype}", count, 0, row, LAYERS * page)
        tensors = [CanonicalKVCacheTensor(layer, page) for layer in cache]
        self.worker = CPUOffloadingWorker(CanonicalKVCaches(tensors, [refs]), 1, count, region)
        self.handlers = {"store": self.worker._store_handler, "load": self.worker._load_handler}
        blocks = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].tolist()
        places = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        self.gpu, self.host = GPULoadStoreSpec(blocks, [count], [0]), CPULoadStoreSpec(places)
        self.jobs = 0
        flat = torch.empty(self.bytes, dtype=torch.int8, pin_memory=True)
        self.whole = {"store": (flat, cache.flatten()[: self.bytes]), "load": (cache.flatten()[: self.bytes], flat)}

    def move(self, direction: str) -> float:
        """Seconds of vLLM's worker, from the call until the bytes are there."""
        self.jobs += 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        if direction == "store":
            self.worker.submit_store(self.jobs, self.gpu, self.host)
        else:
            self.worker.submit_load(self.jobs, self.host, self.gpu)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        self.worker.get_finished()
        return seconds

    def descriptors(self, direction: str) -> tuple[torch.Tensor, ...]:
        """Addresses and bytes of each piece, as the worker makes them."""
        handler, found = self.handlers[direction], []
        handler._swap_blocks_batch, copy = lambda *args, **_options: found.extend(args), handler._swap_blocks_batch
        self.move(direction)
        handler._swap_blocks_batch = copy
        return tuple(tensor.clone().pin_memory() for tensor in found[:3])

    def methods(self, direction: str) -> Iterator[tuple[str, Callable[[], float]]]:
        from vllm import _custom_ops as ops
        from vllm.v1.kv_offload.cpu.swap_blocks_triton import swap_blocks_batch

        pieces, (target, source) = self.descriptors(direction), self.whole[direction]
        is_any = direction == "load"
        kernel = functools.partial(swap_blocks_batch, *pieces, is_any, bytes_per_chunk=8192)
        yield "vLLM", lambda: self.move(direction)
        yield "DMA", lambda: timed(lambda: ops.swap_blocks_batch(*pieces, is_src_access_order_any=is_any))
        yield "kernel", lambda: timed(kernel)
        yield "whole", lambda: timed(lambda: target.copy_(source, non_blocking=True))

    def close(self) -> None:
        self.worker.shutdown()


def timed(call: Callable[[], object]) -> float:
    """Seconds until what was asked of the GPU is done, on a stream as the worker has them."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def copies(options: argparse.Namespace, made_with: dict[str, str]) -> None:
    for dtype in options.dtypes:
        for block in options.blocks:
            pages = Pages(dtype, block)
            for direction in ("store", "load"):
                for name, method in pages.methods(direction):
                    method()
                    seconds = [method() for _ in range(REPEATS)]
                    speed = f"{pages.bytes / statistics.median(seconds) / 1e9:.1f}"
                    case = {"dtype": dtype, "block": block, "piece_bytes": page_bytes(dtype, block)}
                    case |= {"direction": direction, "method": name, "bytes": pages.bytes, "gb_s": speed}
                    print(*case.values(), "GB/s", flush=True)
                    if options.csv:
                        append(options.csv, {**case, **percentiles(seconds), **made_with})
            pages.close()
            del pages


def start(options: argparse.Namespace, dtype: str, block: int, model: str, folder: Path) -> LLM:
    from vllm import LLM

    name, _, module = options.spec.partition("@")
    extra = {"spec_name": name, "spec_module_path": module, "cpu_bytes_to_use": int(options.host_memory)}
    extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder)}]
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return LLM(
        model, kv_cache_dtype=dtype, load_format="dummy", skip_tokenizer_init=True, seed=0, block_size=block,
        max_model_len=options.tokens + 64, max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=4, enforce_eager=True,
        kv_cache_memory_bytes=int(options.kv_cache_memory), kv_transfer_config=connector, disable_log_stats=True,
        distributed_executor_backend="uni",
    )  # fmt: skip


@contextmanager
def count_loads() -> Iterator[list[tuple[int, float]]]:
    """Bytes and seconds of each copy from host memory, by the GPU's clock."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker, loads = get_kv_transfer_group().connector_worker.worker, []
    handlers = [handler for name, handler in vars(worker).items() if "load_handler" in name]  # 0.33 has two

    def counted(finished: Callable[[], list[Any]]) -> list[Any]:
        results = finished()
        loads.extend((result.transfer_size, result.transfer_time) for result in results)
        return results

    for handler in handlers:
        handler.get_finished = functools.partial(counted, handler.get_finished)
    yield loads
    for handler in handlers:
        del handler.get_finished


def ask(llm: LLM, prompts: list[list[int]]) -> tuple[list[float], int]:
    """Seconds to the first token of each, one at a time; tokens that were found of the last."""
    from vllm import SamplingParams

    seconds, found = [], 0
    for prompt in prompts:
        began = time.perf_counter()
        (result,) = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
        )
        seconds.append(time.perf_counter() - began)
        found = result.num_cached_tokens
    return seconds, found


def settle(llm: LLM, folder: Path) -> None:
    """Run steps until all pages are in host memory and on disk."""
    before = -1
    while before != (now := sum(1 for _ in folder.rglob("*.bin"))):
        before = now
        ask(llm, [[1] * 8])
        time.sleep(0.5)


def drop_from_memory(folder: Path) -> None:
    """Take files out of the operating system's cache."""
    for path in folder.rglob("*.bin"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure_contexts(llm: LLM, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """A row for each tier in which the prompts' pages are found."""
    random = torch.Generator().manual_seed(0)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(3, vocabulary, (count, options.tokens + 1), generator=random).tolist()

    ask(llm, prompts(1))  # compiles and warms up
    asked = prompts(options.prompts)
    for source in ("computed", "prefix cache", "host", "disk (cached)", "disk"):
        if source != "computed":
            settle(llm, folder)
        if source == "disk":
            drop_from_memory(folder)
        if source not in ("computed", "prefix cache"):
            llm.reset_prefix_cache(reset_connector=source != "host")
        with count_loads() as loads:
            seconds, found = ask(llm, asked)
        moved, busy = (sum(column) for column in zip(*loads, strict=True)) if loads else (0, 0)
        row = {"source": source, "tokens": options.tokens, "found": found, **percentiles(seconds)}
        yield row | {"loaded_bytes": moved // len(asked), "gb_s": f"{moved / busy / 1e9:.1f}" if busy else ""}


def contexts(options: argparse.Namespace, made_with: dict[str, str]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for dtype in options.dtypes:
        for block in options.blocks:
            with tempfile.TemporaryDirectory() as model:
                began = time.perf_counter()
                folder = options.folder / f"{dtype}-{block}"
                llm = start(options, dtype, block, options.model or bench_engine.write_model(model), folder)
                print(f"{dtype}, blocks of {block}: started in {time.perf_counter() - began:.0f} s", flush=True)
                for row in measure_contexts(llm, options, folder):
                    row = {"dtype": dtype, "block": block, **row}
                    print(*row.values(), flush=True)
                    if options.csv:
                        append(options.csv, {**row, "disk": options.disk, **made_with})
                llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()
                torch.cuda.empty_cache()
                shutil.rmtree(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=["copies", "contexts"])
    add("--dtypes", nargs="+", default=["auto", "isoquant4"], help="default: %(default)s")
    add("--blocks", nargs="+", type=int, default=[16, 32, 64, 128], help="tokens of a block (default: %(default)s)")
    add("--folder", type=Path, help="contexts: where files are written")
    add("--disk", default="", help="contexts: what that is, for the rows")
    add("--model", help="contexts: folder of a model (default: 8B-shaped, dummy weights)")
    add("--tokens", type=int, default=TOKENS, help="contexts: of a prompt (default: %(default)s)")
    add("--prompts", type=int, default=3, help="contexts: default: %(default)s")
    add("--kv-cache-memory", type=float, default=9e9, help="contexts: bytes on the GPU (default: %(default)s)")
    add("--host-memory", type=float, default=9e9, help="contexts: bytes of the host tier (default: %(default)s)")
    add("--spec", default="TieringOffloadingSpec@", help="contexts: CLASS@MODULE, to try it without a GPU")
    add("--csv", type=Path)
    add("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    if options.what == "contexts" and options.folder is None:
        parser.error("contexts needs --folder")
    return options


def main() -> int:
    options = parse_arguments()
    made_with = {**machine(), "commit": options.commit or commit_here()}
    print(json.dumps(made_with), flush=True)
    if options.what == "copies":
        if not torch.cuda.is_available():
            print("offload.py: PyTorch sees no CUDA device; `contexts` runs without one", file=sys.stderr)
            return 1
        copies(options, made_with)
    else:
        contexts(options, made_with)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
