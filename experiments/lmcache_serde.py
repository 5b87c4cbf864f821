"""Serializers of LMCache's multiprocess server beside packed-kv's: bytes, time for a chunk, error.

    pip install --no-deps lmcache==0.5.6 aiofile aiofiles caio     # beside vLLM, which brings the rest that is imported
    python experiments/lmcache_serde.py --csv lmcache.csv

Each serializer comes from LMCache's own registry. A chunk of 8 MiB goes through LMCache's own wrapper of an `fs`
adapter: from the server's memory into a file, is looked up and loaded back (not with `--direct`, where that adapter's
packages are missing). Times are those of the serializer alone, from host memory to host memory, the median of several
chunks; a GPU, where there is one, is used by those that can. LMCache's TurboQuant needs a GPU: without one its error
comes from its kernels under Triton's interpreter, on a small chunk and without its fp8 keys, which the interpreter
rounds otherwise.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, TOKENS, HEADS, HEAD_DIM = 8, 256, 8, 128
REPEATS = 5
TURBOQUANT = {"head_dim": HEAD_DIM, "skip_first_layers": 0, "skip_last_layers": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {}),
    *(("turboquant", {"preset": name, **TURBOQUANT}) for name in ("turboquant_k8v4", "turboquant_4bit_nc",
                                                                  "turboquant_3bit_nc")),
    *(("packed_kv", {"dtype": name, "head_dim": HEAD_DIM}) for name in ("tq4", "isoquant4", "turboquant35", "isoquant3",
                                                                       "turboquant25")),
]  # fmt: skip


def chunk(tokens: int, *, large_channels: bool) -> Any:
    """bf16 [2, layers, tokens, heads * head_dim], Gaussian; with `large_channels`, 4 % of K's are 12 times larger."""
    import torch

    x = torch.randn(2, LAYERS, tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    if large_channels:
        x[0, ..., 7::27] *= 12
    return x.flatten(-2).bfloat16()


def error(result: Any, x: Any, plane: int) -> float:
    """Relative RMS error of K (plane 0) or V (1)."""
    return float((result[plane].float() - x[plane].float()).norm() / x[plane].float().norm())


def wait(ask: Callable[[], Any]) -> Any:
    """What LMCache answers once it has."""
    while (not (answer := ask()) and answer is None) or answer == {}:
        time.sleep(0.002)
    return answer


class Chunk:
    """What a serializer asks of LMCache's `MemoryObj`."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self.tensor = tensor.pin_memory() if torch.cuda.is_available() else tensor

    def get_shapes(self) -> list[Any]:
        return [self.tensor.shape]

    def get_tensor(self, group: int) -> Any:
        return self.tensor


def through_a_file(x: Any, serde: Any) -> tuple[Any, int]:
    """A chunk after a way into a file and back, and the file's bytes, by LMCache's own memory, wrapper and adapter."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
    from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper

    with tempfile.TemporaryDirectory() as folder:
        memory = L1MemoryManagerConfig(size_in_bytes=256 << 20, use_lazy=False, shm_name="")
        manager = L1Manager(L1ManagerConfig(memory))
        config = FSL2AdapterConfig.from_dict({"type": "fs", "base_path": folder})
        inner = create_l2_adapter(config, manager.get_l1_memory_desc())
        adapter = SerdeL2AdapterWrapper(inner=inner, serde=serde, l1_manager=manager)
        key = ObjectKey(chunk_hash=bytes(32), model_name="model", kv_rank=0)
        layout = MemoryLayoutDesc(shapes=[x.shape], dtypes=[x.dtype])
        (_, kept), *_ = manager.reserve_write(keys=[key], is_temporary=[False], layout_desc=layout).values()
        kept.tensor.copy_(x)
        manager.finish_write_and_reserve_read([key])
        adapter.submit_store_task([key], [kept])
        (stored,) = wait(adapter.pop_completed_store_tasks).values()
        assert stored.is_successful(), stored
        (file,) = Path(folder).iterdir()
        size = file.stat().st_size
        kept.tensor.zero_()
        task = adapter.submit_lookup_and_lock_task([key], [layout])
        assert wait(lambda: adapter.query_lookup_and_lock_result(task)).test(0)
        task = adapter.submit_load_task([key], [kept])
        assert wait(lambda: adapter.query_load_result(task)).test(0)
        result = kept.tensor.clone()
        adapter.close()
    return result, size


def serve(serde: Any, x: Any, repeats: int = 1) -> tuple[Any, list[float]]:
    """A chunk packed and unpacked by a serializer, and the median ms of both."""
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    size = serde.estimate_serialized_size(MemoryLayoutDesc(shapes=[x.shape], dtypes=[x.dtype]))
    source, packed, result = Chunk(x), Chunk(torch.empty(size, dtype=torch.uint8)), Chunk(torch.zeros_like(x))
    took: list[list[float]] = [[], []]
    for _ in range(repeats):
        for i, step in enumerate((
            lambda: serde._serializer.serialize(source, packed, None),
            lambda: serde._deserializer.deserialize(packed, result, None),
        )):  # fmt: skip
            begun = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took[i].append(1e3 * (time.perf_counter() - begun))
    return result.tensor, [statistics.median(times) for times in took]


def interpreted_errors(name: str, options: dict[str, Any]) -> None:
    """Print the errors of a serializer whose kernels Triton interprets, on the CPU."""
    import torch
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
    from lmcache.v1.distributed.serde.turboquant import decode_kernel, store_kernel, turboquant

    turboquant._select_cuda_device = lambda *_: torch.device("cpu")
    for module in (decode_kernel, store_kernel, turboquant):
        module._use_fp8_e4b15 = lambda *_: 0
    serde = create_serde_processor(SerdeConfig(name, options))
    plain, large = (chunk(16, large_channels=large)[:, :1].contiguous() for large in (False, True))
    results = [serve(serde, x)[0] for x in (plain, large)]
    print("ERRORS", error(results[0], plain, 0), error(results[0], plain, 1), error(results[1], large, 0))


def measure(number: int, *, direct: bool) -> dict[str, object]:
    """The row of a case."""
    import packed_kv.lmcache
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor, get_registered_serde_types

    name, options = CASES[number]
    if packed_kv.lmcache.NAME not in get_registered_serde_types():
        packed_kv.lmcache.register()
    x, large = (chunk(TOKENS, large_channels=large) for large in (False, True))
    serde = create_serde_processor(SerdeConfig(name, options))
    size = serde.estimate_serialized_size(MemoryLayoutDesc(shapes=[x.shape], dtypes=[x.dtype]))
    on_gpu = torch.cuda.is_available()
    if name == "turboquant" and not on_gpu:
        command = [sys.executable, __file__, "--interpret", str(number)]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ERRORS")]
        assert lines, done.stderr[-2000:]
        errors: list[object] = [*map(float, lines[0])]
        if options["preset"] == "turboquant_k8v4":
            errors[0] = errors[2] = ""
        times: list[Any] = ["", ""]
    else:
        result, times = serve(serde, x, REPEATS)
        errors = [error(result, x, 0), error(result, x, 1), error(serve(serde, large)[0], large, 0)]
        if not direct:
            loaded, file_bytes = through_a_file(x, create_serde_processor(SerdeConfig(name, options)))
            assert torch.equal(loaded, result) and file_bytes == size, (file_bytes, size)
    return {
        "serde": name, "setting": options.get("preset", options.get("dtype", "")),
        "chunk_bytes": x.nbytes, "bytes": size, "ratio": x.nbytes / size, "pack_ms": times[0], "unpack_ms": times[1],
        "key_error": errors[0], "value_error": errors[1], "large_channels_error": errors[2],
        "machine": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "lmcache": importlib.metadata.version("lmcache"), "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("lmcache.csv"), help="file of the rows (default: %(default)s)")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers of CASES")
    parser.add_argument("--direct", action="store_true", help="the serializers alone, without a file")
    parser.add_argument("--interpret", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpret is not None:
        interpreted_errors(*CASES[options.interpret])
        return
    with options.csv.open("w", newline="") as file:
        writer = None
        for number in options.cases:
            row = {
                name: f"{x:.4g}" if isinstance(x, float) else x
                for name, x in measure(number, direct=options.direct).items()
            }
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(*(f"{name} {value} " for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
