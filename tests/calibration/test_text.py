"""Sequences begin as a server's prompts do, at position 0, with what the tokenizer puts before a text."""

from __future__ import annotations

import pytest
from tq_calibrate.text import token_sequences

BOS, EOS = 1, 2


class Tokenizer:
    """A token a character, and what it puts before and behind a text."""

    def __init__(self, before: list[int], behind: list[int]) -> None:
        self.before, self.behind = before, behind

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [100 + ord(character) for character in text]
        return [*self.before, *ids, *self.behind] if add_special_tokens else ids


@pytest.mark.parametrize(("before", "behind"), [([], []), ([BOS], []), ([BOS, 3], [EOS])])
def test_each_sequence_begins_with_the_tokens_that_come_before_a_text(before: list[int], behind: list[int]) -> None:
    sequences = token_sequences("a text, " * 500, Tokenizer(before, behind), tokens=1000, length=300, seed=0)
    assert [len(sequence) for sequence in sequences] == [300, 300, 300, 100]
    for sequence in sequences:
        assert sequence[: len(before)] == before and min(sequence[len(before) :]) >= 100
