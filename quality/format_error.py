#!/usr/bin/env python3
"""Measure the error of the codes and dtypes, beside other codes of equal or larger size.

Relative MSE |x - x'|^2 / |x|^2 at head_dim 128. `--markdown` prints the tables of docs/lab/formats.md. Codebooks of the
other codes are fitted to the measured vectors themselves, so no other training set can improve them.
"""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from packed_kv import FORMATS, get_codec
from packed_kv.codecs import scalar
from packed_kv.codecs.rotations import Hadamard
from packed_kv.formats import CODES, GROUP_SIZE, MAX_SCALE_BYTE
from packed_kv_quality.codec_error import HEAD_DIM, relative_mse, vectors

BITS = (4, 3, 2)
WIDE_SEARCH = (8, 20)
LLOYD_ROUNDS = 60


@dataclass(frozen=True)
class Result:
    """Bytes of a packed vector and its relative MSE."""

    size: float
    error: float


def this_code(y: torch.Tensor, bits: int) -> Result:
    groups = y.unflatten(-1, (-1, GROUP_SIZE))
    decoded = scalar.dequantize(*scalar.quantize(groups, bits), bits).flatten(-2)
    return Result(_size(bits, scales=HEAD_DIM // GROUP_SIZE), relative_mse(y, decoded))


def without_search(y: torch.Tensor, bits: int) -> Result:
    return _searched(y, bits, (0, 0))


def wide_search(y: torch.Tensor, bits: int) -> Result:
    return _searched(y, bits, WIDE_SEARCH)


def best_codebook(y: torch.Tensor, bits: int) -> Result:
    """The same scales, with real-valued magnitudes instead of the format's: search and Lloyd's centroids in turn."""
    levels = torch.tensor(CODES[bits].magnitudes)
    groups = y.unflatten(-1, (-1, GROUP_SIZE))
    for _ in range(6):
        scale = _search(groups, levels, bits, CODES[bits].search)
        step = scalar.decode_scale(scale).unsqueeze(-1)
        weights = (step * step).expand_as(groups)
        levels = _lloyd((groups.abs() / step).nan_to_num(), levels, weights, rounds=10)
    scale = _search(groups, levels, bits, CODES[bits].search)
    step = scalar.decode_scale(scale).unsqueeze(-1)
    decoded = groups.sign() * levels[_nearest((groups.abs() / step).nan_to_num(), levels)] * step
    return Result(_size(bits, scales=HEAD_DIM // GROUP_SIZE), relative_mse(y, decoded.flatten(-2)))


def lloyd_max_and_norm(y: torch.Tensor, bits: int) -> Result:
    """TurboQuant's MSE code: one fp16 norm a vector, every channel coded with one optimal codebook."""
    decoded, _ = _lloyd_max(y, bits)
    return Result(_size(bits, scales=2), relative_mse(y, decoded))


def lloyd_max_and_group_norm(y: torch.Tensor, bits: int) -> Result:
    """The same with a norm for each 32 channels."""
    decoded, _ = _lloyd_max(y.unflatten(-1, (-1, GROUP_SIZE)), bits)
    return Result(_size(bits, scales=2 * HEAD_DIM // GROUP_SIZE), relative_mse(y, decoded.flatten(-2)))


def min_max_affine(y: torch.Tensor, bits: int, group: int = GROUP_SIZE) -> Result:
    """An fp16 minimum and an fp16 step for each 32 channels."""
    groups = y.unflatten(-1, (-1, group))
    low = groups.amin(-1, keepdim=True).half().float()
    step = ((groups.amax(-1, keepdim=True) - low) / (2**bits - 1)).half().float()
    decoded = low + step * ((groups - low) / step).round().clamp(0, 2**bits - 1)
    return Result(_size(bits, scales=4 * HEAD_DIM // group), relative_mse(y, decoded.flatten(-2)))


def min_max_affine_of_vector(y: torch.Tensor, bits: int) -> Result:
    """The same for each vector."""
    return min_max_affine(y, bits, group=HEAD_DIM)


def qjl_unbiased(y: torch.Tensor, bits: int) -> Result:
    """TurboQuant's inner-product code: bits - 1 by Lloyd-Max, then the signs of a Gaussian sketch of the residual."""
    decoded, residual = _lloyd_max(y, bits - 1)
    sketch = torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    norm = residual.norm(dim=-1, keepdim=True).half().float()
    back = math.sqrt(math.pi / 2) / HEAD_DIM * norm * ((residual @ sketch.T).sign() @ sketch)
    return Result(_size(bits, scales=4), relative_mse(y, decoded + back))


def qjl_least_squares(y: torch.Tensor, bits: int) -> Result:
    """The same, as favourable as can be: an orthonormal sketch and the factor of least squared error."""
    decoded, residual = _lloyd_max(y, bits - 1)
    gaussian = torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    sketch, _ = torch.linalg.qr(gaussian)
    norm = residual.norm(dim=-1, keepdim=True).half().float()
    back = norm * ((residual @ sketch.T).sign() @ sketch)
    factor = (back * residual).sum() / back.square().sum()
    return Result(_size(bits, scales=4), relative_mse(y, decoded + factor * back))


COMPARED: dict[str, Callable[[torch.Tensor, int], Result]] = {
    "this code": this_code,
    "this code, scale from absmax (no search)": without_search,
    f"this code, {sum(WIDE_SEARCH) + 1} scales tried": wide_search,
    "best codebook with such scales": best_codebook,
    "Lloyd-Max, norm per vector (TurboQuant)": lloyd_max_and_norm,
    "Lloyd-Max, norm per 32 channels": lloyd_max_and_group_norm,
    "min/max affine per vector": min_max_affine_of_vector,
    "min/max affine per 32 channels": min_max_affine,
    "Lloyd-Max of one bit less + QJL, unbiased": qjl_unbiased,
    "Lloyd-Max of one bit less + QJL, least squares": qjl_least_squares,
}


def code_table(count: int) -> dict[str, dict[int, Result]]:
    """Every code at every width, on Hadamard-rotated Gaussian vectors."""
    y = Hadamard(HEAD_DIM, torch.device("cpu")).forward(vectors(count))
    return {name: {bits: code(y, bits) for bits in BITS} for name, code in COMPARED.items()}


@dataclass(frozen=True)
class DtypeErrors:
    """Relative MSE of a dtype on Gaussian vectors, on vectors with large channels, and on these with the channels of
    most energy as outliers (NaN without an outlier group). `length` is <x, x'> / |x|^2 on Gaussian vectors: by how
    much decoded vectors are shorter along the original."""

    size: int
    plain: float
    length: float
    large: float
    calibrated: float


def dtype_table(count: int) -> dict[str, DtypeErrors]:
    """Every dtype."""
    plain, large = vectors(count), vectors(count, large_channels=True)
    energy = large.square().sum(0)
    table = {}
    for name in FORMATS:
        codec = get_codec(name, HEAD_DIM)
        decoded = codec.decode(codec.encode(plain))
        length = float((plain * decoded).sum() / plain.square().sum())
        error = relative_mse(large, codec.decode(codec.encode(large)))
        calibrated = math.nan
        if codec.outlier_count:
            outliers = energy.topk(codec.outlier_count).indices.sort().values
            codec = get_codec(name, HEAD_DIM, outliers=outliers)
            calibrated = relative_mse(large, codec.decode(codec.encode(large)))
        table[name] = DtypeErrors(codec.vector_bytes, relative_mse(plain, decoded), length, error, calibrated)
    return table


def affine_with_large_channels(count: int) -> dict[str, float]:
    """rotation -> error of 4-bit min/max affine behind it, on vectors with large channels."""
    x = vectors(count, large_channels=True)
    rotations = {fmt.rotation: get_codec(fmt.name, HEAD_DIM).rotate(x) for fmt in FORMATS.values() if fmt.bits == 4}
    return {name: min_max_affine(y, 4).error for name, y in rotations.items()}


def _size(bits: int, scales: int) -> float:
    return HEAD_DIM * bits / 8 + scales


def _nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)


def _lloyd(x: torch.Tensor, levels: torch.Tensor, weights: torch.Tensor, rounds: int) -> torch.Tensor:
    """Ascending levels, each moved to the weighted mean of the values nearest to it, `rounds` times."""
    x, order = x.flatten().sort()
    weights = weights.flatten()[order].double()
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), (x * weights).cumsum(0)))
    totals = torch.cat((torch.zeros(1, dtype=torch.float64), weights.cumsum(0)))
    for _ in range(rounds):
        inner = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        bounds = torch.cat((torch.tensor([0]), inner, torch.tensor([len(x)])))
        mass = totals[bounds].diff()
        levels = torch.where(mass > 0, sums[bounds].diff() / mass, levels).to(levels.dtype)
    return levels


def _lloyd_max(y: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Code the channels of y / |y| with the best codebook of 2^bits levels -> decoded, residual."""
    norm = y.norm(dim=-1, keepdim=True).half().float() / math.sqrt(y.shape[-1])
    unit = y / norm
    quantiles = (torch.arange(2**bits) + 0.5) / 2**bits
    levels = torch.special.ndtri(quantiles)
    levels = _lloyd(unit, levels, torch.ones_like(unit), LLOYD_ROUNDS if bits < 4 else 4 * LLOYD_ROUNDS)
    decoded = levels[_nearest(unit, levels)] * norm
    return decoded, y - decoded


def _search(groups: torch.Tensor, levels: torch.Tensor, bits: int, span: tuple[int, int]) -> torch.Tensor:
    """Like `scalar.search_scale`, for any levels and candidates."""
    start = scalar.absmax_scale(groups, bits).to(torch.int16)
    best, least = scalar.absmax_scale(groups, bits), torch.full(groups.shape[:-1], math.inf)
    for offset in range(span[0], -span[1] - 1, -1):
        scale = (start + offset).clamp(0, MAX_SCALE_BYTE).to(torch.uint8)
        step = scalar.decode_scale(scale).unsqueeze(-1)
        error = torch.stack([(groups.abs() - step * level).abs() for level in levels]).amin(0).square().sum(-1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _searched(y: torch.Tensor, bits: int, span: tuple[int, int]) -> Result:
    groups = y.unflatten(-1, (-1, GROUP_SIZE))
    scale = _search(groups, torch.tensor(CODES[bits].magnitudes), bits, span)
    error = scalar.group_error(groups, scale, bits).double().sum() / groups.double().square().sum()
    return Result(_size(bits, scales=HEAD_DIM // GROUP_SIZE), float(error))


def print_table(header: Iterable[str], rows: Iterable[Iterable[str]], markdown: bool) -> None:
    cells = [list(header), *map(list, rows)]
    if markdown:
        cells.insert(1, ["---"] * len(cells[0]))
    widths = [3 if markdown else max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        padded = [cell.ljust(width) if not markdown else cell for cell, width in zip(row, widths, strict=True)]
        print(f"| {' | '.join(padded)} |" if markdown else "  ".join(padded))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=8192, help="number of vectors (default 8192)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/lab/formats.md")
    options = parser.parse_args()

    print(f"{options.vectors} vectors of {HEAD_DIM} channels, PyTorch {torch.__version__}, {platform.machine()}\n")
    codes = code_table(options.vectors)
    header = ("code", *(f"{bits} bits: bytes, error" for bits in BITS))
    rows = [(name, *(f"{r.size:.0f}, {r.error:.5f}" for r in row.values())) for name, row in codes.items()]
    print_table(header, rows, options.markdown)

    header = ("dtype", "bytes", "Gaussian", "length", "5 channels x 12", "the same, calibrated outliers")
    dtype_rows = [
        (name, str(e.size), f"{e.plain:.5f}", f"{e.length:.4f}", f"{e.large:.5f}",
         "" if math.isnan(e.calibrated) else f"{e.calibrated:.5f}")
        for name, e in dtype_table(options.vectors).items()
    ]  # fmt: skip
    print_table(header, dtype_rows, options.markdown)

    affine = affine_with_large_channels(options.vectors)
    print_table(("4-bit min/max affine behind", "5 channels x 12"), [(n, f"{e:.5f}") for n, e in affine.items()],
                options.markdown)  # fmt: skip


if __name__ == "__main__":
    main()
