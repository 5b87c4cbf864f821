"""Seconds from the start of a process to an engine's first token, and where they go.

Each case is a process of its own, one after the other: first with empty caches (cold), then with what the first one
left there (warm). The caches are those of packed-kv, Triton, torch.compile and vLLM, in a folder of this run. The
engine runs in that one process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so its steps can be timed by name; a server adds
the import of vLLM in the process that it starts.

A row has the seconds until the first token and, of these, what vLLM's worker took for each step of the start; of
`warm_up_s`, CUDA graphs took `graphs_s`; they hold `graphs_gib` of memory. A dtype may have a mode of graphs:
`fp8:FULL`; `tq4:MIXED` and `tq4:UNMIXED` are the default mode with `mixed_graphs` true and false. Of packed-kv's
kernels a row says how many were compiled and how many came from a cache, the sum of their seconds (several may be
compiled at a time), and which were compiled when requests ran.

With `--fork`, PyTorch and vLLM are imported once and each case is a fork of the process that did: where imports are
slow, as from a file system over a network, more cases fit into a time, and their differences are the same. An engine of
`auto` that is not counted goes before them, and vLLM's own cache, which knows what class the model is, is shared.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rows
import workers

DTYPES = ("auto", "fp8", "tq4", "isoquant4", "turboquant25")
STEPS = {
    "init_device": "device_s",
    "load_model": "load_s",
    "determine_available_memory": "profile_s",
    "initialize_from_config": "cache_s",
    "compile_or_warm_up_model": "warm_up_s",
}
"""Methods of vLLM's worker, in order, and the columns of their seconds."""
CACHES = {
    "PACKED_KV_CACHE": "packed_kv",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # the package may be missing
}
PROMPT, MAX_LEN, MAX_REQUESTS, STEP_TOKENS, CACHE_BYTES = 300, 2048, 64, 2048, 2 << 30
ROW, FIRST = "ROW ", "first"


@dataclass
class Kernels:
    """Packed-kv's kernels, as they are compiled or found in a cache."""

    compiled: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, when it was ready, in seconds after the start, and the seconds it took."""
    found: int = 0

    def watch_triton(self, started: float) -> None:
        """Hear of Triton's kernels."""
        import triton

        def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            function = getattr(src, "fn", None)
            if not getattr(function, "__module__", "").startswith("packed_kv"):
                return
            if cache_hit:
                self.found += 1
            else:
                self.compiled.append((function.__name__, time.monotonic() - started, times.total / 1e6))

        triton.knobs.compilation.listener = listener

    def watch_cuda(self, started: float) -> None:
        """Hear of the CUDA kernel's variants."""
        from packed_kv.kernels.cuda import nvrtc

        load_or_compile = nvrtc.load_or_compile

        def watched(name: str, compile_kernel: Callable[[], bytes]) -> bytes:
            was_compiled = False

            def compiled() -> bytes:
                nonlocal was_compiled
                was_compiled = True
                begun = time.monotonic()
                code = compile_kernel()
                self.compiled.append(("decode.cu", time.monotonic() - started, time.monotonic() - begun))
                return code

            code = load_or_compile(name, compiled)
            self.found += not was_compiled
            return code

        nvrtc.load_or_compile = watched


def time_steps(seconds: dict[str, float]) -> None:
    """Have vLLM's worker add the seconds of its `STEPS` to `seconds`."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker

    def timed(method: Callable[..., Any], column: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begun = time.monotonic()
            result = method(*args, **options)
            seconds[column] += time.monotonic() - begun
            return result

        return run

    for name, column in STEPS.items():
        setattr(Worker, name, timed(getattr(Worker, name), column))


@dataclass
class Captures:
    """Seconds that vLLM's second model runner takes to capture CUDA graphs, and their memory in bytes; nan and 0 where
    another one does."""

    seconds: float = math.nan
    memory: int = 0

    def watch(self) -> None:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        capture = GPUModelRunner.capture_model

        def timed(*args: Any, **options: Any) -> int:
            begun = time.monotonic()
            memory: int = capture(*args, **options)
            self.seconds, self.memory = time.monotonic() - begun, memory
            return memory

        GPUModelRunner.capture_model = timed


def measure(name: str, started: float, model: Path, options: argparse.Namespace) -> dict[str, object]:
    """In a worker: the row of an engine's start, without its first columns. `name`: dtype and mode of CUDA graphs;
    `model`: a folder for it."""
    import torch
    from vllm import LLM, SamplingParams

    imported = time.monotonic() - started
    import bench_engine

    dtype, mode = workers.split_mode(name)
    graphs, additional_config = workers.options_of_mode(mode)
    kernels, captures, seconds = Kernels(), Captures(), dict.fromkeys(STEPS.values(), 0.0)
    if torch.cuda.is_available() and dtype not in ("auto", "fp8"):
        kernels.watch_cuda(started)
        kernels.watch_triton(started)
    time_steps(seconds)
    captures.watch()
    if options.no_search:
        bench_engine.spare_search()
    compilation: dict[str, Any] | None = {"cudagraph_mode": graphs} if graphs else {}
    if not options.compile:
        compilation = None
    elif not options.all_graphs:
        compilation["cudagraph_capture_sizes"] = bench_engine.graph_sizes(options.max_requests)
    folder = _model(model, config_of(options.model, options.layers))
    llm: LLM = bench_engine.start(
        folder, dtype, MAX_LEN, options.max_requests, int(options.kv_cache_memory),
        chunk=STEP_TOKENS, enable_prefix_caching=True, compilation=compilation, additional_config=additional_config,
    )  # fmt: skip
    ready = time.monotonic() - started

    def ask(prompts: list[list[int]], output: int) -> float:
        begun = time.monotonic()
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.monotonic() - begun

    tokens = list(range(3, 3 + PROMPT))
    first = ask([tokens], 1)
    total = time.monotonic() - started
    at_start = len(kernels.compiled)
    # What other steps take: decodes, a prompt behind a cached prefix, and a batch of both.
    batches = ([tokens], [tokens + [i] * 40 for i in range(3, 8)], [tokens[i:] for i in range(40)])
    later = sum(ask(prompts, 4) for prompts in batches)
    for name, when, took in kernels.compiled:
        print(f"    {name:28} {took:6.2f} s, ready after {when:6.2f} s", flush=True)
    return {
        "first_token_s": f"{total:.2f}", "import_s": f"{imported:.2f}",
        **{name: f"{value:.2f}" for name, value in seconds.items()},
        "graphs_s": "" if math.isnan(captures.seconds) else f"{captures.seconds:.2f}",
        "graphs_gib": "" if math.isnan(captures.seconds) else f"{captures.memory / 2**30:.2f}",
        "other_s": f"{ready - imported - sum(seconds.values()):.2f}", "first_request_s": f"{first:.2f}",
        "later_requests_s": f"{later:.2f}",
        "kernels_compiled": len(kernels.compiled), "compile_s": f"{sum(took for *_, took in kernels.compiled):.2f}",
        "kernels_found": kernels.found,
        "compiled_by_requests": " ".join(name for name, when, _ in kernels.compiled if when > ready),
        "compiled_by_later_requests": " ".join(name for name, *_ in kernels.compiled[at_start:]),
    }  # fmt: skip


def config_of(model: str | None, layers: int | None) -> dict[str, Any]:
    """The config of a model's folder, or of the 8B-shaped model; its text has `layers` layers if they are given."""
    import bench_engine

    config = json.loads(Path(model, "config.json").read_text()) if model else {**bench_engine.MODEL_8B}
    if layers:
        config.get("text_config", config)["num_hidden_layers"] = layers
    return config


def _model(folder: Path, config: dict[str, Any]) -> str:
    """Put a config into a folder. Its name is in vLLM's keys of what torch.compile made, so a warm start has that of
    the cold one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def import_vllm() -> None:
    """Import what all cases need, but packed-kv, which is of their tree; and without CUDA, which no fork could use."""
    os.environ.update({**ENVIRONMENT, **os.environ})
    import torch
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import llama  # noqa: F401
    from vllm.v1.worker import gpu_worker  # noqa: F401

    assert not torch.cuda.is_initialized() and "packed_kv" not in sys.modules


def work(
    dtype: str,
    started: float,
    environment: dict[str, str],
    model: Path,
    tree: str,
    log: str,
    profile: str,
    options: Any,
) -> None:
    """A worker: measure, and print a row into the file `log`."""
    os.environ.update({**ENVIRONMENT, **os.environ, **environment})
    if tree:
        sys.path.insert(0, tree)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with open(log, "w") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    profiler = cProfile.Profile() if profile else None
    if profiler:
        profiler.enable()
    row = measure(dtype, started, model, options)
    if profiler:
        profiler.disable()
        profiler.dump_stats(profile)
    if tree and (found := str(sys.modules["packed_kv"].__file__)) != str(Path(tree, "packed_kv/__init__.py")):
        raise RuntimeError(f"packed_kv is {found}, not of {tree}")
    print(ROW + json.dumps({**row, **rows.machine()}), flush=True)
    os._exit(0)  # without what an engine does as it ends


def run_case(dtype: str, caches: Path, state: str, commit: str, tree: str, options: argparse.Namespace) -> bool:
    """Start a worker, write and print its row; whether it ended well."""
    folders = {name: str(caches / folder) for name, folder in CACHES.items()}
    if options.fork:
        folders["VLLM_CACHE_ROOT"] = str(caches.parent / "vllm")
    profile = f"{options.profile}-{dtype}-{state}.prof" if options.profile else ""
    context: Any = multiprocessing.get_context("fork" if options.fork else "spawn")
    with tempfile.NamedTemporaryFile("r") as log:
        arguments = (dtype, time.monotonic(), folders, caches / "model", tree, log.name, profile, options)
        worker = context.Process(target=work, args=arguments)
        worker.start()
        worker.join(options.timeout)
        if worker.is_alive():
            worker.kill()
            worker.join()
            print(f"{dtype} {state}: took more than {options.timeout} s", flush=True)
            return False
        output = Path(log.name).read_text()
    lines = output.splitlines()
    found = [json.loads(line.removeprefix(ROW)) for line in lines if line.startswith(ROW)]
    if not found:
        print(f"{dtype} {state} failed: {output[-3000:]}", flush=True)
        return False
    case = {"dtype": dtype, "caches": state, "torch_compile": "yes" if options.compile else "no",
            "max_requests": options.max_requests,
            "layers": options.layers or ("" if options.model else 36),
            "cpus": len(os.sched_getaffinity(0))}  # fmt: skip
    row = {**case, **found[0], "commit": commit}
    if state != FIRST:
        rows.append(options.csv, row)
    print(*(f"{name} {value} " for name, value in row.items() if value != "" and name not in rows.MACHINE), flush=True)
    print(*(line for line in lines if line.startswith("    ")), sep="\n", flush=True)
    return True


def tree_of(text: str) -> tuple[str, str]:
    """The commit and the absolute folder of an option COMMIT=FOLDER."""
    commit, _, folder = text.partition("=")
    if not Path(folder, "packed_kv").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: expected COMMIT=FOLDER, with the package packed_kv in FOLDER")
    return commit, str(Path(folder).resolve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=DTYPES, help="default: %(default)s")
    add("--csv", type=Path, default=Path("startup.csv"), help="file of the rows (default: %(default)s)")
    add("--states", nargs="+", default=["cold", "warm"], choices=["cold", "warm"], help="default: both")
    add("--caches", type=Path, help="folder of the caches, to go on with (default: a temporary one)")
    add("--compile", action="store_true", help="torch.compile")
    add("--all-graphs", action="store_true", help="with --compile: all sizes of CUDA graphs that vLLM has by itself")
    add("--max-requests", type=int, default=MAX_REQUESTS, help="at once (default: %(default)s)")
    add("--no-search", action="store_true", help="do not let Triton search for configurations of vLLM's kernels, which "
        "in models with states takes more than a minute")  # fmt: skip
    add("--layers", type=int, help="of the model (default: all)")
    add("--model", help="folder of another model, for its shape (default: 8B-shaped)")
    add("--kv-cache-memory", type=float, default=CACHE_BYTES, help="bytes (default: %(default)s)")
    add("--timeout", type=int, default=300, help="seconds of a start (default: %(default)s)")
    add("--profile", help="prefix of files for cProfile, which slows the start down")
    add("--commit", help="for the rows (default: what git says)")
    add("--fork", action="store_true", help="import PyTorch and vLLM once")
    add("--trees", nargs="+", type=tree_of, default=[], metavar="COMMIT=FOLDER", help="of the package, in turn")
    options = parser.parse_args()
    if not options.compile and (options.all_graphs or any(workers.split_mode(name)[1] for name in options.dtypes)):
        parser.error("--all-graphs and modes of CUDA graphs need --compile")
    trees = dict(options.trees) or {options.commit or rows.commit_here(): ""}
    ended_well = True
    with tempfile.TemporaryDirectory() as folder:
        caches = options.caches or Path(folder)
        if options.fork:
            begun = time.monotonic()
            import_vllm()
            print(f"imported in {time.monotonic() - begun:.1f} s", flush=True)
            commit, tree = next(iter(trees.items()))
            run_case("auto", caches / FIRST, FIRST, commit, tree, options)
        for dtype in options.dtypes:
            for state in options.states:
                for commit, tree in trees.items():
                    of_tree = f"{dtype}-{commit}" if options.trees else dtype
                    ended_well &= run_case(dtype, caches / of_tree, state, commit, tree, options)
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
