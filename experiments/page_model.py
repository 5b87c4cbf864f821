"""A Llama in PyTorch whose decode reads keys and values as a dtype stores them: all of them, or those of some pages.

For page_selection.py. A prompt is prefilled whole and exactly; then known texts are forced behind it. Positions are
independent of each other, so all forced tokens of a prompt, of all texts, run as one batch, layer by layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packed_kv import FORMATS
from packed_kv.calibration_file import Calibration, LayerCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv_quality.teacher_forced import through_e4m3
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NEAR = 64
"""Tokens of the recent window, and of the beginning of a request, which are always read."""
RULES = ("gaussian", "mean", "bounds", "oracle")
FP8_ATTENTION = "fp8 attention"


@dataclass(frozen=True)
class Reading:
    """How keys and values are read: a dtype of `FORMATS`, "fp8", "fp8 attention" or "bf16", all of them (`budget` 0)
    or, of pages of `page` tokens, `budget` tokens chosen by `rule`."""

    dtype: str
    page: int = 0
    budget: int = 0
    rule: str = ""


class Llama:
    """The model of a folder. `stretch`: by which factor YaRN lengthens its context; 1: not at all."""

    def __init__(self, folder: Path, device: str, stretch: float = 1) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.device, self.context = device, int(config.max_position_embeddings * stretch)
        kind = "default"
        if stretch > 1:
            kind = "yarn"
            config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": stretch,
                                      "original_max_position_embeddings": config.max_position_embeddings}  # fmt: skip
            config.max_position_embeddings = self.context
        if kind == "default":
            theta = config.rope_parameters["rope_theta"]
            frequencies, factor = theta ** (-torch.arange(0, self.size, 2).double() / self.size), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        angles = torch.outer(torch.arange(self.context).double(), frequencies.double()).repeat(1, 2)
        self.cos, self.sin = ((f(angles) * factor).float().to(device) for f in (torch.cos, torch.sin))
        self.weights = {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[name])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weights[name].float(), self.eps).bfloat16()

    def qkv(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of tokens at `positions`: [heads, tokens, size], [KV heads, tokens, size] twice, bf16."""
        prefix = f"model.layers.{layer}"
        x = self._norm(hidden, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            self._linear(x, f"{prefix}.self_attn.{name}_proj.weight").unflatten(-1, (-1, self.size)).transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = self.cos[positions], self.sin[positions]

        def turn(y: torch.Tensor) -> torch.Tensor:
            low, high = y.float().chunk(2, -1)
            return (y.float() * cos + torch.cat((-high, low), -1) * sin).bfloat16()

        return turn(q), turn(k), v

    def rest(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer behind its attention, whose output is [heads, tokens, size]."""
        prefix = f"model.layers.{layer}"
        output = attended.transpose(0, 1).flatten(1).bfloat16()
        hidden = hidden + self._linear(output, f"{prefix}.self_attn.o_proj.weight")
        x = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (self._linear(x, f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        return hidden + self._linear(functional.silu(gate) * up, f"{prefix}.mlp.down_proj.weight")

    def embed(self, ids: list[int]) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][torch.tensor(ids, device=self.device)]

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        name = "lm_head.weight" if "lm_head.weight" in self.weights else "model.embed_tokens.weight"
        return self._linear(self._norm(hidden, "model.norm.weight"), name).float().log_softmax(-1)

    def prefill(self, ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values [KV heads, tokens, size] of a prompt, by layer."""
        hidden, keys, values = self.embed(ids), [], []
        positions = torch.arange(len(ids), device=self.device)
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, hidden, positions)
            keys_of_all, values_of_all = (x.repeat_interleave(self.heads // self.kv_heads, 0)[None] for x in (k, v))
            attended = functional.scaled_dot_product_attention(q[None], keys_of_all, values_of_all, is_causal=True)
            hidden = self.rest(layer, hidden, attended[0])
            keys.append(k)
            values.append(v)
        return keys, values

    def greedy(self, keys: list[torch.Tensor], values: list[torch.Tensor], last: int, tokens: int) -> list[int]:
        """`tokens` tokens that follow a prompt with these keys and values and then the token `last`."""
        keys, values, made = [*keys], [*values], [last]
        for position in range(keys[0].shape[1], keys[0].shape[1] + tokens):
            hidden = self.embed(made[-1:])
            for layer in range(self.layers):
                q, k, v = self.qkv(layer, hidden, torch.tensor([position], device=self.device))
                keys[layer], values[layer] = torch.cat((keys[layer], k), 1), torch.cat((values[layer], v), 1)
                scores = q.unflatten(0, (self.kv_heads, -1)).float() @ keys[layer][:, None].float().transpose(-1, -2)
                weights = (scores * self.size**-0.5).softmax(-1)
                hidden = self.rest(layer, hidden, (weights @ values[layer][:, None].float()).flatten(0, 1))
            made.append(int(self.log_probs(hidden)[0].argmax()))
        return made[1:]


class Store:
    """What reading back stored keys and values of a model gives, and what pages keep of keys."""

    def __init__(self, dtype: str, model: Llama, file: Calibration | None = None) -> None:
        self.dtype = dtype
        self.codecs = []
        for layer in range(model.layers if dtype in FORMATS else 0):
            known = file.layers[layer].taken_by(FORMATS[dtype]) if file else LayerCalibration()
            self.codecs.append(PagedCodec(FORMATS[dtype], model.size, known.key, known.value, model.device))

    def read(self, layer: int, role: str, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys or values bf16 [KV heads, tokens, size] at `positions` -> the same, as they are read back."""
        if not self.codecs:
            return x if self.dtype == "bf16" else through_e4m3(x)
        codec, at = getattr(self.codecs[layer], role), positions[:, None]
        packed = codec.encode(x.transpose(0, 1).float(), at)
        return codec.decode(packed, at).transpose(0, 1).to(x.dtype)

    def rows(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys bf16 [KV heads, tokens, size] from position 0 on, as their pages have them: centred, scaled and rotated,
        fp32."""
        positions = torch.arange(keys.shape[1], device=keys.device)[:, None]
        return self.codecs[layer].key.prepare(keys.transpose(0, 1).float(), positions).transpose(0, 1)

    def means(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """What `rows` took off keys at `positions`: fp32 [KV heads or 1, positions, size]."""
        return self.codecs[layer].key.prepared_means(positions).transpose(0, 1)

    def query(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """fp32 [KV heads, group, tokens, size], whose products with `rows` plus `means` are those with the keys."""
        codec = self.codecs[layer].key
        return codec.rotate(codec.transform.unscale(q.permute(1, 2, 0, 3))).permute(2, 0, 1, 3)


@dataclass
class Prompt:
    """Keys and values [KV heads, tokens, size] of a prompt, by layer: as they are, and as `store` gives them back."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    store: Store
    far_keys: list[torch.Tensor] = field(init=False)
    far_values: list[torch.Tensor] = field(init=False)
    _bounds: dict[tuple[int, int, str], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positions = torch.arange(self.tokens, device=self.keys[0].device)
        self.far_keys = [self.store.read(i, "key", x, positions) for i, x in enumerate(self.keys)]
        self.far_values = [self.store.read(i, "value", x, positions) for i, x in enumerate(self.values)]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    def pages(self, layer: int, page: int, rule: str) -> tuple[torch.Tensor, ...]:
        """Two statistics of each page's keys by channel, 8 bits each, with what was taken off the keys put back:
        mean and squared standard deviation, or minimum and maximum ("bounds"), [KV heads, pages, size]."""
        key = layer, page, "bounds" if rule == "bounds" else ""
        if key not in self._bounds:
            paged = self.store.rows(layer, self.far_keys[layer]).unflatten(1, (-1, page))
            last = torch.arange(page - 1, self.tokens, page, device=paged.device)
            means = self.store.means(layer, last)  # of one block of positions, but for the first token
            if rule == "bounds":
                self._bounds[key] = eight_bits(paged.amin(2)) + means, eight_bits(paged.amax(2)) + means
            else:
                deviation = eight_bits(paged.std(2, correction=0))
                self._bounds[key] = eight_bits(paged.mean(2)) + means, deviation.square()
        return self._bounds[key]


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """[..., size], rounded to 255 steps of its largest magnitude."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


@dataclass(frozen=True)
class Rows:
    """Tokens of texts that each follow the same prompt: a row has a position and the number of its text, [rows]."""

    ids: list[int]
    position: torch.Tensor
    text: torch.Tensor

    @classmethod
    def of(cls, texts: list[list[int]], start: int, device: str) -> Rows:
        offsets = [offset for text in texts for offset in range(len(text))]
        numbers = [number for number, text in enumerate(texts) for _ in text]
        position, number = (torch.tensor(x, device=device) for x in (offsets, numbers))
        return cls([token for text in texts for token in text], position + start, number)

    def sees(self) -> torch.Tensor:
        """Whether a row sees another: bool [rows, rows]."""
        return (self.text[:, None] == self.text) & (self.position <= self.position[:, None])


def forced(model: Llama, prompt: Prompt, rows: Rows, how: Reading) -> torch.Tensor:
    """Log-probabilities fp32 [rows, vocabulary] behind each row."""
    hidden = model.embed(rows.ids)
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, hidden, rows.position)
        hidden = model.rest(layer, hidden, attend(layer, q, k, v, prompt, rows, how))
    return model.log_probs(hidden)


def attend(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompt: Prompt, rows: Rows, how: Reading
) -> torch.Tensor:
    """Attention of the rows' queries [heads, rows, size] over a prompt and the rows of their text: fp32 [heads, rows,
    size]. The last `NEAR` tokens of each are read as they are."""
    kv_heads, _, size = k.shape
    start, store, is_fp8 = prompt.tokens, prompt.store, how.dtype == FP8_ATTENTION
    first = max(0, start - NEAR)  # columns from here on may be near
    keys, values = (
        torch.cat((far[layer], store.read(layer, role, x, rows.position)), 1).float()
        for far, role, x in ((prompt.far_keys, "key", k), (prompt.far_values, "value", v))
    )
    near_keys, near_values = (
        torch.cat((near[layer][:, first:], x), 1).float() for near, x in ((prompt.keys, k), (prompt.values, v))
    )
    queries = (through_e4m3(q) if is_fp8 else q).float().unflatten(0, (kv_heads, -1)) * size**-0.5
    column = torch.cat((torch.arange(first, start, device=q.device), rows.position))
    is_near = (rows.position[:, None] - column < NEAR) & (not is_fp8)
    sees = functional.pad(rows.sees(), (start - first, 0), value=True)
    scores = queries @ keys[:, None].transpose(-1, -2)
    if how.budget:
        read = chosen(layer, queries, scores[..., :start], prompt, rows, how)
        read[..., :NEAR] = True
        read[..., first:] |= is_near[:, : start - first]
        scores[..., :start].masked_fill_(~read[:, None], -math.inf)
    last = scores[..., first:]
    last.copy_(torch.where(is_near, queries @ near_keys[:, None].transpose(-1, -2), last).masked_fill(~sees, -math.inf))
    weights = scores.softmax(-1)
    if is_fp8:  # the weights of FlashAttention are divided by their sum behind the product with V
        largest = weights.amax(-1, keepdim=True)
        weights = through_e4m3(weights / largest) * largest
    near = weights[..., first:] * is_near
    weights[..., first:].masked_fill_(is_near, 0)
    return (weights @ values[:, None] + near @ near_values[:, None]).flatten(0, 1)


def chosen(layer: int, q: torch.Tensor, scores: torch.Tensor, prompt: Prompt, rows: Rows, how: Reading) -> torch.Tensor:
    """Which tokens of the prompt lie in the chosen pages: bool [KV heads, rows, tokens]. q: scaled, [KV heads, group,
    rows, size]; scores: [KV heads, group, rows, tokens]."""
    pages = prompt.tokens // how.page
    if how.rule == "oracle":
        estimates = scores.unflatten(-1, (pages, how.page)).logsumexp(-1)
    else:
        turned = prompt.store.query(layer, q)
        estimates = estimate(turned, prompt.pages(layer, how.page, how.rule), how.rule)
    # The estimate of a page beside the others' of its head: heads of a group have scores of different scales.
    end = torch.arange(1, pages + 1, device=q.device) * how.page
    candidate = (end > NEAR) & (end - how.page <= rows.position[:, None] - NEAR)
    estimates = estimates.masked_fill(~candidate, -math.inf).log_softmax(-1).amax(1)
    always = NEAR + (rows.position - prompt.tokens + 1).clamp(min=NEAR)
    count = (how.budget - always) // how.page
    best = estimates.topk(min(pages, int(count.max())), -1)
    keep = (torch.arange(best.values.shape[-1], device=q.device) < count[:, None]) & (best.values > -math.inf)
    picked = torch.zeros_like(estimates, dtype=torch.bool).scatter_(-1, best.indices, keep)
    return picked.repeat_interleave(how.page, -1)


def estimate(q: torch.Tensor, statistics: tuple[torch.Tensor, ...], rule: str) -> torch.Tensor:
    """Of each page's attention, in nats up to a constant: q [KV heads, group, rows, size] and `Prompt.pages` ->
    [KV heads, group, rows, pages]."""
    first, second = (x[:, None].transpose(-1, -2) for x in statistics)
    if rule == "bounds":
        return q.clamp(min=0) @ second + q.clamp(max=0) @ first
    return q @ first if rule == "mean" else q @ first + q.square() @ second / 2
