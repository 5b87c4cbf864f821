"""Which chunks the host tier should forget: hit rates of vLLM's policies over traces of agents and chats. Needs no GPU.

    python benchmarks/eviction.py [--csv FILE]

vLLM's own `CPUOffloadingManager` and policies (`lru`, `arc`) run behind a GPU prefix cache that is LRU, as vLLM's is;
each request looks its prompt up in both, loads what the host tier has, and stores the rest there, as the offloading
connector does. Two more policies are made here, from outside of vLLM (`cache_policy_module_path`):

- `Session`: forgets whole conversations, chosen by chance, tail first; under a load that does not fit, LRU forgets each
  conversation shortly before it comes back, and this one does not;
- `Farthest`: knows the trace and forgets what is needed last (Belady): no policy can do much better.

Sizes: 8 GB on the GPU and 24 GB in host memory; `--token-bytes` a token, by default those of isoquant4 in an 8B model
(36 layers, 8 KV heads of 128 channels; bf16: 147456); chunks of 64 tokens. Traces:

- agents: N at once; contexts of 8k tokens, of which 1k are in common, grow by 100 to 400 a turn up to 12k, then the
  agent starts again; think time exponential, mean 1 s; a turn takes 0.5 s;
- chat: conversations arrive as a Poisson process, 500 tokens in common, 100 to 2,000 to begin with and 150 to 600 more
  a turn, 5 turns on average, 20 s between them in the median (log-normal, sigma 1);
- documents: the chat, and for every second conversation a document of 8k to 30k tokens that is asked about once.

A row: trace, N or arrivals a second, policy, requests, share of the prompts' tokens found on the GPU, in host memory,
and in all. The first quarter of a trace fills the caches and is not counted.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rows import append, commit_here
from vllm import __version__
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

CHUNK = 64
GPU_BYTES, HOST_BYTES = 8e9, 24e9
LOADS = {"agents": (48, 72, 96, 128), "chat": (1, 2, 4), "documents": (0.5, 1, 2)}
REQUESTS = 4_000
POLICIES = ("lru", "arc", "Session", "Farthest")


@dataclass(frozen=True)
class Request:
    """A prompt of `tokens`, the first `common` of which all sessions share."""

    time: float
    session: int
    tokens: int
    common: int

    def chunks(self) -> list[bytes]:
        """Keys of its full chunks."""
        shared = self.common // CHUNK
        return [key_of(0 if chunk < shared else self.session, chunk) for chunk in range(self.tokens // CHUNK)]


def key_of(session: int, chunk: int) -> bytes:
    return make_offload_key(session.to_bytes(6, "big") + chunk.to_bytes(4, "big"), 0)


def agents(load: float, rng: random.Random) -> Iterator[Request]:
    """Endless, in order of time."""
    waiting = [(rng.random() * 10, agent + 1, 8192 + rng.randrange(4096)) for agent in range(int(load))]
    heapq.heapify(waiting)
    fresh = len(waiting) + 1
    while True:
        time, session, tokens = heapq.heappop(waiting)
        yield Request(time, session, tokens, 1024)
        tokens += rng.randrange(100, 401)
        if tokens > 12288:
            session, tokens, fresh = fresh, 8192, fresh + 1
        heapq.heappush(waiting, (time + 0.5 + rng.expovariate(1.0), session, tokens))


def chat(load: float, rng: random.Random, documents: bool = False) -> Iterator[Request]:
    """Endless, in order of time; with one-off documents if these are wanted."""
    waiting: list[tuple[float, int, int]] = []
    arrival, fresh = 0.0, 1
    while True:
        while not waiting or arrival <= waiting[0][0]:
            heapq.heappush(waiting, (arrival, fresh, 500 + rng.randrange(100, 2001)))
            if documents and fresh % 2:
                heapq.heappush(waiting, (arrival, -fresh, rng.randrange(8192, 30721)))
            arrival, fresh = arrival + rng.expovariate(load), fresh + 1
        time, session, tokens = heapq.heappop(waiting)
        yield Request(time, session if session > 0 else (1 << 40) - session, tokens, 500 if session > 0 else 0)
        if session > 0 and rng.random() < 0.8:
            heapq.heappush(waiting, (time + rng.lognormvariate(3.0, 1.0), session, tokens + rng.randrange(150, 601)))


def trace_of(name: str, load: float) -> list[Request]:
    rng = random.Random(0)
    source = agents(load, rng) if name == "agents" else chat(load, rng, documents=name == "documents")
    return [next(source) for _ in range(REQUESTS)]


class Listed(CachePolicy):
    """What the two policies here have in common: a table of chunks, and candidates in an order of their own."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[bytes, ChunkStatus] = {}

    def get(self, key: bytes) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        self.chunks[key] = chunk

    def remove(self, key: bytes) -> None:
        del self.chunks[key]

    def touch(self, keys: Iterable[bytes], req_context: ReqContext) -> None: ...

    def clear(self) -> None:
        self.chunks.clear()

    def candidates(self) -> Iterator[bytes]:
        """Chunks in the order in which they should go."""
        raise NotImplementedError

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        chosen: list[bytes] = []
        for key in self.candidates():
            if len(chosen) == n:
                break
            if key not in protected and self.chunks[key].ref_cnt == 0:
                chosen.append(key)
        if len(chosen) < n:
            return None
        gone = [(key, self.chunks[key]) for key in chosen]
        for key in chosen:
            self.remove(key)
        return gone


class Session(Listed):
    """Conversations by chance, each from its tail on. Common chunks (session 0) go last."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.sessions: dict[bytes, list[bytes]] = defaultdict(list)
        self.rng = random.Random(1)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        super().insert(key, chunk, req_context)
        self.sessions[key[:6]].append(key)

    def remove(self, key: bytes) -> None:
        super().remove(key)
        self.sessions[key[:6]].remove(key)
        if not self.sessions[key[:6]]:
            del self.sessions[key[:6]]

    def candidates(self) -> Iterator[bytes]:
        names = list(self.sessions)
        self.rng.shuffle(names)
        for name in sorted(names, key=lambda session: session == bytes(6)):
            yield from sorted(self.sessions[name], reverse=True)


class Farthest(Listed):
    """Belady's: what is needed farthest in the future first, of one conversation the tail first."""

    uses: dict[bytes, list[int]]
    """Key -> numbers of the requests that ask for it, the next one last. Set for a run."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.heap: list[tuple[int, int, bytes]] = []

    def _next(self, key: bytes) -> int:
        uses = self.uses[key]
        return uses[-1] if uses else REQUESTS

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        super().insert(key, chunk, req_context)
        self.push(key)

    def push(self, key: bytes) -> None:
        heapq.heappush(self.heap, (-self._next(key), -int.from_bytes(key[6:10], "big"), key))

    def candidates(self) -> Iterator[bytes]:
        kept, seen = [], set()
        while self.heap:
            entry = heapq.heappop(self.heap)
            key = entry[2]
            if key not in self.chunks or -entry[0] != self._next(key) or key in seen:
                continue
            seen.add(key)
            kept.append(entry)
            yield key
            if len(kept) > 4 * self.cache_capacity:
                break
        for entry in kept:
            heapq.heappush(self.heap, entry)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        popped: list[bytes] = []
        source, chosen = self.candidates(), []
        for key in source:
            popped.append(key)
            if key not in protected and self.chunks[key].ref_cnt == 0:
                chosen.append(key)
            if len(chosen) == n:
                break
        source.close()
        gone = [(key, self.chunks[key]) for key in chosen] if len(chosen) == n else None
        for key in chosen if gone else ():
            self.remove(key)
        for key in popped:
            if key in self.chunks:
                self.push(key)
        return gone


def run(
    trace: list[Request], policy: str, token_bytes: int, host_token_bytes: int | None = None
) -> tuple[float, float]:
    """Shares of the tokens of prompts that were found on the GPU and in host memory."""
    gpu: OrderedDict[bytes, None] = OrderedDict()
    sizes = (GPU_BYTES, token_bytes), (HOST_BYTES, host_token_bytes or token_bytes)
    gpu_chunks, host_chunks = (int(size // (CHUNK * of_token)) for size, of_token in sizes)
    uses: dict[bytes, list[int]] = defaultdict(list)
    if policy == "Farthest":
        for number in reversed(range(len(trace))):
            for key in trace[number].chunks():
                uses[key].append(number)
    Farthest.uses = uses
    manager = CPUOffloadingManager(host_chunks, policy, __name__)
    asked = on_gpu = in_host = 0
    for number, request in enumerate(trace):
        keys, context = request.chunks(), ReqContext(str(number))
        for position, key in enumerate(keys):
            if hasattr(context, "set_offload_key_position"):  # 0.33 and later
                context.set_offload_key_position(key, (position + 1) * CHUNK)
            if uses:
                uses[key].pop()
        hits = leading(keys, gpu.__contains__)
        loaded = leading(keys[hits:], partial(is_stored, manager, context))
        move(manager, keys, keys[hits : hits + loaded], context)
        if isinstance(manager._policy, Farthest):
            for key in filter(manager._policy.get, keys):
                manager._policy.push(key)
        for key in reversed(keys):  # vLLM frees a request's last block first
            gpu[key] = None
            gpu.move_to_end(key)
        while len(gpu) > gpu_chunks:
            gpu.popitem(last=False)
        if number >= len(trace) // 4:
            asked, on_gpu, in_host = asked + len(keys), on_gpu + hits, in_host + loaded
    return on_gpu / asked, in_host / asked


def leading(keys: list[bytes], is_there: Any) -> int:
    """How many of the first keys are there."""
    return next((number for number, key in enumerate(keys) if not is_there(key)), len(keys))


def is_stored(manager: CPUOffloadingManager, context: ReqContext, key: bytes) -> bool:
    return manager.lookup(key, context) is LookupResult.HIT


def move(manager: CPUOffloadingManager, keys: list[bytes], loaded: list[bytes], context: ReqContext) -> None:
    """A request's loads and stores, from its beginning to its end."""
    manager.on_new_request(context)
    if loaded:
        manager.prepare_load(loaded, context)
        manager.complete_load(loaded, context)
    stored = manager.prepare_store(keys, context)
    if stored is not None:
        manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--token-bytes", type=int, default=39168, help="default: %(default)s")
    parser.add_argument("--host-token-bytes", type=int, help="of pages that are re-encoded (default: as on the GPU)")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    for name in options.traces:
        for load in LOADS[name]:
            trace = trace_of(name, load)
            for policy in options.policies:
                shares = run(trace, policy, options.token_bytes, options.host_token_bytes)
                found = [f"{share:.3f}" for share in (*shares, sum(shares))]
                print(name, load, policy, *found, flush=True)
                row = {"trace": name, "load": load, "token_bytes": options.token_bytes, "policy": policy}
                if options.host_token_bytes:
                    row["host_token_bytes"] = options.host_token_bytes
                row["requests"] = len(trace)
                row |= dict(zip(("on_gpu", "in_host", "found"), found, strict=True))
                if options.csv:
                    append(options.csv, {**row, "vllm": __version__, "commit": commit_here()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
