"""Codes of several channels chosen together, for `tried.py`: by the cost of errors, and on a trellis.

`python experiments/tried_rounding.py` prints what a trellis makes of Gaussian groups, beside the dtypes' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from format_error import print_table
from packed_kv.codecs import Codec, scalar
from packed_kv.codecs.codec import split_runs
from packed_kv.formats import CODES, GROUP_SIZE, MAX_SCALE_BYTE
from tried_codes import Dtype, Site

SWEEPS, RIDGE = 3, 0.05
STATES, SCALES_TRIED = 4, (-2, -1, 0, 1, 2)
SAMPLE, LLOYD_ROUNDS = 1024, 15
CHAINS = (32, 8, 4)


@dataclass(frozen=True)
class Joint(Dtype):
    """A dtype whose encoder chooses the codes of a vector together, so that its error e costs least, e^T M e, with the
    cost M of the site: a score's error is q . e, so M = E[q q^T] for K. Decoders need not know. Scales are the dtype's;
    from the nearest codes on, `sweeps` times each channel in turn gets the code that is best beside the others'.

    M is mixed with `RIDGE` of its mean times the identity. With `rank`, all but so many of its largest eigenvectors are
    replaced by what they leave on the diagonal, so that a sweep takes `rank` products a channel instead of head_dim.
    With `grouped`, so is what M has between groups: then it takes 32.
    """

    rank: int | None = None
    sweeps: int = SWEEPS
    grouped: bool = False

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        codec = self.codec(x.shape[-1], site)
        codes, scale_bytes = codec.quantize(x)
        gains = torch.tensor([codec.gain(bits) for bits in codec.group_bits])
        scales = (scalar.decode_scale(scale_bytes) * gains).repeat_interleave(GROUP_SIZE, -1)
        target = codec.prepare(x) * gains.repeat_interleave(GROUP_SIZE)
        tensors = target, codec.dequantize(codes, scale_bytes), scales
        wanted, decoded, steps = (y[0].transpose(0, 1).contiguous() for y in tensors)  # [heads, tokens, head_dim]
        return codec.unrotate(
            self._descend(codec, wanted, decoded, steps, self._cost(codec, site)).transpose(0, 1).unsqueeze(0)
        )

    def _cost(self, codec: Codec, site: Site) -> torch.Tensor:
        """M of rotated channels, [heads, head_dim, head_dim], 1 on average on its diagonal."""
        assert site.weight is not None
        heads, size, _ = site.weight.shape
        unit_vectors = torch.eye(size).unsqueeze(1).repeat(1, heads, 1)
        matrix = codec.rotate(unit_vectors).transpose(0, 1)  # [heads, channels, rotated]
        cost = matrix.transpose(-1, -2) @ site.weight @ matrix
        cost = cost / cost.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        if self.rank is not None:
            values, vectors = (x[..., -self.rank :] for x in torch.linalg.eigh(cost))
            largest = (vectors * values.unsqueeze(-2)) @ vectors.transpose(-1, -2)
            cost = largest + torch.diag_embed((cost - largest).diagonal(dim1=-2, dim2=-1))
        if self.grouped:
            group = torch.arange(size) // GROUP_SIZE
            cost = cost * (group[:, None] == group)
        return cost + RIDGE * torch.eye(size)

    def _descend(
        self, codec: Codec, x: torch.Tensor, decoded: torch.Tensor, scales: torch.Tensor, cost: torch.Tensor
    ) -> torch.Tensor:
        """Better `decoded` for `x`; these and `scales` are [heads, tokens, head_dim]."""
        slope = (decoded - x) @ cost
        for channel in list(range(x.shape[-1])) * self.sweeps:
            levels = torch.tensor(CODES[codec.group_bits[channel // GROUP_SIZE]].magnitudes)
            thresholds = torch.tensor([(low + high) / 2 for low, high in pairwise(levels.tolist())])
            old, scale = decoded[..., channel], scales[..., channel]
            wanted = old - slope[..., channel] / cost[:, channel, channel].unsqueeze(-1)
            magnitude = levels[torch.bucketize((wanted.abs() / scale).nan_to_num(0.0), thresholds)]
            new = torch.where(wanted < 0, -magnitude, magnitude) * scale
            slope += (new - old).unsqueeze(-1) * cost[:, channel].unsqueeze(1)
            decoded[..., channel] = new
        return decoded


@dataclass(frozen=True)
class Trellis(Dtype):
    """A dtype's rotation, groups and scales with trellis-coded quantisation in place of its codes, of the same bits:
    twice the levels, of which a value may have every fourth, or two of these four subsets if the state is known.

    Which two is decided by the codes before it in its chain of `chain` channels, which ends in the state in which it
    begins: with b[t] the lowest bit of code t (indices modulo the chain), the level's number is 4 times the other bits
    plus 2 b[t-1] + (b[t] xor b[t-2]). So a decoder looks at three codes, and no state goes from one to the next. V is
    coded as it is.
    """

    chain: int = 8

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        codec = self.codec(x.shape[-1], site)
        groups = codec.prepare(x).unflatten(-1, (-1, GROUP_SIZE))
        parts = [trellis(part, bits, self.chain) for bits, part in split_runs(codec.group_bits, groups, -2)]
        return codec.unrotate(torch.cat(parts, -2).flatten(-2))


def trellis(x: torch.Tensor, bits: int, chain: int) -> torch.Tensor:
    """Groups fp32 [..., 32], coded and read back."""
    decoded, scale = _best_scale(x.reshape(-1, GROUP_SIZE), bits, fitted_levels(bits, chain), chain)
    return (decoded * scale).view(x.shape)


def _best_scale(x: torch.Tensor, bits: int, levels: torch.Tensor, chain: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded groups [groups, 32] in units of their scale, and that [groups, 1]: the best near the dtype's scale."""
    byte = scalar.search_scale(x, bits).to(torch.int16)
    least, best, best_scale = torch.full((len(x), 1), torch.inf), torch.zeros_like(x), torch.zeros(len(x), 1)
    for offset in SCALES_TRIED:
        scale = scalar.decode_scale((byte + offset).clamp(0, MAX_SCALE_BYTE).to(torch.uint8)).unsqueeze(-1)
        decoded = on_the_trellis((x / scale).nan_to_num(0.0, 0.0, 0.0), levels, chain)
        error = (decoded * scale - x).square().sum(-1, keepdim=True)
        better = error < least
        least, best, best_scale = (
            torch.where(better, *pair) for pair in ((error, least), (decoded, best), (scale, best_scale))
        )
    return best, best_scale


def on_the_trellis(x: torch.Tensor, levels: torch.Tensor, chain: int) -> torch.Tensor:
    """The nearest sequences of levels [2^(bits + 1)] to `x` [groups, 32], which the trellis allows (Viterbi)."""
    values = x.reshape(-1, chain)
    nearest = torch.stack([_nearest(values, levels[subset::4]) for subset in range(4)], -1)  # [chains, chain, subset]
    cost = (nearest - values.unsqueeze(-1)).square()
    state = torch.arange(STATES)  # 2 b[t-2] + b[t-1]
    before = torch.stack((state >> 1, (state >> 1) + 2), -1)  # [state, which of two states comes before it]
    subset = 2 * (before & 1) + ((state & 1).unsqueeze(-1) ^ (before >> 1))
    begins = torch.eye(STATES).log().abs()  # 0 for the state that a chain begins in, else infinite
    total = begins.expand(len(values), -1, -1)  # [chains, first state, state]
    choices = []
    for at in range(chain):
        total, choice = (total[..., before] + cost[:, at][:, subset].unsqueeze(1)).min(-1)
        choices.append(choice)
    first = total.diagonal(dim1=-2, dim2=-1).argmin(-1)  # it ends where it begins
    rows, now, found = torch.arange(len(values)), first, []
    for at in reversed(range(chain)):
        choice = choices[at][rows, first, now]
        found.append(nearest[rows, at, subset[now, choice]])
        now = before[now, choice]
    return torch.stack(found[::-1], -1).view(x.shape)


def _nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


@cache
def fitted_levels(bits: int, chain: int) -> torch.Tensor:
    """Levels of least error for Gaussian groups with such scales, symmetric, by Lloyd's rule; in units of a scale."""
    x = torch.randn(SAMPLE, GROUP_SIZE, generator=torch.Generator().manual_seed(0))
    count = 2 << bits
    levels = (torch.arange(count) - (count - 1) / 2) * (2 * CODES[bits].magnitudes[-1] / (count - 1))
    for _ in range(LLOYD_ROUNDS):
        decoded, scale = _best_scale(x, bits, levels, chain)
        number = (decoded.unsqueeze(-1) - levels).abs().argmin(-1).flatten()
        weights, weighed = scale.square().expand_as(x).flatten(), (x * scale).flatten()
        sums, members = torch.zeros(2, count).index_add_(1, number, torch.stack((weighed, weights)))
        means = torch.where(members > 0, sums / members.clamp_min(torch.finfo(torch.float32).tiny), levels)
        levels = (means - means.flip(0)) / 2
    return levels


def main() -> None:
    x, rows = torch.randn(8192, GROUP_SIZE, generator=torch.Generator().manual_seed(1)), []
    for bits in (3, 2):
        plain = scalar.dequantize(*scalar.quantize(x, bits), bits)
        found = [plain, *(trellis(x, bits, chain) for chain in CHAINS)]
        errors = [float((decoded - x).square().sum() / x.square().sum()) for decoded in found]
        rows.append((str(bits), f"{errors[0]:.5f}", *(f"{e:.5f} ({e / errors[0]:.2f})" for e in errors[1:])))
    print_table(("bits", "this code", *(f"trellis, chains of {chain}" for chain in CHAINS)), rows, markdown=True)


if __name__ == "__main__":
    main()
