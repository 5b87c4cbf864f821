"""Prompts through the engine in lockstep: every step takes the same number of tokens of each of them.

All prompts of a call run at once, so that a step of one token each is a decode batch. The scheduler is told before
each step how much it may take of a prompt; which rows of the model's output belong to which prompt is read from what
the runner reports of the step, and checked by the token ids that the model was given.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .engines import model_of, scheduler

if TYPE_CHECKING:
    from vllm import LLM

Prompt = Sequence[int]


def ignore(_tokens: int) -> None:
    """Default of `done`: reports no progress."""


def run(
    llm: LLM, prompts: Sequence[Prompt], widths: Iterable[int], done: Callable[[int], object] = ignore
) -> list[torch.Tensor]:
    """Run prompts of token ids, step k taking `widths[k]` tokens of each, and return the model's last hidden states.

    After each step, `done` is called with its number of tokens. The engine must be in this process and hold all prompts
    at once, without a prefix cache if they begin alike. Returns [tokens, hidden] for each prompt.

    Raises RuntimeError if the engine ran other steps: another request is in it, or its KV memory is too small.
    """
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    steps = _Steps(llm, prompts, widths, done)
    with steps.recorded():
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        llm.generate(inputs, SamplingParams(max_tokens=1, temperature=0, detokenize=False), use_tqdm=False)
    return steps.result()


class _Steps:
    """The steps of one call: sets the width of each step, and keeps the outputs."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], widths: Iterable[int], done: Callable[[int], object]
    ) -> None:
        self.prompts, self.done = prompts, done
        self.core = scheduler(llm)
        self.model: Any = model_of(llm)
        self.eager = llm.llm_engine.vllm_config.model_config.enforce_eager
        self.widths = iter(widths)
        self.left = list(map(len, prompts))
        """Tokens of each prompt that no step has taken."""
        self.expected: list[list[int]] = [[] for _ in prompts]
        """Tokens that each step is to take of each prompt."""
        self.names: list[str] = []
        """The scheduler's names of the prompts."""
        self.outputs: deque[tuple[torch.Tensor, torch.Tensor | None]] = deque()
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.ids: dict[str, list[torch.Tensor]] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Watch scheduler and model; both are as before afterwards."""
        core, config = self.core, self.core.scheduler_config
        schedule, update = core.schedule, core.update_from_output
        limits = core.max_num_scheduled_tokens, config.long_prefill_token_threshold

        def next_step(*arguments: Any, **options: Any) -> Any:
            self._plan()
            return schedule(*arguments, **options)

        def step_done(planned: Any, found: Any, *arguments: Any, **options: Any) -> Any:
            if planned.total_num_scheduled_tokens:
                self._keep(found.req_ids, [planned.num_scheduled_tokens[name] for name in found.req_ids])
            return update(planned, found, *arguments, **options)

        core.schedule, core.update_from_output = next_step, step_done
        try:
            with self._watched_model():
                yield
        finally:
            del core.schedule, core.update_from_output
            core.max_num_scheduled_tokens, config.long_prefill_token_threshold = limits

    @contextlib.contextmanager
    def _watched_model(self) -> Iterator[None]:
        """Keep what the model returns. A replayed CUDA graph calls no module; the code after it gets the last row of
        each prompt, which in a step of one token each is every row."""
        if self.eager:
            hook = self.model.register_forward_hook(self._output, with_kwargs=True)
            try:
                yield
            finally:
                hook.remove()
            return
        compute_logits = self.model.compute_logits

        def kept(hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            self.outputs.append((hidden, None))
            return compute_logits(hidden, *arguments, **options)

        self.model.compute_logits = kept
        try:
            yield
        finally:
            del self.model.compute_logits

    def _plan(self) -> None:
        """Tell the scheduler what to take in the next step."""
        if not self.names:
            self.names = list(self.core.requests)
        width = next(self.widths)
        assert self.eager or width == 1, "with CUDA graphs, only the last row of each prompt is seen"
        for index, left in enumerate(self.left):
            if left:
                self.expected[index].append(min(width, left))
        active = sum(left > 0 for left in self.left)
        self.left = [max(0, left - width) for left in self.left]
        # A lone prompt is exempt from the threshold, and several share the budget as they come.
        self.core.max_num_scheduled_tokens = max(1, width * active)
        self.core.scheduler_config.long_prefill_token_threshold = width

    def _output(self, _module: torch.nn.Module, _arguments: object, options: dict[str, Any], output: Any) -> None:
        ids = options.get("input_ids")
        self.outputs.append((output, None if ids is None else ids.clone()))

    def _keep(self, names: Sequence[str], counts: Sequence[int]) -> None:
        """Split a step's rows by prompt. Padding follows them."""
        output, ids = self.outputs.popleft()
        for name, part in zip(names, output[: sum(counts)].split(counts), strict=True):
            self.rows.setdefault(name, []).append(part.clone())
        if ids is not None:
            for name, part in zip(names, ids[: sum(counts)].split(counts), strict=True):
                self.ids.setdefault(name, []).append(part)
        self.done(sum(counts))

    def result(self) -> list[torch.Tensor]:
        """Hidden states [tokens, hidden] of each prompt, after all checks."""
        for name, prompt, expected in zip(self.names, self.prompts, self.expected, strict=True):
            lengths = [len(part) for part in self.rows[name]]
            if lengths != expected:
                raise RuntimeError(
                    f"the engine ran a prompt of {len(prompt)} tokens in steps of {_short(lengths)} tokens, not of "
                    f"{_short(expected)}; if its KV memory is too small, raise --kv-cache-memory"
                )
            if name in self.ids and torch.cat(self.ids[name]).tolist() != list(prompt):
                raise RuntimeError("the engine ran the prompts in another order than it reports")
        return [torch.cat(self.rows[name]) for name in self.names]


def _short(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def at_once(llm: LLM, length: int, width: int, limit: int) -> int:
    """Number of prompts of up to `length` tokens that an engine can run in steps of `width`, at most `limit`.

    Bounds are its KV memory and the tokens of its largest step. Raises RuntimeError if it cannot run one.
    """
    config = llm.llm_engine.vllm_config
    block = config.cache_config.block_size
    tokens = config.cache_config.kv_cache_size_tokens
    seats = min(tokens // (-(-length // block) * block), config.scheduler_config.max_num_batched_tokens // width)
    if not seats:
        raise RuntimeError(f"the KV memory holds {tokens:,} tokens, less than one prompt of {length:,}")
    return min(limit, seats, config.scheduler_config.max_num_seqs)
