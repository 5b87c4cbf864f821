"""The channels chosen: sound, of least modelled error, and of less true error than the largest channels."""

from __future__ import annotations

import itertools

import pytest
import torch
from packed_kv import FORMATS, get_codec
from packed_kv.formats import GROUP_SIZE
from tq_calibrate.choose import NOISE_OF_A_BIT, channel_order, choose, outlier_channels, partition
from tq_calibrate.statistics import LayerStatistics

HEADS, HEAD_SIZE = 3, 128


def sizes(seed: int, channels: int = HEAD_SIZE, heads: int = HEADS) -> torch.Tensor:
    """Energies or weights that differ by orders of magnitude, as real ones do."""
    return torch.randn(heads, channels, generator=torch.Generator().manual_seed(seed)).mul(1.5).exp().double()


def modelled(
    energy: torch.Tensor, weight: torch.Tensor, section: torch.Tensor, noise: tuple[float, ...]
) -> torch.Tensor:
    """J of choose.py, spelled out: [heads]."""
    parts = [
        noise[number]
        * (energy * (section == number)).sum(-1)
        * (weight * (section == number)).sum(-1)
        / (section == number).sum(-1)
        for number in range(len(noise))
    ]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("lengths", [(32, 96), (32, 32, 32, 32), (64, 128), (32, 32)])
def test_no_exchange_of_two_channels_would_help(lengths: tuple[int, ...]) -> None:
    energy, weight = sizes(1, sum(lengths)), sizes(2, sum(lengths))
    noise = tuple(0.25 + number for number in range(len(lengths)))
    section = partition(energy, weight, lengths, noise)
    assert all(row.bincount().tolist() == list(lengths) for row in section)
    least = modelled(energy, weight, section, noise)
    for a, b in itertools.combinations(range(0, sum(lengths), 3), 2):
        exchanged = section.clone()
        exchanged[:, a], exchanged[:, b] = section[:, b], section[:, a]
        assert (modelled(energy, weight, exchanged, noise) >= least * (1 - 1e-6)).all()


def test_it_is_all_but_the_best_of_all_choices() -> None:
    """Of 12 channels, all 495 ways to pick 4."""
    energy, weight = sizes(3, 12, heads=20), sizes(4, 12, heads=20)
    noise = (NOISE_OF_A_BIT, 1.0)
    found = modelled(energy, weight, partition(energy, weight, (4, 8), noise), noise)
    every = []
    for chosen in itertools.combinations(range(12), 4):
        section = torch.ones(20, 12, dtype=torch.int64)
        section[:, chosen] = 0
        every.append(modelled(energy, weight, section, noise))
    best = torch.stack(every).amin(0)
    assert (found < best * 1.15).all() and torch.isclose(found, best).sum() >= 19


def vectors(energy: torch.Tensor, seed: int) -> torch.Tensor:
    """Gaussian vectors of the given channel energies, fp32 [2048, heads, head_size]."""
    noise = torch.randn(2048, *energy.shape, generator=torch.Generator().manual_seed(seed))
    return noise * energy.sqrt().float()


def score_error(codec, keys: torch.Tensor, weight: torch.Tensor) -> float:
    """Mean over heads of the squared error of scores, relative to scores, for queries of energies `weight`."""
    error = (codec.decode(codec.encode(keys)) - keys).double().square().mean(0)
    return float(((error * weight).sum(-1) / (keys.double().square().mean(0) * weight).sum(-1)).mean())


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("tq3", "tq4")])
def test_scores_are_better_than_with_the_largest_channels_and_than_without_a_choice(name: str) -> None:
    """Keys with 5 channels 12 times larger, that queries hardly look at: so that scores come from all channels."""
    energy, weight = sizes(5) ** 0.4, sizes(6) ** 0.4
    energy[:, 10:60:10] *= 144
    weight[:, 10:60:10] /= 144
    keys = vectors(energy, 7)
    if FORMATS[name].outlier_bits:
        ours = {"outliers": outlier_channels(energy, weight, 32)}
        largest = {"outliers": energy.topk(32).indices.sort(-1).values}
    else:
        ours = {"channel_order": channel_order(energy, weight)}
        largest = {"channel_order": energy.argsort(dim=-1, descending=True)}
    errors = [score_error(get_codec(name, HEAD_SIZE, **given), keys, weight) for given in (ours, largest, {})]
    assert errors[0] < 0.85 * min(errors[1:]), errors


def test_an_order_lists_its_groups_with_large_channels_beside_small_ones() -> None:
    energy, weight = sizes(8), sizes(9)
    order = channel_order(energy, weight)
    assert (order.sort(-1).values == torch.arange(HEAD_SIZE)).all()
    section = partition(energy, weight, (GROUP_SIZE,) * 4, (1.0,) * 4)
    assert (section.gather(1, order).unflatten(1, (4, GROUP_SIZE)) == torch.arange(4)[:, None]).all()
    for group in energy.gather(1, order).unflatten(1, (4, GROUP_SIZE)).flatten(0, 1):
        ranks = group.argsort().argsort()
        assert (ranks.view(-1, 2).sum(-1) == GROUP_SIZE - 1).all()  # the largest with the smallest, and so on
        assert (ranks.view(-1, 4)[:, [0, 2]].sum(-1) == GROUP_SIZE + GROUP_SIZE // 2 - 1).all()


def test_dead_channels_do_not_disturb() -> None:
    energy, weight = sizes(10), sizes(11)
    energy[0, 3:90] = weight[0, 20:] = 0
    energy[1] = weight[2] = 0
    layer = LayerStatistics(energy, energy, energy, weight, weight, energy, energy)
    choice = choose(layer, "turboquant25")
    for scale in (choice.key.scale, choice.value.scale):
        assert (scale >= 1 / 64).all() and (scale <= 64).all()
    for outliers, order in (
        (choice.key.outlier_channels, choice.key.channel_order),
        (choice.value.outlier_channels, choice.value.channel_order),
    ):
        assert outliers.shape == (HEADS, 32) and (outliers.diff() > 0).all()
        assert (order.sort(-1).values == torch.arange(HEAD_SIZE)).all()
    alive = outlier_channels(sizes(10)[1:2] * 0 + 1e-30, weight[1:2], 32)
    assert alive.shape == (1, 32)


def test_a_head_does_not_depend_on_the_others() -> None:
    energy, weight = sizes(12), sizes(13)
    together = channel_order(energy, weight)
    for head in range(HEADS):
        assert torch.equal(channel_order(energy[head : head + 1], weight[head : head + 1])[0], together[head])
