"""A vLLM engine with NIXL in a process of its own: it computes prompts for others like it, or goes on with theirs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS, ANSWER_SECONDS = 300, 180
Prepare = Callable[[], object]
"""Called by a process before its engine starts: importable by name."""


@dataclass
class Answer:
    """An engine's answer to a prompt. `params` are for the decode engine; `transfers` has bytes, descriptors and
    seconds of each read of each rank."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    params: dict[str, Any] | None
    seconds: float
    transfers: list[tuple[int, int, float]]


def keep_transfers(worker: Any) -> None:
    """In a worker: from now on, remember what NIXL says of each read; vLLM only counts."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats as Stats

    record, worker.transfers = Stats.record_transfer, []

    def kept(stats: Stats, telemetry: Any) -> None:
        worker.transfers.append((telemetry.totalBytes, telemetry.descCount, telemetry.xferDuration / 1e6))
        record(stats, telemetry)

    Stats.record_transfer = kept


def take_transfers(worker: Any) -> list[tuple[int, int, float]]:
    """In a worker: what was remembered since the last call."""
    transfers, worker.transfers = worker.transfers, []
    return transfers


def yield_cores(worker: Any) -> None:
    """In a worker on a CPU: let NIXL's thread, which polls without pause, run only where a core is idle; and the model
    on any core, as vLLM has just bound it to one that all engines of the host share."""
    python = {thread.native_id for thread in threading.enumerate()}
    for task in map(int, os.listdir("/proc/self/task")):
        if task not in python:
            os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def digest_pages(worker: Any, blocks: list[int]) -> dict[str, list[list[bytes]]]:
    """In a worker: of each attention layer and KV head of this rank, digests of its pages in `blocks`."""
    import torch

    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context
    digests: dict[str, list[list[bytes]]] = {}
    for name, layer in layers.items():
        if hasattr(layer, "impl"):
            cache = layer.kv_cache  # [blocks, KV heads, tokens, bytes or channels of K and V]
            pages = cache[torch.tensor(blocks, device=cache.device)].cpu().view(torch.uint8)
            found = [hashlib.sha256(page.numpy().tobytes()).digest()[:8] for page in pages.flatten(0, 1)]
            digests[name] = [found[head :: cache.shape[1]] for head in range(cache.shape[1])]
    return digests


def keep_windows(worker: Any) -> None:
    """In a worker: from now on, remember of each step of a request how many tokens lie before it, and the first of them
    that is read from the recent window."""
    from packed_kv.window.metadata import WindowMetadataBuilder

    build, worker.windows = WindowMetadataBuilder.build, []

    def kept(self: WindowMetadataBuilder, prefix: int, common: Any, *arguments: Any, **options: Any) -> Any:
        made = build(self, prefix, common, *arguments, **options)
        before = common.seq_lens - common.query_start_loc.diff()
        worker.windows.extend(zip(before.tolist(), made.first.tolist(), strict=True))
        return made

    WindowMetadataBuilder.build = kept


def take_windows(worker: Any) -> list[tuple[int, int]]:
    """In a worker: what was remembered since the last call."""
    windows, worker.windows = worker.windows, []
    return windows


def serve(
    connection: Connection, log: str, environment: dict[str, str], model: str, options: dict[str, Any],
    prepare: Prepare,
) -> None:  # fmt: skip
    """The process: an engine that answers what comes through `connection`, until that is None."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment, VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    from packed_kv_quality.engines import engine, prepare_environment

    prepare_environment(small_model=True)
    import torch
    from vllm import SamplingParams

    prepare()
    with engine(model, **options) as llm:
        llm.collective_rpc(keep_transfers)
        if not torch.cuda.is_available():
            llm.collective_rpc(yield_cores)
            llm.collective_rpc(keep_windows)
        connection.send("ready")
        while (message := connection.recv()) is not None:
            prompt, params, count = message
            if prompt is None:
                call = (take_windows, ()) if params is None else (digest_pages, (params,))
                connection.send(llm.collective_rpc(call[0], args=call[1]))
                continue
            extra = {"kv_transfer_params": params} if params else None
            sampling = SamplingParams(
                max_tokens=count, temperature=0, ignore_eos=True, logprobs=0, detokenize=False, extra_args=extra
            )
            begun = time.perf_counter()
            (result,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
            seconds, output = time.perf_counter() - begun, result.outputs[0]
            logprobs = [next(iter(entry.values())).logprob for entry in output.logprobs]
            reads = [read for rank in llm.collective_rpc(take_transfers) for read in rank]
            tokens, params = list(output.token_ids), result.kv_transfer_params
            connection.send(Answer(tokens, logprobs, output.finish_reason, params, seconds, reads))


class Peer:
    """An engine in a process of its own, on the CPU unless `environment` names devices; `wait` until it is ready.

    `role`: kv_producer or kv_consumer. `environment`: of the process, VLLM_NIXL_SIDE_CHANNEL_PORT at least. `options`:
    more arguments of `LLM`. `prepare`: called there first.
    """

    def __init__(
        self, model: str, role: str, log: Path, environment: dict[str, str], options: dict[str, Any],
        prepare: Prepare = int,
    ) -> None:  # fmt: skip
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        device = "cuda" if "CUDA_VISIBLE_DEVICES" in environment else "cpu"
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": device}
        options = {"kv_transfer_config": transfer, **options}
        self.log, arguments = log, (theirs, str(log), environment, model, options, prepare)
        self.process = context.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()

    def _receive(self, seconds: float) -> Any:
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
            reason = f"no answer in {seconds:.0f} s"
        except EOFError:
            reason = "the engine ended"
        raise RuntimeError(f"{reason}; its log ends\n{self.log.read_text()[-3000:]}")

    def wait(self) -> None:
        """Until the engine is ready. Raises RuntimeError with the end of its log."""
        assert self._receive(START_SECONDS) == "ready"

    def ask(self, prompt: list[int], params: dict[str, Any] | None = None, count: int = 1) -> Answer:
        """Go on with `prompt` for `count` tokens. `params`: of NIXL, from another engine's answer."""
        self.connection.send((prompt, params, count))
        return self._receive(ANSWER_SECONDS)

    def prefill(self, prompt: list[int]) -> Answer:
        """Compute a prompt for another engine."""
        return self.ask(prompt, {"do_remote_decode": True, "do_remote_prefill": False})

    def pages(self, blocks: list[int]) -> list[bytes]:
        """Digests of the pages of all layers, KV heads (of all ranks, in order) and `blocks`."""
        self.connection.send((None, blocks, 0))
        ranks = self._receive(ANSWER_SECONDS)
        heads = [head for name in ranks[0] for rank in ranks for head in rank[name]]
        return [page for head in heads for page in head]

    def windows(self) -> list[list[tuple[int, int]]]:
        """Return what each rank's `take_windows` returns, on a CPU."""
        self.connection.send((None, None, 0))
        return self._receive(ANSWER_SECONDS)

    def close(self) -> None:
        """End the engine, and its process in any case."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(None)
        self.process.join(10)
        self.process.kill()
