"""An engine by arithmetic: vLLM's scheduler and its prefix cache as a model, with measured seconds a step.

Blocks are those of vLLM's pool: the cache is looked up by chained hashes of whole blocks; a block that no request uses
any more keeps its content until it is the least recently freed one, of a request its last block first. The scheduler is
first come first served with chunked prompts, takes a request in when all its tokens fit, and preempts the youngest. A
step takes

    base + (KV tokens that are read) x kv_second + (prompt tokens) x prompt_second

with the three from rows that `decode.py` has measured, one request at a time. So the model knows nothing of how prompts
and decodes disturb each other, of launches, or of host memory. It serves the same loads as vLLM (`agents.py`).
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_engine
import rows
from agents import Progress
from packed_kv.model_shape import parse
from packed_kv.planning import cache

CHUNK = 8192
"""Most tokens of a step."""
FILES = "decode.csv", "prefill.csv"
CONTEXT_BLOCKS = 128
"""Tokens of a request, longer than any recent window, by which the window's blocks are counted."""


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, of each KV token that it reads, of each prompt token that it computes."""

    base: float
    kv_second: float
    prompt_second: float

    @classmethod
    def measured(cls, folder: Path, dtype: str) -> Speed:
        """Return the speed by `decode.csv` and `prefill.csv` in `folder`. Raises ValueError if they lack the dtype."""
        decode, prefill = ([row for row in rows.read(folder / file) if row["dtype"] == dtype] for file in FILES)
        steps = {(row["requests"], row["context"]): float(row["p50_ms"]) * 1e-3 for row in decode}
        prompts = {row["tokens"]: float(row["tokens_s"]) for row in prefill}
        try:
            short, long = steps["1", "2048"], steps["32", "8192"]
            prompt_second = 1 / prompts["8192"]
        except KeyError as shape:
            raise ValueError(f"{folder} has no steps or prompts of {shape} for {dtype}: measure them") from None
        kv_second = (long - short) / (32 * 8192 - 2048)
        return cls(short - 2048 * kv_second, kv_second, prompt_second)


def config_of(folder: str | None) -> dict[str, Any]:
    """The config of the model in `folder`, or of the 8B-shaped one."""
    return json.loads(Path(folder, "config.json").read_text()) if folder else bench_engine.MODEL_8B


def blocks_of(config: dict[str, Any], dtype: str, memory: int, block_size: int) -> tuple[int, int]:
    """Blocks of `memory` bytes of KV cache of a model with this config, and how many of them a recent window takes of a
    request, as `packed-kv plan` counts them."""
    shape, name = parse(config, "the model"), "bf16" if dtype == "auto" else dtype
    serving = cache.Serving(context=CONTEXT_BLOCKS * block_size, block_size=block_size)
    block = cache.bytes_per_token(shape, name, serving) * block_size
    return memory // block, cache.capacity(shape, name, serving, memory).request_bytes // block - CONTEXT_BLOCKS


class BlockPool:
    """vLLM's blocks: who uses them, what they hold, and which is given up next."""

    def __init__(self, blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # the first is taken first
        self._users = [0] * blocks
        self._content: dict[int, int] = {}  # block -> hash
        self._holder: dict[int, int] = {}  # hash -> block

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def hits(self, hashes: list[int]) -> list[int]:
        """Blocks of the longest prefix of `hashes` that is cached."""
        found: list[int] = []
        for one in hashes:
            if one not in self._holder:
                break
            found.append(self._holder[one])
        return found

    def unused(self, blocks: list[int]) -> int:
        """Return the number of `blocks` that no request uses."""
        return sum(block in self._free for block in blocks)

    def use(self, blocks: list[int]) -> None:
        """One more request uses these."""
        for block in blocks:
            self._free.pop(block, None)
            self._users[block] += 1

    def take(self, number: int) -> list[int]:
        """New blocks, whose content is lost."""
        taken = [self._free.popitem(last=False)[0] for _ in range(number)]
        for block in taken:
            self._users[block] = 1
            if (content := self._content.pop(block, None)) is not None:
                del self._holder[content]
        return taken

    def fill(self, block: int, content: int) -> None:
        """The block is full. If another holds the same, this one is not looked up."""
        if content not in self._holder and block not in self._content:
            self._holder[content], self._content[block] = block, content

    def release(self, blocks: list[int]) -> None:
        """A request no longer uses these. The last is given up first, one without content before all others."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._content:
                    self._free.move_to_end(block, last=False)


@dataclass(eq=False)
class _Request:
    name: str
    tokens: list[int]
    last: int  # its length when it is done
    computed: int = 0
    cached: int | None = None
    blocks: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


class SimulatedEngine:
    """Implements `agents.Engine` for `blocks` blocks of `block_size` tokens, of which a running request takes
    `ring_blocks` for its recent window."""

    def __init__(
        self, blocks: int, block_size: int, ring_blocks: int, speed: Speed, chunk: int = CHUNK, max_requests: int = 256
    ) -> None:
        self.block_size, self.ring_blocks, self.speed = block_size, ring_blocks, speed
        self.chunk, self.max_requests = chunk, max_requests
        self.pool = BlockPool(blocks)
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.preemptions = self.computed_tokens = 0
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time: float) -> None:
        self._now = max(self._now, time)

    def add(self, name: str, tokens: list[int], output: int) -> None:
        self.waiting.append(_Request(name, list(tokens), len(tokens) + output))

    def add_decoding(self, name: str, tokens: list[int], output: int) -> None:
        """A request whose prompt has been computed elsewhere, all but its last token. Raises ValueError if it does not
        fit."""
        request = _Request(name, list(tokens), len(tokens) + output, cached=0)
        if not self._allocate(request, len(tokens)):
            raise ValueError(f"a request of {len(tokens)} tokens does not fit {self.pool.free_blocks} free blocks")
        request.computed = len(tokens) - 1
        self.running.append(request)

    def abort(self, names: list[str]) -> None:
        for request in [request for request in self.running if request.name in names]:
            self.running.remove(request)
            self._free(request)
        self.waiting = deque(request for request in self.waiting if request.name not in names)

    def is_busy(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> list[Progress]:
        scheduled = self._schedule()
        read = sum(request.computed + new for request, new in scheduled)
        prompts = sum(new for _, new in scheduled if new > 1)
        self._now += self.speed.base + read * self.speed.kv_second + prompts * self.speed.prompt_second
        self.computed_tokens += sum(new for _, new in scheduled)
        progress = []
        for request, new in scheduled:
            request.computed += new
            if request.computed < len(request.tokens):
                continue
            token = -hash((request.name, len(request.tokens)))  # no prompt has it
            request.tokens.append(token)
            finished = len(request.tokens) == request.last
            progress.append(Progress(request.name, [token], finished, request.cached or 0))
            if finished:
                self.running.remove(request)
                self._free(request)
        return progress

    def _schedule(self) -> list[tuple[_Request, int]]:
        """Requests of the next step, each with its new tokens."""
        scheduled: list[tuple[_Request, int]] = []
        budget, preempted = self.chunk, False
        while len(scheduled) < len(self.running) and budget:
            request = self.running[len(scheduled)]
            new = min(len(request.tokens) - request.computed, budget)
            while not self._allocate(request, request.computed + new):
                youngest = self.running.pop()
                self._preempt(youngest)
                preempted = True
                if youngest is request:
                    return scheduled
            scheduled.append((request, new))
            budget -= new
        while self.waiting and budget and not preempted and len(self.running) < self.max_requests:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.running.append(self.waiting.popleft())
            new = min(len(request.tokens) - request.computed, budget)
            self._allocate(request, request.computed + new)
            scheduled.append((request, new))
            budget -= new
        return scheduled

    def _admit(self, request: _Request) -> bool:
        """Give a waiting request what is cached of it, if all of it fits."""
        self._hash(request, len(request.tokens) - 1)  # at least one token is computed
        hits = self.pool.hits(request.hashes[: (len(request.tokens) - 1) // self.block_size])
        needed = -(-len(request.tokens) // self.block_size) - len(hits) + self.ring_blocks
        if needed > self.pool.free_blocks - self.pool.unused(hits):
            return False
        self.pool.use(hits)
        request.blocks, request.computed = hits, len(hits) * self.block_size
        if request.cached is None:
            request.cached = request.computed
        return True

    def _allocate(self, request: _Request, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens; False, and nothing, if there are too few."""
        more = -(-tokens // self.block_size) - len(request.blocks)
        ring = 0 if request.ring else self.ring_blocks
        if more + ring > self.pool.free_blocks:
            return False
        request.blocks += self.pool.take(max(0, more))
        request.ring += self.pool.take(ring)
        self._hash(request, tokens)
        for i in range(request.computed // self.block_size, tokens // self.block_size):
            self.pool.fill(request.blocks[i], request.hashes[i])
        return True

    def _hash(self, request: _Request, tokens: int) -> None:
        """Hash the whole blocks of the first `tokens` tokens, each with what lies before it."""
        for i in range(len(request.hashes), tokens // self.block_size):
            block = tuple(request.tokens[i * self.block_size : (i + 1) * self.block_size])
            request.hashes.append(hash((request.hashes[-1] if request.hashes else None, block)))

    def _preempt(self, request: _Request) -> None:
        self._free(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _free(self, request: _Request) -> None:
        self.pool.release(request.blocks)
        self.pool.release(request.ring)
        request.blocks, request.ring = [], []
