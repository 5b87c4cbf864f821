"""Refusals of packed pages, by one ordered table (`rules.py`): for the engine, `packed-kv plan`, `packed-kv doctor` and
the docs.

A rule reads facts and returns what it objects to, or nothing. An unknown fact is None and never refuses.
The engine reads facts from vLLM's configuration and its layers, `plan` and `doctor` from config.json. `python -m
packed_kv.refusals.table` prints the table of docs/models.md. Imports no torch and no vLLM."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..model.architectures import TRIED
from ..model.config_defaults import Config
from ..model.shape import Model
from .config_facts import facts_of_config
from .facts import Cache, Engine, Facts, Layer, Vllm
from .rules import AUTO_OPTION, DRAFT_AUTO, RULES, WINDOW_RULES, Rule

OLDER_ROWS = r"0\.([0-9]|[12][0-9]|3[0-2])\."
"""Beginning of a vLLM's version whose layers of sparse attention, on CUDA, write plain rows alone."""
CPU_VERSION = "+cpu"
OLDER_LATENTS = r"0\.([0-9]|[12][0-9]|3[01])\."
"""Beginning of a vLLM's version whose latent attention packed pages do not serve."""


class Refused(ValueError):
    """Packed pages cannot serve this; the message is one line."""

    def __init__(self, refusal: Refusal, dtype: str) -> None:
        super().__init__(refusal.sentence(dtype))
        self.refusal = refusal


class Refusal(NamedTuple):
    """A rule that applies, what it read, and all that was known."""

    rule: Rule
    read: str
    facts: Facts

    def sentence(self, dtype: str = "") -> str:
        """The refusal in one line. `dtype`: the one that was asked for; "": any packed one."""
        name = f"--kv-cache-dtype {dtype}" if dtype else "a packed --kv-cache-dtype"
        return f"{name} cannot serve {self.rule.subject}: {self.read}; {self._remedy()}"

    def _remedy(self) -> str:
        """The rule's remedy; but where it would give up the dtype because of a draft, or `auto` means another dtype, a
        remedy that does not."""
        facts, remedy = self.facts, self.rule.remedy
        if remedy == DRAFT_AUTO or (facts.drafts.is_draft and AUTO_OPTION in remedy):
            reason = no_window(Facts(*facts.records, Cache(has_other_dtypes=True)))
            return DRAFT_AUTO + (f", without a recent window: {reason}" if reason else ", which changes nothing else")
        if facts.cache.auto and AUTO_OPTION in remedy:
            dense = remedy.replace(AUTO_OPTION, "--kv-cache-dtype bfloat16")
            return f"{dense} (auto would be {facts.cache.auto} by the checkpoint)"
        return remedy


def refusals_of(facts: Facts) -> list[Refusal]:
    """All refusals, in the table's order."""
    return _applied(RULES, facts)


def refuse(facts: Facts, dtype: str) -> None:
    """Raise Refused with the first refusal, if there is one."""
    for refusal in refusals_of(facts):
        raise Refused(refusal, dtype)


def no_window(facts: Facts) -> str:
    """Say why an engine has no recent window; "": it can have one."""
    return next((f"{found.rule.subject} ({found.read})" for found in _applied(WINDOW_RULES, facts)), "")


def _applied(rules: tuple[Rule, ...], facts: Facts) -> list[Refusal]:
    return [Refusal(rule, read, facts) for rule in rules if isinstance(read := rule.read(facts), str) and read]


def refusals_of_model(
    config: Config, model: Model | None = None, vllm: str = "", capability: tuple[int, int] | None = None
) -> list[Refusal]:
    """Refusals by a model's config.json, its layers if `model` has them, the version of `vllm` ("": not known) and a
    GPU's compute capability (None: not known). Each rule refuses once. Raises BadInput."""
    facts = facts_of_config(config)
    if capability:
        facts = Facts(*facts.records, Engine(platform="cuda", capability=capability))
    if re.match(OLDER_LATENTS, vllm):
        facts = Facts(*facts.records, Vllm(version_without_latents=vllm))
    if re.match(OLDER_ROWS, vllm) and not vllm.endswith(CPU_VERSION):
        facts = Facts(*facts.records, Vllm(version_without_rows=vllm))
    found = refusals_of(facts)
    for layer in model.attention if model else ():
        value_size = layer.value_size or layer.head_size
        heads = Layer(head_size=layer.head_size, value_size=value_size)
        found += refusals_of(Facts(Cache(auto=facts.cache.auto), heads))
    return list({refusal.rule: refusal for refusal in found}.values())


def untried(config: Config) -> str:
    """A line about a model that no rule refuses and that is untested; "": it is tested, or its config does not name it.
    Raises BadInput."""
    name = facts_of_config(config).architecture.name
    if name is None or name in TRIED:
        return ""
    return f"{name} has not been tested; no rule refuses it, so compare its answers with those of auto"


def markdown() -> str:
    """The tables of docs/models.md."""
    head = "| cannot be served | read from | told by config.json | remedy |\n|---|---|---|---|"
    rows = [
        f"| {rule.subject} | {rule.source} | {'yes' if rule.is_of_model else ''} | {rule.remedy} |" for rule in RULES
    ]
    window = "| no recent window with | read from |\n|---|---|"
    return "\n".join([head, *rows, "", window, *(f"| {rule.subject} | {rule.source} |" for rule in WINDOW_RULES)])


if __name__ == "__main__":
    print(markdown())
