"""Predictions of the baseline, stored in a safetensors file, and the comparison of other dtypes with them.

A tensor holds `ROWS` positions, so a reader needs memory for no more:

    log_probs.00000   fp16 [rows, vocabulary]    all log-probabilities; or, with `top_k`,
    ids.00000         int32 [rows, top_k]        the likeliest tokens,
    log_probs.00000   fp16 [rows, top_k]         their log-probabilities, and
    remainder.00000   fp32 [rows]                the log-probability of all other tokens together
    top5.00000        int32 [rows, 5]            the five likeliest tokens, likeliest first
    losses            fp32 [positions]           minus the log-probability of the true next token

Half precision changes a mean KL divergence by about 1e-6. With `top_k`, all other tokens count as one, which can only
lower the divergence. The metadata says in JSON what the file was made from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packed_kv.private_file import open_regular, replacing
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .teacher_forced import token_kl

FORMAT = "packed-kv baseline 2"
TOP = 5


class BaselineError(ValueError):
    """The file is not a baseline, or is another run's baseline."""


@dataclass(frozen=True)
class Scores:
    """Quality of predictions of the true tokens, and closeness to the baseline: KL divergence from it in nats, shares
    of positions with the same likeliest token, and of the five likeliest tokens that are the same. `kl_error` is the
    standard error of `kl_mean` (uncertainty.py); None if there is too little text."""

    positions: int
    perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    top5: float
    kl_error: float | None = None


@dataclass(frozen=True)
class Positions:
    """Per scored position, fp32 [positions]: loss, KL divergence from the baseline, 1 where the likeliest token is
    the same, share of the five likeliest that are the same."""

    losses: torch.Tensor
    kl: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[Positions]) -> Positions:
        """Join the scores of consecutive slices."""
        names = ("losses", "kl", "top1", "top5")
        return cls(*(torch.cat([getattr(part, name) for part in parts]).cpu() for name in names))

    def scores(self) -> Scores:
        return Scores(
            positions=len(self.losses),
            perplexity=self.losses.double().mean().exp().item(),
            kl_mean=self.kl.double().mean().item(),
            kl_p99=self.kl.quantile(0.99).item(),
            kl_max=self.kl.max().item(),
            top1=self.top1.mean().item(),
            top5=self.top5.mean().item(),
        )


class BaselineWriter:
    """Collects slices of predictions, and saves them."""

    def __init__(self, top_k: int | None = None) -> None:
        self.top_k = top_k
        self.tensors: dict[str, torch.Tensor] = {}
        self.losses: list[torch.Tensor] = []
        self.entropy = 0.0
        self.probabilities: torch.Tensor | None = None

    def append(self, log_probs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add log-probabilities fp32 [rows, vocabulary] and the true next tokens int64 [rows]."""
        index, vocabulary = f"{len(self.losses):05d}", log_probs.shape[-1]
        probabilities = log_probs.exp()
        self.entropy -= torch.where(probabilities > 0, probabilities * log_probs, 0.0).sum().item()
        total = probabilities.sum(0, dtype=torch.float64)
        self.probabilities = total if self.probabilities is None else self.probabilities + total
        self.losses.append(losses(log_probs, targets).cpu())
        self._keep(f"top5.{index}", log_probs.topk(min(TOP, vocabulary)).indices.int())
        if self.top_k is not None and self.top_k < vocabulary:
            ids = log_probs.topk(self.top_k).indices
            self._keep(f"ids.{index}", ids.int())
            likeliest, remainder = split_off(log_probs, ids)
            self._keep(f"remainder.{index}", remainder)
            log_probs = likeliest
        self._keep(f"log_probs.{index}", log_probs.half())

    def context_information(self) -> float:
        """Information about the next token in the context, in nats: the mean KL divergence of the model's mean
        prediction from its predictions. A model that cannot read its context is at least that far from them."""
        assert self.probabilities is not None, "nothing was appended"
        positions = sum(map(len, self.losses))
        mean = self.probabilities / positions
        return torch.special.entr(mean).sum().item() - self.entropy / positions

    def positions(self) -> Positions:
        """Scores of the baseline against itself."""
        loss = torch.cat(self.losses)
        return Positions(loss, torch.zeros_like(loss), torch.ones_like(loss), torch.ones_like(loss))

    def save(self, path: Path, identity: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write the file. A run that is compared must have the same `identity`; `facts` may differ."""
        self._keep("losses", torch.cat(self.losses))
        contents = {"identity": identity, "facts": facts, "top_k": self.top_k}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as (_, temporary):
            save_file(self.tensors, temporary, metadata={"format": FORMAT, "contents": json.dumps(contents)})

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor.cpu().contiguous()


class Baseline:
    """Reads a baseline file. Raises BaselineError, in one line, if it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            os.close(open_regular(path))
            self.file = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise BaselineError(f"baseline {path} cannot be read: {error}; give a file that --emit wrote") from error
        metadata = self.file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise BaselineError(f"{path} is no baseline ({FORMAT}); make one with --emit {path}")
        contents = json.loads(metadata["contents"])
        self.identity, self.facts, self.top_k = contents["identity"], contents["facts"], contents["top_k"]

    def check(self, identity: dict[str, Any]) -> None:
        """Raise BaselineError if the file was made from another model, text or windows."""
        for name, expected in identity.items():
            if self.identity.get(name) != expected:
                raise BaselineError(
                    f"baseline {self.path} was made with {name} {self.identity.get(name)}, this run has {expected}; "
                    "use the same options, or make another with --emit"
                )

    def losses(self) -> torch.Tensor:
        """Minus the log-probability of the true next token, fp32 [positions]."""
        return self.file.get_tensor("losses")

    def compare(self, index: int, log_probs: torch.Tensor, targets: torch.Tensor) -> Positions:
        """Slice `index` of the baseline against log-probabilities fp32 [rows, vocabulary] of the same positions, with
        true next tokens int64 [rows]."""
        expected = self._tensor("log_probs", index, log_probs).float()
        if f"ids.{index:05d}" in self.file.keys():  # noqa: SIM118 - the file is no mapping
            ids = self._tensor("ids", index, log_probs).long()
            remainder = self._tensor("remainder", index, log_probs)
            expected = torch.cat((expected, remainder[:, None]), -1)
            likeliest, rest = split_off(log_probs, ids)
            outcomes = torch.cat((likeliest, rest[:, None]), -1)
        else:
            outcomes = log_probs
        # Rounded to half precision, probabilities do not add up to 1 exactly.
        kl = token_kl(expected.log_softmax(-1), outcomes)
        return agreement(kl, self._tensor("top5", index, log_probs), log_probs, targets)

    def _tensor(self, name: str, index: int, like: torch.Tensor) -> torch.Tensor:
        tensor = self.file.get_tensor(f"{name}.{index:05d}").to(like.device)
        assert len(tensor) == len(like), (name, index, tensor.shape, like.shape)
        return tensor


class Comparison:
    """Compares one dtype with a baseline, slice by slice."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.parts: list[Positions] = []

    def append(self, log_probs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add the next slice: log-probabilities fp32 [rows, vocabulary], true next tokens int64 [rows]."""
        self.parts.append(self.baseline.compare(len(self.parts), log_probs, targets))

    def positions(self) -> Positions:
        return Positions.joined(self.parts)


def compare_exactly(expected: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor) -> Positions:
    """Compare log-probabilities with the baseline's, fp32 [rows, vocabulary] both with next tokens int64 [rows]."""
    top = expected.topk(min(TOP, expected.shape[-1])).indices
    return agreement(token_kl(expected, log_probs), top, log_probs, targets)


def agreement(kl: torch.Tensor, top: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor) -> Positions:
    """Compare positions, given KL divergences fp32 [rows], the baseline's likeliest tokens int [rows, 5],
    log-probabilities fp32 [rows, vocabulary] and true next tokens int64 [rows]."""
    ours = log_probs.topk(top.shape[-1]).indices
    same = (ours[:, :, None] == top[:, None, :]).any(-1).float().mean(-1)
    return Positions(losses(log_probs, targets), kl, (ours[:, 0] == top[:, 0]).float(), same)


def losses(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability of each row's target: fp32 [rows]."""
    return -log_probs.gather(-1, targets[:, None])[:, 0]


def split_off(log_probs: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split log-probabilities [rows, vocabulary] into the ones of `ids` [rows, k] and the sum of all others [rows]."""
    rest = log_probs.scatter(-1, ids, -torch.inf)
    return log_probs.gather(-1, ids), rest.logsumexp(-1)
