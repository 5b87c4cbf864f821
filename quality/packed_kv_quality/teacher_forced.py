"""Teacher forcing through the engine: a known text is run in small chunks, and every next token is predicted.

A position is scored if a chunk lies before its own, so that it reads that part of its prefix from the KV cache. The
keys and values of its own chunk may be raw: vLLM's prefill of some dtypes and platforms attends to a chunk's own
tokens before they are quantized. With a chunk of 1 token, which is a decode, nothing but the cache is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import lockstep
from .engines import attention_layers, model_of
from .lockstep import ignore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

Stored = TypeVar("Stored", torch.Tensor, None)
ROWS = 64
"""Positions whose log-probabilities exist at a time: 38 MB in fp32 at a vocabulary of 150,000."""


def text_windows(tokenizer: PreTrainedTokenizerBase, text: str, context: int, windows: int) -> list[list[int]]:
    """Token ids of `windows` consecutive pieces of a text, of `context` tokens each, including the tokens that begin a
    prompt.

    Raises ValueError if the text is too short.
    """
    first = beginning(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    length = context - len(first)
    if len(ids) < windows * length:
        raise ValueError(
            f"the text has {len(ids):,} tokens, but {windows} x {context:,} are to be scored; "
            "give a longer --text, or fewer or shorter windows"
        )
    return [first + ids[at : at + length] for at in range(0, windows * length, length)]


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer puts before a text; models predict badly without it."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []


@contextlib.contextmanager
def rounded_attention(llm: LLM) -> Iterator[None]:
    """Round every attention output once more, by noise of half a unit in its last place.

    Its KL divergence is the least that tells another implementation of the same attention from this one.
    """

    def add_noise(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    generator = torch.Generator(next(model_of(llm).parameters()).device).manual_seed(0)
    with contextlib.ExitStack() as hooks:
        for layer in attention_layers(llm):
            hooks.callback(layer.register_forward_hook(add_noise).remove)
        yield


@contextlib.contextmanager
def fp8_storage(llm: LLM) -> Iterator[None]:
    """Round every key and value to e4m3 (scale 1) and back before attention and cache see it; all else is unchanged.

    Its KL divergence is the cost of storing fp8 alone. An engine's own fp8 may also round queries and softmax weights.
    """

    def round_stored(_module: torch.nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict]:
        query, *stored = arguments
        options = {name: through_e4m3(x) if name in ("key", "value") else x for name, x in options.items()}
        return (query, *map(through_e4m3, stored[:2]), *stored[2:]), options

    with contextlib.ExitStack() as hooks:
        for layer in attention_layers(llm):
            hooks.callback(layer.register_forward_pre_hook(round_stored, with_kwargs=True).remove)
        yield


def through_e4m3(x: Stored) -> Stored:
    """Values rounded to the nearest of e4m3, values beyond its range to its ends; None, of layers that share a cache,
    stays None."""
    if x is None:
        return x
    largest = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn).to(x.dtype)


def scored_log_probs(
    llm: LLM,
    windows: Sequence[Sequence[int]],
    chunk: int,
    together: int = 1,
    done: Callable[[int], object] = ignore,
    within: Callable[[LLM], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    first: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities fp32 [up to `ROWS`, vocabulary] and the true next tokens int64 [as many], slice by slice.

    Of each window, run in chunks of `chunk` tokens, the positions behind the first chunk that have a next token; window
    by window, `together` of which run at once. The first chunk has `first` tokens, or as many as the others. `within`
    is what the engine runs in, such as `rounded_attention`.
    """
    first = chunk if first is None else first
    for at in range(0, len(windows), together):
        group = windows[at : at + together]
        with within(llm):
            found = lockstep.run(llm, group, chain([first], repeat(chunk)), done)
        for token_ids, states in zip(group, found, strict=True):
            hidden = states[first:-1]
            targets = torch.tensor(token_ids[first + 1 :], device=hidden.device)
            for rows, next_tokens in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
                yield logits(llm, rows).log_softmax(-1), next_tokens


def logits(llm: LLM, hidden: torch.Tensor) -> torch.Tensor:
    """Logits fp32 [rows, vocabulary] of hidden states [rows, hidden]."""
    model: Any = model_of(llm)
    with torch.inference_mode():
        return model.compute_logits(hidden).float()


def scored_tokens(windows: Sequence[Sequence[int]], chunk: int) -> int:
    """Number of positions that `scored_log_probs` yields."""
    return sum(len(token_ids) - 1 - chunk for token_ids in windows)


def token_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL divergence of q from p in nats, of each row of log-probabilities [rows, outcomes] -> [rows].

    An outcome that p rules out adds nothing.
    """
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
