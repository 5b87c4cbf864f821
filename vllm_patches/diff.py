"""A strict applier of unified diffs: no fuzz, no offset, changes to existing files only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_NEWLINE = b"\\"


class DiffError(ValueError):
    """A malformed diff, or one that does not fit the text to the letter."""


@dataclass(frozen=True)
class Hunk:
    old_start: int  # index of the first line, from 0
    new_start: int
    old: tuple[bytes, ...]  # lines with their ends
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    path: str
    hunks: tuple[Hunk, ...]


def parse(patch: bytes) -> tuple[str, tuple[FileDiff, ...]]:
    """Split a patch into its header (all before the first ``---``) and the changes of each file."""
    lines = patch.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = b"".join(lines[:first]).decode()
    diffs: list[FileDiff] = []
    rest = lines[first:]
    while rest:
        path = _path(rest)
        rest, hunks = rest[2:], []
        while rest and rest[0].startswith(b"@@"):
            rest, hunk = _hunk(rest)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"{path}: no hunk")
        diffs.append(FileDiff(path, tuple(hunks)))
    paths = [diff.path for diff in diffs]
    if not paths or len(set(paths)) < len(paths):
        raise DiffError("a patch must change at least one file, and each file once")
    return header, tuple(diffs)


def _path(lines: list[bytes]) -> str:
    old, new = (line.split(b"\t")[0].strip().decode() for line in [*lines[:2], b""][:2])
    if not old.startswith("--- a/") or new != "+++ b/" + old[6:]:
        raise DiffError(f"expected '--- a/PATH' and '+++ b/PATH' of one file, got {old!r} and {new!r}")
    path = old[6:]
    if path.startswith("/") or ".." in path.split("/"):
        raise DiffError(f"path outside of the tree: {path!r}")
    return path


def _hunk(lines: list[bytes]) -> tuple[list[bytes], Hunk]:
    match = HUNK.match(lines[0])
    if not match:
        raise DiffError(f"malformed hunk header {lines[0]!r}")
    old_start, old_count, new_start, new_count = (int(group or 1) for group in match.groups())
    if not old_count or not new_count:
        raise DiffError(f"hunk without context {lines[0]!r}")
    old: list[bytes] = []
    new: list[bytes] = []
    used = 1
    while used < len(lines) and (len(old) < old_count or len(new) < new_count or lines[used][:1] == NO_NEWLINE):
        kind, text = lines[used][:1], lines[used][1:]
        sides = {b" ": (old, new), b"-": (old,), b"+": (new,)}
        if kind == NO_NEWLINE:
            for side in sides[lines[used - 1][:1]]:
                side[-1] = side[-1].removesuffix(b"\n")
        elif kind in sides:
            for side in sides[kind]:
                side.append(text)
        else:
            raise DiffError(f"malformed line {lines[used]!r}")
        used += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise DiffError(f"hunk {lines[0].strip().decode()} has {len(old)} old and {len(new)} new lines")
    return lines[used:], Hunk(old_start - 1, new_start - 1, tuple(old), tuple(new))


def apply(diff: FileDiff, content: bytes) -> bytes:
    """The content with every hunk replaced exactly where the diff says; ``DiffError`` if one does not fit."""
    return b"".join(_replaced(diff, content.splitlines(keepends=True)))


def _replaced(diff: FileDiff, lines: list[bytes]) -> Iterator[bytes]:
    position = shift = 0
    for number, hunk in enumerate(diff.hunks, 1):
        end = hunk.old_start + len(hunk.old)
        in_place = hunk.old_start >= position and hunk.new_start == hunk.old_start + shift
        if not in_place or tuple(lines[hunk.old_start : end]) != hunk.old:
            raise DiffError(f"{diff.path}: hunk {number} does not fit at line {hunk.old_start + 1}")
        yield from lines[position : hunk.old_start]
        yield from hunk.new
        position, shift = end, shift + len(hunk.new) - len(hunk.old)
    yield from lines[position:]
