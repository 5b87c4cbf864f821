"""Teacher forcing through the engine: a known text is run in small chunks, and every next token is predicted.

A position is scored if a chunk lies before its own, so that it reads that part of its prefix from the KV cache. The
keys and values of its own chunk may be raw: vLLM's prefill of some dtypes and platforms attends to a chunk's own
tokens before they are quantized. With a chunk of 1 token, which is a decode, nothing but the cache is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from engines import attention_layers, chunked, model_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

ROWS = 64
"""Positions whose log-probabilities exist at a time: 38 MB in fp32 at a vocabulary of 150,000."""


def ignore(_tokens: int) -> None:
    """Of the progress, where nobody waits."""


def text_windows(tokenizer: PreTrainedTokenizerBase, text: str, context: int, windows: int) -> list[list[int]]:
    """Token ids of `windows` consecutive pieces of a text, `context` each with the tokens a prompt begins with.

    Raises ValueError if the text is too short.
    """
    first = _beginning(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    length = context - len(first)
    if len(ids) < windows * length:
        raise ValueError(
            f"the text has {len(ids):,} tokens, but {windows} x {context:,} are to be scored; "
            "give a longer --text, or fewer --windows, or a smaller --context"
        )
    return [first + ids[at : at + length] for at in range(0, windows * length, length)]


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer puts before a text; models do badly without it."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []


def hidden_states(
    llm: LLM, token_ids: Sequence[int], chunk: int, done: Callable[[int], object] = ignore
) -> torch.Tensor:
    """The model's last hidden states [tokens, hidden] of a prompt run alone in prefill chunks of `chunk` tokens.

    `done` is told the number of tokens of each chunk after it has run.
    """
    from vllm import SamplingParams

    steps: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> None:
        steps.append(output.clone())
        done(len(output))

    llm.reset_prefix_cache()
    hook = model_of(llm).register_forward_hook(keep)
    try:
        with chunked(llm, chunk):
            prompt = {"prompt_token_ids": list(token_ids)}
            llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    finally:
        hook.remove()
    lengths = [len(step) for step in steps]
    expected = [min(chunk, len(token_ids) - at) for at in range(0, len(token_ids), chunk)]
    if lengths != expected:
        raise RuntimeError(f"the engine did not run chunks of {chunk} tokens, but of {lengths}")
    return torch.cat(steps)


def rounded_hidden_states(
    llm: LLM, token_ids: Sequence[int], chunk: int, done: Callable[[int], object] = ignore
) -> torch.Tensor:
    """`hidden_states`, with one rounding more of every attention output: noise of half a unit in its last place.

    What that costs is the least by which another implementation of the same attention can be told from this one.
    """

    def add_noise(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    generator = torch.Generator(next(model_of(llm).parameters()).device).manual_seed(0)
    hooks = [layer.register_forward_hook(add_noise) for layer in attention_layers(llm)]
    try:
        return hidden_states(llm, token_ids, chunk, done)
    finally:
        for hook in hooks:
            hook.remove()


def teacher_forced_logits(llm: LLM, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits [tokens, vocabulary], fp32, of all positions of a short prompt; see `hidden_states`."""
    return _logits(llm, hidden_states(llm, token_ids, chunk))


def scored_log_probs(
    llm: LLM,
    windows: Sequence[Sequence[int]],
    chunk: int,
    done: Callable[[int], object] = ignore,
    run: Callable[..., torch.Tensor] = hidden_states,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities fp32 [up to `ROWS`, vocabulary] and the true next tokens int64 [as many], slice by slice.

    Of each window, run in chunks of `chunk` tokens, the positions behind the first chunk that have a next token.
    `run` is `hidden_states` or does more.
    """
    for token_ids in windows:
        hidden = run(llm, token_ids, chunk, done)[chunk:-1]
        targets = torch.tensor(token_ids[chunk + 1 :], device=hidden.device)
        for rows, next_tokens in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
            with torch.inference_mode():
                yield _logits(llm, rows).log_softmax(-1), next_tokens


def _logits(llm: LLM, hidden: torch.Tensor) -> torch.Tensor:
    model: Any = model_of(llm)
    return model.compute_logits(hidden).float()


def scored_tokens(windows: Sequence[Sequence[int]], chunk: int) -> int:
    """Number of positions that `scored_log_probs` yields."""
    return sum(len(token_ids) - 1 - chunk for token_ids in windows)


def token_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL divergence of q from p in nats, of each row of log-probabilities [rows, outcomes] -> [rows].

    An outcome that p rules out adds nothing.
    """
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)


def mean_kl(baseline: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL divergence of `logits` from `baseline`, in nats, over rows [tokens, vocabulary]."""
    return token_kl(baseline.log_softmax(-1), logits.log_softmax(-1)).mean().item()
