"""A trellis of 2.25 bits that a fork of llama.cpp has for K and V, `turbo2_tcq`, by its published definition: a
yardstick of `long_context.py`, not to serve with.

The figures are spiritbuun's, of buun-llama-cpp at commit 1c478819 (MIT): ggml/src/ggml-cuda/turbo-quant-cuda.cuh and
fattn.cu. A vector is filled up with zeros to 128 channels, divided by its norm, and rotated: signs, Hadamard, signs.
Each channel has two bits. They are shifted into a state of 8 bits from above, and the state is the index of the
channel's level. The states before the first channel are free. The path of least squared error is stored, with an fp16
factor that restores the vector's norm. V is longer by 1.04, and by a factor that grows with the context, when it is
read.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

CHANNELS, STATES, BYTES = 128, 256, 36
BATCH = 256
"""Vectors whose paths are searched at once."""
SIGNS = (0x49F250A9A4C63BBB42F85949E46A0359, 0xBEA56562B7A5357A3F628FDC16ACEE90)
"""Bit i is set if channel i is negated, before and behind the Hadamard transform."""
LEVELS = (
    -0.18030643, -0.11009848, -0.04742626, 0.02894132, -0.10523465, -0.031312924, 0.031491395, 0.12263535,
    -0.15660362, -0.055477407, 0.0046675834, 0.06166081, -0.07506216, -0.016963918, 0.043737844, 0.116496615,
    -0.08632783, -0.022493735, 0.041032985, 0.10660284, -0.06274858, -0.0036939639, 0.02095157, 0.07539709,
    -0.09802641, -0.008419088, 0.059072323, 0.17311879, -0.093109086, -0.02654333, 0.014827672, 0.07793592,
    -0.031235758, 0.01271591, 0.08752262, 0.17246453, -0.14595252, -0.07227624, 0.013628688, 0.08131674,
    -0.036909282, 0.0018896917, 0.05209119, 0.12407892, -0.13689458, -0.06054520, 0.0064648795, 0.07551241,
    -0.18980840, -0.110128626, -0.046503957, 0.026387159, -0.034967307, 0.04810357, 0.072072044, 0.14355458,
    -0.10182410, -0.02907887, 0.014033012, 0.083419636, -0.056140676, 0.008405868, 0.066070884, 0.14037225,
    -0.117427245, -0.047159385, 0.016928354, 0.08142885, -0.029359628, 0.045608785, 0.10559447, 0.20061271,
    -0.040425077, 0.029068163, 0.08408973, 0.13628258, -0.16633821, -0.10711727, -0.04196669, 0.027895834,
    -0.0054065837, 0.058898676, 0.12688550, 0.18268861, -0.16287325, -0.11218357, -0.07165227, -0.009524379,
    -0.24026902, -0.073219374, -0.0005165726, 0.05959821, -0.05532953, 0.027044486, 0.09425678, 0.15356481,
    -0.14381111, -0.10563502, -0.037867088, 0.023611993, -0.03624307, 0.049588434, 0.12192037, 0.23462485,
    -0.14990251, -0.09659304, -0.05886742, 0.014878461, -0.009889551, 0.06910514, 0.12120181, 0.22596690,
    -0.08290075, -0.009009629, 0.066151775, 0.12188313, -0.11591514, -0.06952189, -0.031633306, 0.023740824,
    -0.20510401, -0.103369795, 0.09148037, 0.17268716, -0.16597997, -0.09207068, -0.032810967, 0.024847647,
    -0.02487482, 0.049298953, 0.09624215, 0.14217524, -0.18418685, -0.10147012, -0.05841265, 0.008057022,
    -0.14269894, -0.092456274, -0.026881337, 0.049792137, -0.019881032, 0.030333601, 0.09736802, 0.17764080,
    -0.19579841, -0.114739306, -0.026823774, 0.07466014, -0.09001050, -0.041468445, 0.028473806, 0.08870695,
    -0.019396419, 0.042828932, 0.10885327, 0.13335012, -0.15005013, -0.074581385, -0.028608415, 0.03848942,
    -0.09687270, -0.057059396, 0.0077843578, 0.06302297, -0.23247094, -0.14509225, -0.032651436, 0.027010715,
    -0.047595482, 0.06280303, 0.114691675, 0.17124057, -0.21092793, -0.13704823, -0.07340412, 0.0039013291,
    -0.062834196, 0.012601906, 0.012601906, 0.08721347, -0.13256435, -0.024173854, 0.07723171, 0.14801070,
    -0.06471605, -0.0017903054, -0.0017903054, 0.058302354, -0.09731802, -0.03400696, 0.02762442, 0.08986137,
    -0.08288722, -0.019051429, 0.045709886, 0.15211061, -0.09507891, -0.015612489, 0.025347246, 0.087257534,
    -0.066236064, -0.0047936034, 0.06386274, 0.15401669, -0.105809286, -0.051802177, 0.01073050, 0.08292137,
    -0.11884470, -0.04404144, 0.02550729, 0.02550729, -0.01731189, 0.062161792, 0.12127554, 0.21981733,
    -0.17066145, -0.11660990, -0.049425896, 0.021293938, -0.04711412, 0.026577346, 0.055197213, 0.12541275,
    -0.028268812, 0.015206398, 0.09002519, 0.12699963, -0.10059831, -0.026676945, 0.059903253, 0.13054545,
    -0.09582803, -0.033371232, 0.010346129, 0.066766635, -0.09964944, -0.028686784, 0.021184925, 0.09120017,
    -0.16957201, -0.07594450, 0.04172865, 0.18313301, -0.051526368, 0.011877304, 0.011877304, 0.07956263,
    -0.13432936, -0.05269006, 0.03536416, 0.117640756, -0.022776067, 0.042032316, 0.10472976, 0.18042557,
)  # fmt: skip
"""The level of each state, for vectors of norm 1."""


def paths(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """States int64 [n, channels] of the paths through `levels` nearest to the vectors fp32 [n, channels]."""
    count, channels = x.shape
    costs = torch.empty(channels + 1, STATES, count)
    costs[0] = 0.0
    # (channel - level)^2 less the channel's own square, which is the same on all paths
    torch.matmul(
        torch.stack((levels.square(), -2 * levels), 1),
        torch.stack((torch.ones_like(x.T), x.T), 1),
        out=costs[1:],
    )
    for before, after in pairwise(costs):
        # the four states 4i .. 4i + 3 all lead to the states i, i + 64, i + 128, i + 192
        first, second, third, fourth = before.view(STATES // 4, 4, count).unbind(1)
        best = torch.minimum(torch.minimum(first, second), torch.minimum(third, fourth))
        after.view(4, STATES // 4, count).add_(best)
    state, found = costs[channels].argmin(0), []
    for before in reversed(costs[:channels].unbind()):
        found.append(state)
        leading = state % (STATES // 4) * 4
        first, second, third, fourth = before.gather(0, leading + torch.arange(4)[:, None])
        later = torch.where(fourth < third, 3, 2)
        state = leading + torch.where(
            torch.minimum(third, fourth) < torch.minimum(first, second), later, (second < first).long()
        )
    return torch.stack(found[::-1], -1)


def signs(bits: int, channels: int) -> torch.Tensor:
    return torch.tensor([-1.0 if bits >> i & 1 else 1.0 for i in range(channels)])


def hadamard(channels: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix [channels, channels], a power of two, by Sylvester's construction."""
    matrix = torch.ones(1, 1)
    while len(matrix) < channels:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(channels)


def read_back(vectors: torch.Tensor, channels: int = CHANNELS) -> torch.Tensor:
    """K fp32 [.., up to `channels`] as the code gives it back. With another number of `channels` than the fork's,
    levels are for a vector of norm 1 with this number of channels."""
    size = vectors.shape[-1]
    filled = torch.nn.functional.pad(vectors.float(), (0, channels - size)).reshape(-1, channels)
    levels = torch.tensor(LEVELS) * math.sqrt(CHANNELS / channels)
    before, behind, matrix = signs(SIGNS[0], channels), signs(SIGNS[1], channels), hadamard(channels)
    norms = filled.norm(dim=-1, keepdim=True)
    unit = (filled / norms).nan_to_num() * before @ matrix * behind
    coded = torch.cat([levels[paths(part, levels)] for part in unit.split(BATCH)])
    factors = (norms / coded.norm(dim=-1, keepdim=True)).half().float()
    return (factors * coded * behind @ matrix * before)[:, :size].reshape(vectors.shape)


def value_gain(tokens: int) -> float:
    """The factor of V in a context of `tokens`."""
    return 1.04 * min(max(0.8865 + 0.0195 * math.log(tokens), 1.0), 1.12)
