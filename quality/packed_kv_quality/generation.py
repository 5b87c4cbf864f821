"""Generation as servers do it: prompts prefilled whole, then decoded token by token from the KV cache.

The continuation is the text's own, forced one token a step, so that every dtype predicts the same positions from the
same tokens; the first one scored is the first that a decode computes. Beside it: how long greedy decoding stays with
the baseline's, tasks with a known answer (tasks.py), and how many tokens of n-gram drafts are accepted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import lockstep
from .baseline import Baseline, BaselineWriter, Comparison, Positions
from .engines import bytes_per_token
from .lockstep import at_once, ignore
from .measurement import BASELINE, made_with, progress_bar, start_engine
from .recall_map import LARGEST_BATCH
from .tasks import Task
from .teacher_forced import logits, rounded_attention, scored_log_probs, token_kl
from .uncertainty import block_means, standard_error

if TYPE_CHECKING:
    from vllm import LLM

PASSAGE = 192
"""Tokens that a prompt for n-gram drafts repeats three and a half times. As many are generated behind it."""


@dataclass(frozen=True)
class Window:
    """A piece of a text: `prompt` tokens to prefill, and the tokens after them, of which the last is only predicted."""

    text: str
    prompt: int
    token_ids: list[int]


@dataclass(frozen=True)
class GenerationSettings:
    """Settings that all dtypes share. `windows` of one prompt length follow each other, as `tasks` do. `greedy`: tokens
    that are decoded greedily behind each prompt. `drafts`: tokens of an n-gram draft, 0: none are measured.
    `batched_tokens`: of a step, which bounds how many prompts are prefilled whole at once."""

    model: str
    windows: list[Window]
    tasks: list[Task]
    greedy: int
    drafts: int
    kv_cache_memory: int
    additional_config: dict[str, Any]
    dtype: str = "auto"
    parallel: int = 1
    batched_tokens: int = 32768

    def max_model_len(self) -> int:
        lengths = [window.prompt + self.greedy for window in self.windows]
        lengths += [len(window.token_ids) for window in self.windows]
        lengths += [len(task.token_ids) + len(task.answer_ids) for task in self.tasks]
        return max(lengths) + 1


@dataclass(frozen=True)
class Continuation:
    """Positions of one text behind prompts of one length.

    `kl_*`: KL divergence from the baseline in nats, its mean with the standard error, quantiles, and the mean of each
    window. `top1_loss`: share of positions with another likeliest token. `divergence`: by window, how many greedy
    tokens equal the baseline's before the first that differs (if none differs, the number of decoded tokens).
    """

    text: str
    prompt: int
    positions: int
    perplexity: float
    kl_mean: float
    kl_error: float | None
    kl_p99: float
    kl_p999: float
    top1_loss: float
    divergence: list[int]
    kl_windows: list[float]


@dataclass(frozen=True)
class Answers:
    """Tasks of one kind with prompts of one length: by task, whether greedy decoding would write the answer, and the
    answer's log-probability in nats."""

    kind: str
    prompt: int
    solved: list[bool]
    log_probs: list[float]


@dataclass(frozen=True)
class Generation:
    """Results of one dtype. `acceptance`: of decodes with n-gram drafts, by prompt, the tokens and the steps that they
    took; None if it was not measured. `rounding`, of the baseline alone: mean KL divergence of the same model with
    attention outputs rounded once more, by prompt length."""

    dtype: str
    bytes_per_token: float
    continuations: list[Continuation]
    answers: list[Answers]
    acceptance: list[list[int]] | None
    rounding: dict[str, float]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Generation:
        """Inverse of `dataclasses.asdict`."""
        continuations = [Continuation(**found) for found in values["continuations"]]
        answers = [Answers(**found) for found in values["answers"]]
        return cls(**{**values, "continuations": continuations, "answers": answers})


def generate_baseline(settings: GenerationSettings, path: Path, identity: dict[str, Any], top_k: int | None) -> None:
    """Run the baseline and write its predictions to `path`, with its figures and greedy tokens among the facts."""
    writer, rounding = BaselineWriter(top_k), []
    with _engine(BASELINE, settings) as llm, _progress(BASELINE, settings, passes=2) as done:
        plain, rounded = _continuations(llm, settings, done), _continuations(llm, settings, done, rounded_attention)
        for (exact, targets), (again, _) in zip(plain, rounded, strict=True):
            writer.append(exact, targets)
            rounding.append(token_kl(exact, again).cpu())
        greedy = _greedy(llm, settings, done)
        floors = {
            str(length): statistics.fmean(kl.double().mean().item() for _, kl in group)
            for length, group in groupby(_by_window(settings, torch.cat(rounding)), key=lambda found: found[0].prompt)
        }
        found = _generation(BASELINE, llm, settings, writer.positions(), greedy, greedy, done, floors)
    facts = {"generation": asdict(found), "greedy": greedy, "made_with": made_with()}
    writer.save(path, identity, facts)


def generate(dtype: str, settings: GenerationSettings, path: Path) -> Generation:
    """Run one dtype and compare it with the baseline in the file `path`. Raises Refused if none starts."""
    baseline = Baseline(path)
    comparison = Comparison(baseline)
    with _engine(dtype, settings) as llm, _progress(dtype, settings) as done:
        for log_probs, targets in _continuations(llm, settings, done):
            comparison.append(log_probs, targets)
        greedy = _greedy(llm, settings, done)
        return _generation(
            dtype, llm, settings, comparison.positions(), greedy, baseline.facts["greedy"], done, rounding={}
        )


def acceptance(dtype: str, settings: GenerationSettings) -> list[list[int]]:
    """Tokens and steps of decodes with n-gram drafts, by prompt, in an engine of its own. Each prompt repeats a passage
    of a window. Neither its own step nor the last one, which ends early, counts. Raises Refused if the engine does not
    start."""
    from vllm import SamplingParams

    drafts = {"method": "ngram", "num_speculative_tokens": settings.drafts, "prompt_lookup_max": 4}
    length = min(PASSAGE, settings.max_model_len() // 5)
    passages = [
        window.token_ids[start : start + length]
        for window in settings.windows
        for start in range(0, len(window.token_ids) - length + 1, length)
    ]
    sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)
    found: dict[str, list[int]] = {}
    with _engine(dtype, settings, speculative_config=drafts) as llm:
        for number, ids in enumerate(passages):
            prompt: Any = {"prompt_token_ids": ids * 3 + ids[: length // 2]}
            llm.llm_engine.add_request(str(number), prompt, sampling)
            found[str(number)] = [-1, -1]  # the first token is the prompt's
        while llm.llm_engine.has_unfinished_requests():
            for result in llm.llm_engine.step():
                if not result.finished:
                    steps = found[result.request_id][1] + 1
                    found[result.request_id] = [len(result.outputs[0].token_ids) - 1, steps]
    return list(found.values())


def _engine(dtype: str, settings: GenerationSettings, **more: Any) -> Any:
    tokens = max(settings.batched_tokens, settings.max_model_len())
    return start_engine(dtype, settings, max_num_batched_tokens=tokens, **more)


def _progress(dtype: str, settings: GenerationSettings, passes: int = 1) -> Any:
    tokens = passes * sum(len(window.token_ids) for window in settings.windows)
    tokens += sum(len(task.token_ids) + len(task.answer_ids) for task in settings.tasks)
    return progress_bar(f"{dtype}: generation", tokens)


def _continuations(
    llm: LLM, settings: GenerationSettings, done: Callable[[int], object] = ignore, within: Any = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities and true next tokens of all decoded positions, as `scored_log_probs` yields them."""
    for length, group in groupby(settings.windows, key=lambda window: window.prompt):
        prompts = [window.token_ids for window in group]
        together = at_once(llm, max(map(len, prompts)) + 1, length, min(len(prompts), LARGEST_BATCH))
        more = {} if within is None else {"within": within}
        yield from scored_log_probs(llm, prompts, 1, together, done, first=length, **more)


def _greedy(llm: LLM, settings: GenerationSettings, done: Callable[[int], object]) -> list[list[int]]:
    """Token ids that follow each window's prompt."""
    from vllm import SamplingParams

    if not settings.greedy:
        return [[] for _ in settings.windows]
    sampling = SamplingParams(max_tokens=settings.greedy, temperature=0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": window.token_ids[: window.prompt]} for window in settings.windows]
    return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, sampling, use_tqdm=False)]


def _generation(
    dtype: str, llm: LLM, settings: GenerationSettings, positions: Positions, greedy: list[list[int]],
    expected: list[list[int]], done: Callable[[int], object], rounding: dict[str, float],
) -> Generation:  # fmt: skip
    divergence = [first_difference(*pair) for pair in zip(greedy, expected, strict=True)]
    figures = [_by_window(settings, getattr(positions, name)) for name in ("losses", "kl", "top1")]
    rows = list(zip(divergence, *figures, strict=True))
    found: list[Continuation] = []
    for name, length in dict.fromkeys((window.text, window.prompt) for window in settings.windows):
        own = [row for row in rows if (row[1][0].text, row[1][0].prompt) == (name, length)]
        losses, kl, top1 = (torch.cat([row[column][1] for row in own]).double() for column in (1, 2, 3))
        found.append(
            Continuation(
                text=name,
                prompt=length,
                positions=len(kl),
                perplexity=losses.mean().exp().item(),
                kl_mean=kl.mean().item(),
                kl_error=standard_error([block_means([row[2][1] for row in own])]),
                kl_p99=kl.quantile(0.99).item(),
                kl_p999=kl.quantile(0.999).item(),
                top1_loss=1 - top1.mean().item(),
                divergence=[row[0] for row in own],
                kl_windows=[row[2][1].double().mean().item() for row in own],
            )
        )
    return Generation(dtype, bytes_per_token(llm), found, _answers(llm, settings.tasks, done), None, rounding)


def _by_window(settings: GenerationSettings, values: torch.Tensor) -> list[tuple[Window, torch.Tensor]]:
    """Values of all positions [positions], split by window."""
    sizes = [len(window.token_ids) - 1 - window.prompt for window in settings.windows]
    return list(zip(settings.windows, values.split(sizes), strict=True))


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Number of equal tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), len(tokens))


def _answers(llm: LLM, tasks: Sequence[Task], done: Callable[[int], object]) -> list[Answers]:
    """Force the answers of all tasks, whose prompts of one kind and length follow each other."""
    found = []
    for (kind, length), grouped in groupby(tasks, key=lambda task: (task.kind, len(task.token_ids))):
        group, solved, log_probs = list(grouped), [], []
        longest = length + max(len(task.answer_ids) for task in group)
        together = at_once(llm, longest, length, min(len(group), LARGEST_BATCH))
        for at in range(0, len(group), together):
            batch = group[at : at + together]
            prompts = [task.token_ids + task.answer_ids[:-1] for task in batch]
            states = lockstep.run(llm, prompts, chain([length], repeat(1)), done)
            for task, hidden in zip(batch, states, strict=True):
                predicted = logits(llm, hidden[length - 1 :]).log_softmax(-1)
                answer = torch.tensor(task.answer_ids, device=predicted.device)
                solved.append(torch.equal(predicted.argmax(-1), answer))
                log_probs.append(predicted.gather(-1, answer[:, None]).sum().item())
        found.append(Answers(kind, length, solved, log_probs))
    return found
