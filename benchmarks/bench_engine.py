"""A vLLM engine in this process, and what `decode.py` measures in it: decode steps, prefill, throughput.

Contexts of the decode steps are not prefilled. One prompt runs through the model, its pages are copied over all others,
and the requests' prompts are then marked as computed: every request reads pages of its own, which hold what the dtype's
own store wrote. With a recent window they decode its tokens first, which fills their rings. So a shape costs these
steps and its own, and the bytes that a step moves are those after a real prefill. Where vLLM zeroes blocks that it
hands out (beside states, or keys of an indexer), the pages are copied over the requests' own once more, behind the step
that took them. States begin as zeros.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from in_worker import (
    attention_backends,
    cache_bytes,
    clear_states,
    keep_pages,
    launch_seconds,
    spread_over,
    spread_pages,
)
from step_kernels import KernelTimes, covered, device_kernels, kernel_times

if TYPE_CHECKING:
    from vllm import LLM

REPO = Path(__file__).resolve().parents[1]
MODEL_8B = json.loads((REPO / "benchmarks" / "shapes" / "8b" / "config.json").read_text())
CHUNK = 8192
"""Tokens of a step, and so of a prefill chunk."""
SOURCE_TOKENS = 2048
"""Tokens whose pages are copied over the cache."""
WARM_UP_STEPS, SPARE_TOKENS = 5, 8
"""Steps before the timed ones; tokens that requests have left after them, so that none ends while others are timed."""


def write_model(folder: str, means: str | None = None) -> str:
    """Write the config of the 8B-shaped model into `folder`, and a made-up calibration file with `means` of keys of a
    kind of `made_up_calibration.KINDS`; none for another. Returns the folder."""
    import made_up_calibration

    Path(folder, "config.json").write_text(json.dumps(MODEL_8B))
    if means in made_up_calibration.KINDS:
        made_up_calibration.write(folder, means)
    return folder


def graph_sizes(max_requests: int) -> list[int]:
    """Batch sizes of the CUDA graphs: fewer than vLLM's own, to start sooner."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, max_requests, 16)) if size < max_requests} | {max_requests})


def start(
    model: str, dtype: str, max_model_len: int, max_requests: int, kv_cache_memory: int | None, ranks: int = 1,
    recent_tokens: int | None = None, chunk: int = CHUNK, compilation: dict[str, Any] | None = None,
    memory_share: float = 0.9, drafts: int = 0, batches: Sequence[int] = (), **more: Any,
) -> LLM:  # fmt: skip
    """An engine with dummy weights on `ranks` devices; `kv_cache_memory` in bytes, None for what a device has left.

    `recent_tokens`: of the packed dtypes' recent window; None: their default. `chunk`: tokens of a step.
    `compilation`: vLLM's, by default CUDA graphs for steps of decodes alone and no compiler, to start sooner.
    `memory_share`: of the device; less where engines share it. `drafts`: tokens of an n-gram draft that each step of a
    request verifies, and refuses. `batches`: requests of the CUDA graphs; () for `graph_sizes`. `more`: arguments of
    `LLM` as they are; without `enable_prefix_caching` there is no prefix caching.
    """
    from vllm import LLM

    given = more.pop("additional_config", {})
    if find_spec("flashinfer") is None:  # which vLLM takes on Hopper for prompts of gated delta nets, there or not
        given = {"gdn_prefill_backend": "triton", **given}
    if recent_tokens is not None:
        given = {**given, "packed_kv": {**given.get("packed_kv", {}), "recent_tokens": recent_tokens}}
    if compilation is None:
        sizes = [(1 + drafts) * size for size in (sorted({*batches}) or graph_sizes(max_requests))]
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    if drafts:
        refused = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * drafts}
        looked_up = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        more["speculative_config"] = {"num_speculative_tokens": drafts, **looked_up, **refused}
    return LLM(
        model, kv_cache_dtype=dtype, load_format="dummy", skip_tokenizer_init=True, seed=0,
        max_model_len=max_model_len, max_num_batched_tokens=chunk, max_num_seqs=max_requests,
        gpu_memory_utilization=memory_share, kv_cache_memory_bytes=kv_cache_memory,
        tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else "uni",
        compilation_config=compilation, cudagraph_metrics=True,
        additional_config=given, **({"enable_prefix_caching": False} | more),
    )  # fmt: skip


def random_weights() -> None:
    """Let engines that start later have random weights as of a model, in the place of vLLM's dummy ones, of which all
    keys are alike: an indexer's picks would be, too."""
    import pytest

    sys.path.append(str(REPO / "tests" / "support"))
    import sparse_models

    sparse_models.random_weights(pytest.MonkeyPatch())


def spare_search() -> None:
    """Let Triton take the first configuration of each kernel that it would search for one: in models with states those
    that serve prompts, which takes it a minute."""
    sys.path += [str(REPO / "scripts" / "architectures"), str(REPO / "quality")]
    import coverage_engine

    coverage_engine.keep_one_configuration()


@dataclass(frozen=True)
class RecordedStep:
    """Tokens of each request in a step, and the mode and tokens of the CUDA graphs that it ran in (NONE: its own)."""

    tokens: list[int]
    graph: str
    padded: int


@dataclass(frozen=True)
class MixedSteps:
    """Steps of one kind: seconds of each and of the host's launches in it, and what ran; `kernels` of further steps."""

    seconds: list[float]
    launches: list[float]
    seen: list[RecordedStep]
    kernels: KernelTimes | None

    def graph(self, first: int = 0) -> str:
        """Mode and tokens of the CUDA graphs of most of the steps from the `first` on: FULL 192."""
        return " ".join(map(str, most_common((step.graph, step.padded) for step in self.seen[first:])))


def most_common(found: Iterable[Any]) -> Any:
    """The value that is there most often."""
    ((value, _),) = Counter(found).most_common(1)
    return value


@dataclass(frozen=True)
class Throughput:
    """Times of a wave of requests: seconds in all, until each had its first token, and of each step in which all
    decode."""

    requests: int
    seconds: float
    first_tokens: list[float]
    decode_steps: list[float]


class Engine:
    """Measures in an engine whose scheduler is in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), otherwise idle."""

    def __init__(self, llm: LLM) -> None:
        from packed_kv.window.size import find_window
        from vllm.v1.kv_cache_interface import MambaSpec

        self.llm, self.engine = llm, llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.block_size = self.engine.vllm_config.cache_config.block_size
        self.blocks = self.scheduler.kv_cache_config.num_blocks
        config = self.scheduler.kv_cache_config
        specs = (group.kv_cache_spec for group in config.kv_cache_groups)
        self.states = sum(1 + spec.num_speculative_blocks for spec in specs if isinstance(spec, MambaSpec))
        self.paged = [
            group in config.prefix_cacheable_groups and not isinstance(group.kv_cache_spec, MambaSpec)
            for group in config.kv_cache_groups
        ]
        self.groups = self.paged.count(True)
        self.drafts = self.engine.vllm_config.num_speculative_tokens
        self.window = find_window(self.engine.vllm_config)[0]
        self._added = 0

    def attention(self) -> str:
        """Names of the layers' attention backends, with the version where it is FlashAttention."""
        return self.llm.collective_rpc(attention_backends)[0]

    def fill_pages(self) -> None:
        """Prefill one prompt and copy its pages over all others, but where states are: they are copied later."""
        tokens = max(SOURCE_TOKENS, self.block_size)  # which beside states are thousands
        tokens = min(tokens, self.engine.model_config.max_model_len - SPARE_TOKENS)
        self._add(tokens, SPARE_TOKENS)
        while not self._step():
            pass
        (request,) = self.scheduler.running
        ids = max(self._paged_ids(request), key=lambda ids: len(set(ids)))  # of full attention: all blocks are there
        self.llm.collective_rpc(keep_pages, args=(ids[: max(1, tokens // self.block_size)], self.blocks))
        self._drain()
        if not self.states:
            self.llm.collective_rpc(spread_pages)

    def _paged_ids(self, request: Any) -> list[list[int]]:
        """Blocks of a request in each group that has pages, and neither rings nor states."""
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return [of_group for of_group, is_paged in zip(ids, self.paged, strict=True) if is_paged]

    def fits(self, requests: int, context: int, steps: int, prompt: int = 0, prefix: int = 0) -> bool:
        """True if the cache holds what `decode_steps` needs, or `mixed_steps`: two prompts beside the decodes, and the
        prefix that they share."""
        tokens = context + WARM_UP_STEPS + steps + SPARE_TOKENS + self.drafts
        blocks = requests * -(-tokens // self.block_size) + 2 * -(-prompt // self.block_size)
        blocks += -(-prefix // self.block_size)
        states = (requests + 2 * (prompt > 0)) * self.states
        return blocks * self.groups + states < self.blocks

    def decode_steps(self, requests: int, context: int, steps: int) -> list[float]:
        """Seconds of each of `steps` steps in which `requests` requests decode, with `context` tokens or a few more.

        The pages must have been filled, and the shape must fit. With drafts, each of these steps verifies all tokens of
        a draft for every request; on a GPU, all run in CUDA graphs.
        """
        self._start_decodes(requests, context, steps)
        times = []
        with self._recorded_steps() as seen:
            for _ in range(steps):
                started = time.perf_counter()
                decoded = self._step()
                times.append(time.perf_counter() - started)
                if decoded != requests:
                    raise RuntimeError(f"{decoded} of {requests} requests decoded in a step")
        self._check_steps(seen, requests, steps)
        self._drain()
        return times

    def kernel_seconds(self, requests: int, context: int, steps: int) -> float:
        """Seconds of a step as in `decode_steps` in which the device runs kernels, by PyTorch's profiler: the mean of
        `steps`. The profiler slows the host, but not what the device does. Without a CUDA device it is 0. Raises
        RuntimeError if the profiler sees no kernel of a device."""
        self._start_decodes(requests, context, steps)
        with torch.profiler.profile() as profile:  # of the host and of what devices there are
            for _ in range(steps):
                self._step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self._drain()
        return covered((start, end) for _, start, end in device_kernels(profile)) * 1e-6 / steps

    def mixed_steps(
        self, requests: int, context: int, prompt: int, steps: int, prefix: int = 0, kernel_steps: int = 0
    ) -> MixedSteps:
        """Run `steps` steps in which `requests` requests decode and a new prompt of `prompt` tokens is prefilled (0:
        none). `kernel_steps` more run under PyTorch's profiler, on a CUDA device.

        A prompt that is longer than a step's tokens runs in chunks, the next one behind it: steps are full. The pages
        must have been filled, and what runs must fit. Requests are made before the steps, and each is handed to the
        scheduler as its step begins.

        prefix: tokens, whole blocks, that stand before those of a prompt that fits a step, and are in the prefix cache:
        they are computed once; the others differ from prompt to prompt. Raises ValueError if the steps cannot have such
        a prefix, RuntimeError if most of them had other tokens than these.
        """
        limit = self.engine.vllm_config.scheduler_config.max_num_batched_tokens
        is_chunked = prompt + requests * (1 + self.drafts) > limit
        if prefix and (is_chunked or not prompt or prefix % self.block_size):
            raise ValueError(f"{prompt} tokens behind {prefix} beside {requests} decodes: a prefix of whole blocks of "
                             f"{self.block_size} tokens stands before a prompt that fits {limit} tokens")  # fmt: skip
        kernel_steps *= torch.cuda.is_available()
        shared = self._random(prefix)
        self._start_decodes(requests, context, steps + kernel_steps, shared)
        held: deque[Any] = deque()
        if is_chunked:
            for _ in range((steps + kernel_steps) * limit // prompt + 2):
                self._add(prompt, 1)
        elif prompt:
            for _ in range(steps + kernel_steps):
                self._add_prompt(shared + self._random(prompt), 1)
                held.append(self.scheduler.waiting.pop_request())

        def step() -> None:
            if held:
                self.scheduler.waiting.add_request(held.popleft())
            self._step()

        self.llm.collective_rpc(launch_seconds)
        with self._recorded_steps() as seen:
            stamps = [time.perf_counter()]
            for _ in range(steps):
                step()
                stamps.append(time.perf_counter())
        launches = self.llm.collective_rpc(launch_seconds)[0]
        if kernel_steps:
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(kernel_steps):
                    step()
                torch.cuda.synchronize()
        self._drain()
        tokens = most_common(tuple(sorted(found.tokens)) for found in seen)
        expected = tuple(sorted([1 + self.drafts] * requests + [prompt] * (prompt > 0)))
        if not is_chunked and tokens != expected:
            raise RuntimeError(f"most steps had {tokens} tokens of a request, not {expected}")
        kernels = None
        if kernel_steps:
            is_whole = most_common(found.graph for found in seen) == "FULL"
            kernels = kernel_times(device_kernels(profile), kernel_steps, is_whole)
        return MixedSteps([end - start for start, end in pairwise(stamps)], launches, seen, kernels)

    def prefill(self, tokens: int, repeats: int) -> list[float]:
        """Seconds until the first token of prompts of `tokens` tokens, one at a time, in chunks; a warm-up before."""
        times = []
        for _ in range(1 + repeats):
            self._add(tokens, 1)
            started = time.perf_counter()
            self._drain()
            times.append(time.perf_counter() - started)
        return times[1:]

    def requests_that_fit(self, budget: int, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens that `budget` bytes of KV cache hold."""
        return self.blocks_of(budget) // -(-tokens // self.block_size)

    def throughput(self, requests: int, budget: int, prompt: int, output: int) -> Throughput:
        """`requests` requests at once, of `prompt` tokens in and `output` out, with `budget` bytes of KV cache."""
        with self.budget(self.blocks_of(budget)):
            for _ in range(requests):
                self._add(prompt, output)
            steps: list[float] = []
            begun: dict[str, float] = {}
            started = time.perf_counter()
            while self.engine.has_unfinished_requests():
                step_started = time.perf_counter()
                decoded = [result.request_id for result in self.engine.step()]
                now = time.perf_counter()
                if len(decoded) == requests:
                    steps.append(now - step_started)
                if len(begun) < requests:
                    begun = {name: now - started for name in decoded} | begun
        if not steps:
            raise RuntimeError(f"{requests} requests never ran all at once")
        return Throughput(requests, time.perf_counter() - started, sorted(begun.values()), steps)

    def blocks_of(self, budget: int) -> int:
        """Blocks of `budget` bytes of KV cache. Raises ValueError if the cache has not as many."""
        if self.groups != 1:  # their layers share memory, which `cache_bytes` would count twice
            raise ValueError(f"the model has {self.groups} KV cache groups; a budget needs one with one (--budget 0)")
        block_bytes = sum(self.llm.collective_rpc(cache_bytes)) // self.blocks
        if budget // block_bytes >= self.blocks:
            raise ValueError(f"a budget of {budget} bytes is more than the KV cache has: {self.blocks * block_bytes}")
        return budget // block_bytes

    @contextmanager
    def budget(self, blocks: int) -> Iterator[None]:
        """Leave the scheduler `blocks` blocks."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
        try:
            yield
        finally:
            pool.free_blocks(taken)

    def _start_decodes(self, requests: int, context: int, steps: int, prefix: Sequence[int] = ()) -> None:
        """Let `requests` requests decode, with `context` tokens, for WARM_UP_STEPS and `steps` more, after the tokens
        `prefix` were computed.

        Pages and rings share memory, and bytes of pages, read as a ring, may be NaN. So pages are copied once more,
        over rings of earlier requests, and the new ones first decode a window of tokens, which fills their rings.
        Beside states zeros do the same.
        """
        self.llm.collective_rpc(clear_states if self.states else spread_pages)
        if prefix:
            self._add_prompt(prefix, 1)
            self._drain()
        prompt, warm_up = context - self.window, self.window + WARM_UP_STEPS
        for _ in range(requests):
            self._add(prompt, warm_up + steps + SPARE_TOKENS)
        for request in self.scheduler.waiting:
            request.num_computed_tokens = prompt - 1  # as after a transfer from another engine's cache
        while self._step() < requests:
            if any(request.num_preemptions for request in self.scheduler.requests.values()):
                raise RuntimeError(f"the cache is too small: {requests} requests of {context} tokens preempt others")
        if self.scheduler.needs_kv_cache_zeroing:
            ids = [block for request in self.scheduler.running for found in self._paged_ids(request) for block in found]
            self.llm.collective_rpc(spread_over, args=(ids,))
        for _ in range(warm_up):
            self._step()

    @contextmanager
    def _recorded_steps(self) -> Iterator[list[RecordedStep]]:
        """The steps whose results the scheduler takes meanwhile."""
        seen: list[RecordedStep] = []
        update = self.scheduler.update_from_output

        def recorded(scheduled: Any, output: Any) -> Any:
            graph, tokens = output.cudagraph_stats, [*scheduled.num_scheduled_tokens.values()]
            ran = (graph.runtime_mode, graph.num_padded_tokens) if graph else ("NONE", sum(tokens))
            seen.append(RecordedStep(tokens, *ran))
            return update(scheduled, output)

        self.scheduler.update_from_output = recorded
        try:
            yield seen
        finally:
            self.scheduler.update_from_output = update

    def _check_steps(self, seen: list[RecordedStep], requests: int, steps: int) -> None:
        """Raises RuntimeError unless these were the `steps` steps of `requests` requests, drafts and all, in graphs."""
        if len(seen) != steps:
            raise RuntimeError(f"{len(seen)} steps ended, not {steps}")
        for step in seen:
            if step.tokens != [1 + self.drafts] * requests:
                raise RuntimeError(
                    f"a step had {step.tokens} tokens, not {1 + self.drafts} of {requests} requests each"
                )
            if torch.cuda.is_available() and step.graph != "FULL":
                raise RuntimeError(f"a step ran in CUDA graphs of the mode {step.graph}, not FULL")

    def _random(self, tokens: int) -> list[int]:
        """So many random tokens."""
        return torch.randint(3, self.vocabulary, (tokens,)).tolist()

    def _add(self, tokens: int, output: int) -> None:
        """Add a request with a prompt of `tokens` random tokens."""
        self._add_prompt(self._random(tokens), output)

    def _add_prompt(self, tokens: Sequence[int], output: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
        prompt: Any = {"prompt_token_ids": list(tokens)}
        self.engine.add_request(str(self._added), prompt, sampling)
        self._added += 1

    def _step(self) -> int:
        """Run a step; returns the number of requests that got a token (with async scheduling, of the step before)."""
        return len(self.engine.step())

    def _drain(self) -> None:
        """Run until all requests are done."""
        while self.engine.has_unfinished_requests():
            self.engine.step()
