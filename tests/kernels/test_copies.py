"""Bulk copies in the machine code of the kernels that issue them: behind all loads of the memory that they overwrite.

`copies.cuh` says why. NVRTC compiles without a GPU, with the lines of the sources beside the machine code; the
scoreboards that instructions set and wait for say which loads may be under way where a copy is issued
(`machine_code.py`).

    PACKED_KV_ALL_VARIANTS=1 pytest tests/kernels/test_copies.py    every variant (half an hour of CPU time)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from machine_code import Code, Frame, Instruction, is_shared_load, loads_under_way, reached
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import COLUMNS, HEAD_DIMS, LARGE_HEAD, grids, latent_launch, launch, nvrtc
from packed_kv.kernels.cuda.source import LATENT, Source, read_sources
from packed_kv.layout import latent_layout, page_layout, row_layout
from variants import EVERY, half, one_in

Edit = Callable[[dict[str, str]], dict[str, str]]
BF16 = torch.bfloat16
LAYOUTS = ("tq4", "tq3", "turboquant35", "turboquant25")
"""A dtype of each layout: machine code depends on widths, not on the rotation."""

RAW_LOADS = {
    "load_chunk", "load_half_word", "load_key_scales", "load_scales", "ring_key_pairs", "ring_key_scales",
    "ring_value_pairs", "ring_value_scales", "unpack_tiles", "add_groups_of_tile", "load", "LastLoad", "score_tile",
}  # fmt: skip
"""Functions that load raw bytes of pages or of the ring, which copies overwrite."""
OTHER_LOADS = {
    "shared_work_item": "the work item, written once",
    "mask_shared_scales": "scales of the last tile, behind which no copy follows",
    "score": "queries, written once",
    "score_octets": "queries, written once",
    "queries_to_page_unit": "queries, between the ring and pages",
    "load_pairs": "queries of 24 and 32 columns",
    "move_maxima": "the largest scores and maxima of warps",
    "share_weights": "maxima of warps",
    "rebase_maxima": "maxima of warps",
    "load_weights": "weights",
    "attend": "maxima of warps, behind the last tile",
    "store_first": "scores of token 0, behind the last tile",
    "store_team": "totals, which replace stages behind the last tile",
    "end_block": "outputs, which replace stages behind the last tile",
    "combine_blocks": "weights of parts, which replace stages behind the last tile",
    "combine_warps": "outputs of warps, which replace stages behind the last tile",
    "rotate_back": "outputs, which replace stages behind the last tile",
    "attend_tiles": "whether V is small",
    "load_columns": "maxima, sums and weights of a stage of values",
}
"""Functions that load other memory, and which."""
BESIDE_COPIES = {
    "wide.cuh": RAW_LOADS
    & {
        "load_chunk",
        "load_half_word",
        "add_groups_of_tile",
        "ring_value_pairs",
        "ring_value_scales",
        "LastLoad",
    },
    "roles_unpack.cuh": {"LastLoad"},
}
"""Raw loads that may follow a copy: those of wide.cuh read the stage that is attended to, while the one before is
filled. A `LastLoad`, of a word that nobody uses, may read whatever is there."""


class Variant(NamedTuple):
    """A compilation: its constants, and the file whose loop issues copies."""

    name: str
    source: Source
    constants: dict[str, str]
    kernel: str
    file: str


def latents() -> Iterator[Variant]:
    """Layouts, blocks of up to 32 rows and widths of RoPE, over pages and over picked rows; the rest in turn."""
    rest = itertools.cycle([(BF16, BF16, True, False), (torch.float16, None, False, True), (BF16, None, False, False)])
    kinds = (("", latent_layout), ("-picks", row_layout))
    for name, rows, rope_bits, (kind, layout) in half(LAYOUTS, (16, 24, 32), (16, 8), kinds):
        query, output, has_constant, has_lse = next(rest)
        variant = latent_launch.LatentVariant(rows, rows, 64, query, output, has_constant, has_lse)
        constants = latent_launch.constants(layout(FORMATS[name], 512, 64, rope_bits), variant)
        yield Variant(f"{name}-{rows}-{rope_bits}{kind}", LATENT, constants, "latent_decode", "latent_narrow.cuh")


def pairs() -> Iterator[Variant]:
    """Layouts, head sizes and numbers of columns, with the ring, behind whose loop is the one over pages; the rest in
    turn. Heads of 256, which take longest to compile, have two layouts and all columns. All of it, and without the
    ring, if that is asked for."""
    own = [(few, is_final) for is_final in (True, False) for few in (True, False)]
    bias, output = ((False, 0), (True, 8), (True, 0)), ((BF16, False), (torch.float16, True), (torch.float32, False))
    everything = list(itertools.product(own, bias, output, (1, 2)))
    rings = (0, 8) if EVERY else (8,)
    small = [head_dim for head_dim in HEAD_DIMS if head_dim != LARGE_HEAD]
    cases = one_in(3, LAYOUTS, small, grids.COLUMN_COUNTS, rings)
    cases += half(LAYOUTS if EVERY else ("tq4", "turboquant25"), (LARGE_HEAD,), grids.COLUMN_COUNTS, rings)
    for number, (name, head_dim, columns, ring) in enumerate(cases):
        page = page_layout(FORMATS[name], head_dim)
        inputs = grids.grid_inputs(page, 8, 132)
        if columns == 48 and inputs.unpackers:
            continue  # they have 64 columns instead
        seen = set()
        for rest in everything if EVERY else [everything[number * 7 % len(everything)]]:
            (is_few, is_final), (has_bias, tiles), (dtype, has_lse), passes = rest
            warps = grids.block_kinds(inputs, columns)[0 if is_few else 1].warps
            if not is_final and not grids.is_wide(columns, head_dim):
                warps = 1
            variant = launch.PairVariant(
                warps, is_final, columns, 16, ring, 64, has_bias, dtype, has_lse and is_final, tiles,
                passes if columns == COLUMNS else 1, has_value_means=has_bias and number % 4 < 2,
            )  # fmt: skip
            if variant in seen:
                continue
            seen.add(variant)
            constants = launch.constants(page, 8, 4, variant)
            source = launch.source_of(constants)
            wide = "roles_unpack.cuh" if int(constants["UNPACKERS"]) else "wide.cuh"
            file = wide if grids.is_wide(columns, head_dim) else "narrow.cuh"
            label = f"{name}-{head_dim}-{columns}-{ring}" + (f"-{len(seen)}" if EVERY else "")
            yield Variant(label, source, constants, "decode", file)


def compiled(variant: Variant, folder: Path, edit: Edit | None = None) -> tuple[Code, dict[str, str]]:
    """Return the machine code of a variant, and its sources, which `edit` may change."""
    sources = read_sources(variant.source)
    if edit is not None:
        sources = edit(sources)
    definitions = (f"-D{name}={value}" for name, value in sorted(variant.constants.items()))
    options = (f"--gpu-architecture={variant.source.architecture}", *nvrtc.OPTIONS, "-lineinfo", *definitions)
    file = folder / "kernel.cubin"
    file.write_bytes(nvrtc._compile(variant.source, sources, options))
    return Code.of(file, variant.kernel), sources


FUNCTION = re.compile(r"\s*(?:template <[^{]*> )?(?:INLINE|class)\b(?: explicit)? (?:[\w:<>&*]+ )*?(\w+)(?:\(| \{)")


@cache
def _functions(source: str) -> list[tuple[int, str, bool]]:
    """The lines where functions and classes begin, their names, and whether anything is loaded there."""
    lines, found = source.splitlines(), []
    for number, line in enumerate(lines, 1):
        if match := FUNCTION.match(line):
            found.append((number, match[1]))
    ends = [start - 1 for start, _ in found[1:]] + [len(lines)] * bool(found)
    return [
        (start, name, "load" in "".join(lines[start - 1 : end])) for (start, name), end in zip(found, ends, strict=True)
    ]


def _function(frame: Frame, sources: dict[str, str]) -> tuple[str, bool]:
    functions = _functions(sources[frame.file])
    return next(((name, loads) for line, name, loads in reversed(functions) if line <= frame.line), ("", False))


def loader(instruction: Instruction, sources: dict[str, str]) -> str:
    """Return the function that loads: the innermost one that has loads, wrappers of instructions apart. ptxas says of a
    few loads that they are part of the arithmetic around them."""
    found = (_function(frame, sources) for frame in instruction.place if frame.file != "ptx.cuh")
    return next(name for name, loads in found if loads and name not in ("for_each", "operator"))


def waits_for_copies(code: Code, sources: dict[str, str]) -> set[int]:
    """Return the instructions that look whether copies have ended. The first look of a loop has lost its innermost
    lines: it is known by the looks that its branch goes to."""
    looks = [i for i, x in enumerate(code.instructions) if "PHASECHK" in x.text]
    known = {
        i for i in looks if any(_function(f, sources)[0] == "wait_for_copies_of" for f in code.instructions[i].place)
    }
    for i in set(looks) - known:
        branch = next(j for j in itertools.count(i) if code.instructions[j].operation.startswith("BRA"))
        again = next(j for j in itertools.count(code.next[branch][-1]) if j in looks or j >= len(code.instructions))
        if again in known:
            known.add(i)
    return known


def faults(code: Code, sources: dict[str, str], file: str) -> list[str]:
    """Return what may go wrong: loads of raw bytes under way at a copy, or between it and the next wait."""
    instructions = code.instructions
    copies = [i for i, x in enumerate(instructions) if x.operation.startswith("UBLKCP")]
    waits = waits_for_copies(code, sources)
    assert copies and waits, (len(copies), len(waits))
    unknown = {loader(x, sources) for x in instructions if is_shared_load(x)} - RAW_LOADS - set(OTHER_LOADS)
    assert not unknown, f"say in RAW_LOADS or OTHER_LOADS what these read: {unknown}"

    def raw(loads: set[int]) -> set[int]:
        return {i for i in loads if loader(instructions[i], sources) in RAW_LOADS}

    found = []
    meets = [i for i, x in enumerate(instructions) if file == "wide.cuh" and x.operation.startswith("BAR.RED")]
    for at, loads in loads_under_way(code, [*copies, *meets]).items():
        names = {loader(instructions[i], sources) for i in raw(loads)}
        if at in meets:  # other warps copy to what this one has loaded V from
            names &= {"add_groups_of_tile", "ring_value_pairs"}
        found += [f"{name} is under way at {instructions[at].operation} {at}" for name in sorted(names)]
    after = {loader(instructions[i], sources) for copy in copies for i in raw(_loads(code, reached(code, copy, waits)))}
    return found + [f"{name} follows a copy" for name in sorted(after - BESIDE_COPIES.get(file, set()))]


def _loads(code: Code, found: set[int]) -> set[int]:
    return {i for i in found if is_shared_load(code.instructions[i])}


@pytest.mark.parametrize("variant", [*latents(), *pairs()], ids=lambda variant: variant.name)
def test_copies_wait_for_loads(variant: Variant, tmp_path: Path) -> None:
    assert not faults(*compiled(variant, tmp_path), variant.file)


@pytest.mark.parametrize(
    ("name", "architecture"), [("turboquant35-128-32-8", "sm_120"), ("turboquant25-128-4-8", "sm_100")], ids=str
)
@pytest.mark.parametrize("is_early", [False, True], ids=["", "early"])
def test_copies_of_blackwell_wait_for_loads(name: str, architecture: str, is_early: bool, tmp_path: Path) -> None:
    """And loads of values behind a copy are found there, too."""
    variant = next(v for v in pairs() if v.name == name)
    variant = variant._replace(source=variant.source._replace(architecture=architecture))
    copy = "        if (tile + STAGES < last) pages.copy({}, tile + STAGES, next, stages.stage, stages.barrier);\n"
    add = "        const LastLoad last_load = add_tile("
    early = edited("narrow.cuh", (copy.format("done"), ""), (add, copy.format("nothing_loaded()") + add))
    found = faults(*compiled(variant, tmp_path, early if is_early else None), variant.file)
    assert any("follows a copy" in line for line in found) if is_early else not found, found


def edited(file: str, *changes: tuple[str, str]) -> Edit:
    def edit(sources: dict[str, str]) -> dict[str, str]:
        text = sources[file]
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return sources | {file: text}

    return edit


COPY = """        more = reader.next();
        if (more) page.copy({}, reader);
"""
LOADS = "        rope.load(page, lane), raw.load(page, lane);\n"
WAIT = "        const LoadsDone done = LastLoad(page.address).wait();\n" + COPY.format("done")


def guarded(guard: str) -> Edit:
    """Copy right behind the loads, and a guard: as before `LastLoad`."""
    return edited("latent_narrow.cuh", (LOADS, LOADS + guard + COPY.format("nothing_loaded()")), (WAIT, ""))


NO_GUARD = guarded("        sync_warp();\n")
VOTE_ON_ONE_LOAD = guarded("        if (__builtin_expect(any_lane(raw.scales[BLOCKS - 1] == ~0u), 0)) fence_async();\n")
"""The guard of db033a5, on what the source loads last."""
LOAD_BEHIND_THE_COPY = edited(
    "latent_narrow.cuh", (LOADS, LOADS.replace(", raw.load(page, lane)", "")), (WAIT, WAIT + "raw.load(page, lane);\n")
)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [(NO_GUARD, "under way"), (VOTE_ON_ONE_LOAD, "under way"), (LOAD_BEHIND_THE_COPY, "follows a copy")],
    ids=["no guard", "vote on one load", "load behind the copy"],
)
def test_faults_are_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    """In kernels with the faults that this is about."""
    variant = next(v for v in latents() if v.name == "tq4-32-8")
    found = faults(*compiled(variant, tmp_path, edit), variant.file)
    assert any(fault in line for line in found), found
