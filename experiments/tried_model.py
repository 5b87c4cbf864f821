"""A model whose attention reads K and V back through codes, all by transformers in fp32, and statistics
of its keys and values on calibration text. `tried.py` says what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from packed_kv.formats import FORMATS
from torch.nn.functional import scaled_dot_product_attention
from tq_calibrate.attended import Scores
from tq_calibrate.choose import channel_order, outlier_channels
from tq_calibrate.collect import ATTENTION
from tq_calibrate.model import load_model
from tq_calibrate.sums import LayerSums
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from tried_codes import Code, Dtype, Raw, Site, Widths

LARGEST_SCALE = 64.0
QUERY_TILE = 128
CENTROIDS, SAMPLE, LLOYD_ROUNDS = 256, 8192, 8
NOISE = {2: 0.10680, 3: 0.02598, 4: 0.00623}
"""bits -> relative squared error of the code (docs/formats.md)."""
ENERGY = {"": "key", "centroids": "rest", "weighed": "weighed_spread"}
"""offset -> what `Facts` calls the mean square of what is left of K; otherwise `spread`."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""


@dataclass(frozen=True)
class Method:
    """How a cache keeps K and V.

    Keys are stored less an `offset` that the reader adds again: "" (nothing), "mean" (of a head's channel), "mean and
    first" (position 0 has a mean of its own), "weighed" (that, with the weights that `tq-calibrate` gives to keys), or
    "centroids" (the nearest of 256 a head, a byte). `scaled`: stored times (E[q^2] / E[k^2])^(1/4), a factor a channel;
    V likewise with the output projection's columns, if its dtype has outliers or with `value_scaled`. `value_mean`: V
    less its mean. The first `sinks` tokens of a sequence, and the last `window` tokens of each query, its own included,
    are kept as `ring` says. `oracle`: the reader knows, for each query and head, what true scores of the keys beyond
    the window come to, and adds the difference to those that it has.
    """

    key: Code
    value: Code
    offset: str = ""
    scaled: bool = False
    value_scaled: bool = False
    value_mean: bool = False
    sinks: int = 0
    window: int = 0
    oracle: bool = False
    ring: Code = field(default_factory=Raw)

    def slot_bytes(self, head_dim: int) -> float:
        """Bytes of K and V of one token and one KV head, without sinks and window."""
        return self.key.vector_bytes(head_dim) + self.value.vector_bytes(head_dim) + (self.offset == "centroids")


class Facts:
    """What calibration text tells, by layer; fp32 [KV heads, head_dim] but for `centroids`, [KV heads, 256, head_dim].

    `query` is E[q^2] of the query heads of a KV head, `key` E[k^2], `spread` E[(k - mean)^2], `rest` E[(k -
    centroid)^2], `value` E[v^2], `output` the squared norms of the output projection's columns. `weighed_mean` and
    `weighed_spread` are those of `tq-calibrate`. `query_matrix` E[q q^T] and `output_matrix` (products of the output
    projection's columns, summed over the query heads) are [KV heads, head_dim, head_dim].
    """

    def __init__(self, layers: dict[int, dict[str, torch.Tensor]]) -> None:
        self.layers = layers
        self._sites: dict[tuple[int, str, str, bool, bool], Site] = {}

    def scale(self, layer: int, role: str, offset: str) -> torch.Tensor:
        """The factor of each channel: of geometric mean 1 in a head, and within 1/64 .. 64."""
        found = self.layers[layer]
        energy = found["value" if role == "value" else ENERGY.get(offset, "spread")]
        weight = found["output"] if role == "value" else found["query"]
        log = (weight.clamp_min(1e-12) / energy.clamp_min(1e-12)).log() / 4
        return (log - log.mean(-1, keepdim=True)).exp().clamp(1 / LARGEST_SCALE, LARGEST_SCALE)

    def site(self, layer: int, role: str, offset: str, scaled: bool, calibrated: bool) -> Site:
        """The site of a layer, with its channels if `calibrated`."""
        place = layer, role, offset, scaled, calibrated
        if place not in self._sites:
            self._sites[place] = Site(layer, role)
            if calibrated:
                self._sites[place] = Site(layer, role, *self._channels(layer, role, offset, scaled))
        return self._sites[place]

    def _channels(self, layer: int, role: str, offset: str, scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.layers[layer]
        energy, weight = found["value"], found["output"]
        if role == "key":
            energy, weight = found[ENERGY.get(offset, "spread")], found["query"]
        if scaled:
            scale = self.scale(layer, role, offset)
            energy, weight = energy * scale**2, weight / scale**2
        count = FORMATS["turboquant35"].outlier_channels(energy.shape[-1])
        energy, weight = energy.double(), weight.double()
        return outlier_channels(energy, weight, count), channel_order(energy, weight)

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        torch.save({"identity": identity, "layers": self.layers}, path)

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any]) -> Facts | None:
        """Facts that were saved under `identity`; None if there are none."""
        saved = torch.load(path, weights_only=True) if path.is_file() else {}
        return cls(saved["layers"]) if saved.get("identity") == identity else None


def load(folder: str) -> transformers.PreTrainedModel:
    """A causal LM in fp32 for `Observer` and `Run`. Raises UserError."""
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    return load_model(folder, ATTENTION, "float32", torch.device("cpu"))


class Observer:
    """Gathers facts while a model that `load` gave runs."""

    def __init__(self) -> None:
        self.sums: dict[int, dict[str, torch.Tensor]] = {}
        self.weighed: dict[int, LayerSums] = {}
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.tokens = self.sequences = 0

    def run(self, model: transformers.PreTrainedModel, sequences: list[list[int]]) -> Facts:
        """Facts of token sequences."""
        AttentionInterface.register(ATTENTION, self.attention)
        stride = max(1, sum(map(len, sequences)) // SAMPLE)
        for ids in sequences:
            self.stride = stride
            with torch.inference_mode():
                model.base_model(input_ids=torch.tensor([ids]), use_cache=False)
            self.tokens, self.sequences = self.tokens + len(ids), self.sequences + 1
        return Facts({layer: self._facts(layer) for layer in sorted(self.sums)})

    def attention(self, module: Any, query, key, value, mask, **options):
        if module.layer_idx not in self.sums:
            columns = module.o_proj.weight.float().T.unflatten(0, (key.shape[1], -1, key.shape[-1]))
            matrix = (columns @ columns.transpose(-1, -2)).sum(1)
            self.sums[module.layer_idx] = {"output": matrix.diagonal(dim1=-2, dim2=-1), "output_matrix": matrix}
            self.weighed[module.layer_idx] = LayerSums(key.shape[1], (key.shape[-1],) * 2, columns.square().sum(-1))
            self.keys[module.layer_idx] = []
        sums = self.sums[module.layer_idx]
        queries = query[0].unflatten(0, (key.shape[1], -1))  # [KV heads, query heads, tokens, channels]
        found = {
            "query": queries.square().sum(2).mean(1),
            "query_matrix": (queries.transpose(-1, -2) @ queries).mean(1),
            "key": key[0].square().sum(1),
            "value": value[0].square().sum(1),
            "key_mean": key[0].sum(1),
            "value_mean": value[0].sum(1),
            "first_mean": key[0, :, 0],
        }
        for name, x in found.items():
            sums[name] = sums[name] + x if name in sums else x.clone()
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self.weighed[module.layer_idx].add(q, k, v, torch.arange(len(k)), Scores(options["scaling"]))
        self.keys[module.layer_idx].append(key[0, :, :: self.stride].half())
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def _facts(self, layer: int) -> dict[str, torch.Tensor]:
        found = {name: x / self.tokens for name, x in self.sums[layer].items()}
        found |= {name: self.sums[layer][name] for name in ("output", "output_matrix")}
        weighed = self.weighed[layer].statistics()
        assert weighed.key_mean is not None
        found["weighed_mean"], found["weighed_spread"] = weighed.key_mean.float(), weighed.key_variance.float()
        found["first_mean"] = self.sums[layer]["first_mean"] / self.sequences
        found["spread"] = (found["key"] - found["key_mean"].square()).clamp_min(0)
        scale = Facts({0: found}).scale(0, "key", "mean").unsqueeze(1)
        keys = torch.cat(self.keys.pop(layer), 1).float() * scale
        centroids = k_means(keys)
        rest = keys - nearest(keys, centroids)
        found["centroids"], found["rest"] = centroids / scale, (rest / scale).square().mean(1)
        return found


def k_means(x: torch.Tensor) -> torch.Tensor:
    """Centroids of each head by Lloyd's rule: fp32 [heads, vectors, channels] -> [heads, 256 or all, channels]."""
    count = min(CENTROIDS, x.shape[1])
    centroids = x[:, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))[:count]].clone()
    for _ in range(LLOYD_ROUNDS):
        index = closest(x, centroids)
        sums = torch.zeros_like(centroids).scatter_add_(1, index.unsqueeze(-1).expand_as(x), x)
        members = torch.zeros(index.shape[0], count).scatter_add_(1, index, torch.ones(index.shape)).unsqueeze(-1)
        centroids = torch.where(members > 0, sums / members.clamp_min(1), centroids)
    return centroids


def closest(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """int64 [heads, vectors], the number of the nearest centroid."""
    return (centroids.square().sum(-1).unsqueeze(1) - 2 * x @ centroids.transpose(-1, -2)).argmin(-1)


def nearest(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The nearest centroid of each vector, of the shape of `x` [heads, vectors, channels]."""
    return centroids.gather(1, closest(x, centroids).unsqueeze(-1).expand_as(x))


class Run:
    """Windows of tokens, teacher-forced through a model; `kl` compares a method with the model as it is."""

    def __init__(self, model: transformers.PreTrainedModel, facts: Facts, windows: list[list[int]]) -> None:
        self.model, self.facts = model, facts
        self.windows = [torch.tensor([ids]) for ids in windows]
        self.method: Method | None = None
        self.rope: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        AttentionInterface.register(ATTENTION, self.attention)
        self.true_log_probs = [self.log_probs(ids) for ids in self.windows]

    def kl(self, method: Method) -> torch.Tensor:
        """KL divergence from the model as it is, in nats: fp64 [positions of all windows]."""
        self.method = method
        found = []
        for ids, true in zip(self.windows, self.true_log_probs, strict=True):
            log_probs = self.log_probs(ids)
            for p, q in zip(true.split(128), log_probs.split(128), strict=True):
                found.append((p.exp() * (p - q)).sum(-1).double())
        self.method = None
        return torch.cat(found)

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)

    def attention(self, module: Any, query, key, value, mask, **options):
        if options.get("sliding_window") or options.get("softcap") or options.get("s_aux") is not None:
            raise SystemExit("tried.py: models with sliding windows, soft caps or sinks of their own are not measured")
        if self.method is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        far, near = zip(*(self.stored(module.layer_idx, *x) for x in (("key", key), ("value", value))), strict=True)
        true = key if self.method.oracle else None
        output = attend(query * options["scaling"], far, near, self.method.window, true)
        return output.transpose(1, 2), None

    def stored(self, layer: int, role: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a reader finds of `x` [batch, KV heads, tokens, head_dim] far away, and in the window."""
        method, found = self.method, self.facts.layers[layer]
        assert method is not None
        code = method.key if role == "key" else method.value
        dtype = code if isinstance(code, Dtype) else None
        offset = torch.zeros_like(x)
        if role == "key" and method.offset:
            offset = self.key_offset(layer, x)
        elif role == "value" and method.value_mean:
            offset = found["value_mean"].unsqueeze(1).expand_as(x)
        scaled = method.scaled and (role == "key" or method.value_scaled or (dtype is not None and dtype.has_outliers))
        scale = self.facts.scale(layer, role, method.offset).unsqueeze(1) if scaled else torch.ones(1, 1)
        chosen = self.facts.site(layer, role, method.offset, scaled, dtype is not None and dtype.calibrated)
        weight = found["query_matrix" if role == "key" else "output_matrix"] / (scale * scale.transpose(-1, -2))
        site = Site(layer, role, chosen.outliers, chosen.order, self.turns(x), weight)
        kept = ((x - offset) * scale).transpose(1, 2)
        far, near = (c.read_back(kept, site).transpose(1, 2) / scale + offset for c in (code, method.ring))
        far[:, :, : method.sinks] = near[:, :, : method.sinks]
        return far, near

    def key_offset(self, layer: int, key: torch.Tensor) -> torch.Tensor:
        assert self.method is not None
        found = self.facts.layers[layer]
        if self.method.offset == "centroids":
            scale = self.facts.scale(layer, "key", "centroids").unsqueeze(1)
            return nearest(key[0] * scale, found["centroids"] * scale).unsqueeze(0) / scale
        mean = found["weighed_mean" if self.method.offset == "weighed" else "key_mean"]
        offset = mean.unsqueeze(1).expand_as(key).clone()
        if self.method.offset != "mean":
            offset[:, :, 0] = found["first_mean"]
        return offset

    def turns(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE's cos and sin of every position of `x`."""
        tokens = x.shape[2]
        if tokens not in self.rope:
            cosine, sine = self.model.base_model.rotary_emb(x, torch.arange(tokens).unsqueeze(0))
            self.rope[tokens] = cosine[0], sine[0]
        return self.rope[tokens]


def attend(
    query: torch.Tensor, far: Pair, near: Pair, window: int, true_key: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention that reads K and V of a query's last `window` tokens from `near`, of others from `far`.

    `query` [batch, heads, tokens, head_dim], scaled; `far` and `near` are K and V, [batch, KV heads, tokens, head_dim]
    each. With `true_key` in the shape of K (and a window), a number is added to all far scores of a query, so that the
    sum of their exponentials is that of the true scores. Returns the shape of `query`.
    """
    if not window:
        return scaled_dot_product_attention(query, far[0], far[1], is_causal=True, scale=1.0, enable_gqa=True)
    (far_key, far_value), (near_key, near_value) = (tuple(x.unsqueeze(2) for x in pair) for pair in (far, near))
    query, outputs = query.unflatten(1, (far_key.shape[1], -1)), []
    for start in range(0, query.shape[3], QUERY_TILE):
        rows = query[..., start : start + QUERY_TILE, :]
        end, band = start + rows.shape[3], slice(max(0, start - window + 1), start + rows.shape[3])
        distance = torch.arange(start, end).unsqueeze(1) - torch.arange(end)
        recent = distance[:, band] < window
        scores = rows @ far_key[..., :end, :].transpose(-1, -2)
        if true_key is not None:
            true, at_hand = (
                x.masked_fill(distance < window, -torch.inf).logsumexp(-1, keepdim=True)
                for x in (rows @ true_key.unsqueeze(2)[..., :end, :].transpose(-1, -2), scores)
            )
            scores += (true - at_hand).nan_to_num(0.0)  # no keys are far: -inf less -inf
        near_scores = rows @ near_key[..., band, :].transpose(-1, -2)
        scores[..., band] = torch.where(recent, near_scores, scores[..., band])
        weights = scores.masked_fill_(distance < 0, -torch.inf).softmax(-1)
        output = weights[..., band].masked_fill(~recent, 0) @ near_value[..., band, :]
        weights[..., band] = weights[..., band].masked_fill(recent, 0)
        outputs.append(output + weights @ far_value[..., :end, :])
    return torch.cat(outputs, 3).flatten(1, 2)


def sensitivities(run: Run, **how: Any) -> dict[tuple[int, str], float]:
    """(layer, role) -> mean KL divergence with that alone at 2 bits; `how`: more arguments of `Method`."""
    found = {}
    for layer in run.facts.layers:
        for role in ("key", "value"):
            bits = {(layer, role): 2}
            found[layer, role] = float(run.kl(Method(Widths(bits, "key"), Widths(bits, "value"), **how)).mean())
    return found


def allocate(costs: dict[Any, float], mean: int) -> dict[Any, int]:
    """Bits of each place, 2 to 4 and `mean` on average, of least cost; `costs` are at 2 bits, and go with `NOISE`."""
    bits = dict.fromkeys(costs, 2)
    for _ in range((mean - 2) * len(bits)):
        growing = [place for place in bits if bits[place] < 4]
        best = max(growing, key=lambda place: costs[place] * (NOISE[bits[place]] - NOISE[bits[place] + 1]))
        bits[best] += 1
    return bits
