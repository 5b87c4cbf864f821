"""Cut text into token sequences of equal length."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 16384
"""Characters taken from one position of the text."""
LEAST_TOKENS = 256
"""Fewest tokens of a text: with fewer, the statistics of channels are too noisy to choose by."""
LEAST_HELD_OUT, MOST_HELD_OUT, SHARE_HELD_OUT = 128, 1024, 8
"""Tokens on which a file is compared with none, as many as an eighth of `--tokens`."""
LEAST_CONTEXT = 32
"""Tokens of a sequence. In shorter ones the special tokens before the text would weigh too much."""


def read_text(files: Sequence[str]) -> str:
    """The text of the files; without files, the help topics that ship with Python. Raises UserError."""
    if not files:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    parts = []
    for name in files:
        try:
            parts.append(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--text {name} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"--text {name} is not UTF-8 text") from error
    text = "\n".join(parts)
    if not text.strip():
        raise UserError(f"--text {' '.join(files)} has no text in it")
    return text


def held_out_sequences(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int, length: int, seed: int
) -> list[list[int]]:
    """Sequences of up to `length` tokens of the help topics, which are not among the `tokens` tokens of `files`."""
    number = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, tokens // SHARE_HELD_OUT))
    arguments = (read_text([]), tokenizer, number, min(length, number), seed)
    if not files:
        with contextlib.suppress(UserError):  # nearly all topics are taken, and so a varied text
            return token_sequences(*arguments, behind=tokens)
    return token_sequences(*arguments)


def token_sequences(
    text: str, tokenizer: PreTrainedTokenizerBase, tokens: int, length: int, seed: int, behind: int = 0
) -> list[list[int]]:
    """`tokens` tokens of the text, in sequences of `length` (the last may be shorter), from random positions.

    behind: tokens of the text that are left out before.

    Each begins with the tokens that the tokenizer puts before a text. Raises UserError if there are fewer.
    """
    starts = list(range(0, len(text), PIECE))
    random.Random(seed).shuffle(starts)
    before, ids = _prefix(tokenizer), []
    whole, rest = divmod(tokens, length)
    has_rest = rest > len(before)
    needed = whole * (length - len(before)) + has_rest * (rest - len(before))
    for start in starts:
        ids += tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)
        if len(ids) >= behind + needed:
            break
    else:
        raise UserError(
            f"the text has {len(ids):,} tokens, fewer than --tokens {tokens:,}; give more --text or a lower --tokens "
            f"(at least {LEAST_TOKENS})"
        )
    sequences, at = [], behind
    for size in [length] * whole + [rest] * has_rest:
        sequences.append(before + ids[at : at + size - len(before)])
        at += size - len(before)
    return sequences


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"{model} has no tokenizer that can be loaded ({first_line(error)})") from error


def sha256(sequences: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the sequences: token ids in decimal, separated by blanks, one line per sequence."""
    lines = "\n".join(" ".join(map(str, sequence)) for sequence in sequences)
    return hashlib.sha256(lines.encode()).hexdigest()


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that come before a text, such as a beginning-of-sequence token."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    return full[: full.index(bare[0])] if bare and bare[0] in full else []
