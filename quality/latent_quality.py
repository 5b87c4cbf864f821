"""Cost of packed latents in a trained model with latent attention (MLA): KL divergence, perplexity and recall.

    python quality/latent_quality.py MODEL --text FILE ... [--calibration FILE] [--out CSV --commit COMMIT]

MODEL runs in transformers, in fp32. A row's coding replaces latents and RoPE channels of every token before any token
attends to them, its own included: what decodes of an engine read. With `-windowN` behind a dtype, a token reads the
last N at 8 bits, its own included, as from the recent window. KL is from the model with plain latents, in nats a
token. Recall: digits of planted numbers that the model gives back. Besides our dtypes: `fp8` is e4m3 of latents and
RoPE with a scale of 1 (vLLM's --kv-cache-dtype fp8), `nvfp4` e2m1 in groups of 16 with e4m3 scales under one fp32
scale a layer. Without --calibration the dtypes are as without a file. A coding DTYPE-rope8 has RoPE channels at 8 bits
as pages have them, -rope8e4m3 in e4m3 under an fp32 scale a token, -rope4 through tq4's code. --out adds rows to a CSV
file.
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from packed_kv import FORMATS, get_codec
from packed_kv.calibration_file import load
from packed_kv.channel_calibration import UNCALIBRATED, ChannelCalibration, LayerCalibration
from packed_kv.codecs import ring
from packed_kv.codecs.latent import LatentCodec
from packed_kv.formats import Format
from packed_kv.private_file import open_regular
from packed_kv_quality.recall import recall_prompts
from packed_kv_quality.teacher_forced import token_kl
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

COLUMNS = ("coding", "calibrated", "bytes", "kl", "kl_error", "perplexity", "recall")
BASELINES = ("fp8", "nvfp4")
"""Codings whose KL serves as reference for later codings."""
Coding = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Latents [..., rank] and RoPE channels -> latents for K, for V, and RoPE channels, all fp32."""


@dataclass(frozen=True)
class Windowed:
    """Codes the last `window` tokens, a query's own included, by `near`, and earlier tokens by `far`."""

    far: Coding
    near: Coding
    window: int


Codings = Sequence[Coding | Windowed | None]
"""The coding of each layer; None: plain."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NVFP4_GROUP = 16
BOTH_ROPES = [name + rope for name in FORMATS for rope in ("", "-rope8")]


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def fp8(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    coded = e4m3(latent)
    return coded, coded, e4m3(rope)


def nvfp4(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = latent.unflatten(-1, (-1, NVFP4_GROUP))
    whole = groups.abs().max() / (6 * 448)
    scale = e4m3(groups.abs().amax(-1, keepdim=True) / 6 / whole) * whole
    levels = E2M1.to(latent.device)
    near = (groups.abs() / scale.clamp_min(1e-30)).unsqueeze(-1)
    coded = (levels[(near - levels).abs().argmin(-1)] * groups.sign() * scale).flatten(-2)
    return coded, coded, rope.half().float()


ROPE_BYTES = {
    "16": lambda n: 2 * n,
    "8": lambda n: n + n // 32,
    "8e4m3": lambda n: n + 4,
    "4": lambda n: n // 2 + n // 32,
}
"""Coding of RoPE channels -> bytes of n of them."""


def rope_of(coding: str, codec: LatentCodec) -> Callable[[torch.Tensor], torch.Tensor]:
    """RoPE channels as the codec's pages have them; in e4m3 with an fp32 scale a token; or through tq4's code."""
    if coding == "8e4m3":

        def floats(rope: torch.Tensor) -> torch.Tensor:
            scale = rope.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
            return e4m3(rope / scale) * scale

        return floats
    if coding == "4":
        tq4 = get_codec("tq4", codec.rope_dim, device=codec.device)
        return lambda rope: tq4.decode(tq4.encode(rope))
    return lambda rope: codec.dequantize_rope(*codec.quantize_rope(rope))


def channels_of(fmt: Format, layer: LayerCalibration | None) -> ChannelCalibration:
    """Channels of a layer's latents for a format; None: there is no file."""
    if layer is None:
        return UNCALIBRATED
    return replace(layer.key.taken_by(fmt, "key").map_rows(lambda rows: rows[0]), first_mean=None, rope=None)


def packed(
    name: str, rank: int, rope_dim: int, layer: LayerCalibration | None, rope: str, device: str, window: int = 0
) -> Coding | Windowed:
    """A dtype, by the codec of its pages, with RoPE channels as `ROPE_BYTES` names them; with a window, also by the
    ring's codec."""
    fmt = FORMATS[name]
    codec = LatentCodec(fmt, rank, rope_dim, device, channels_of(fmt, layer), 8 if rope == "8" else 16)
    of_rope = rope_of(rope, codec)

    def coded(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored = codec.latent.dequantize(*codec.latent.quantize(latent))
        return codec.restore(stored), codec.restore(stored * codec.value_gain()), of_rope(rope)

    def recent(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = ring.round_trip(torch.cat((codec.latent.prepare(latent), rope.half().float()), dim=-1))
        stored, rope = whole.split([rank, rope_dim], dim=-1)
        return codec.restore(stored), codec.restore(stored), rope

    return Windowed(coded, recent, window) if window else coded


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: object, scaling: float, **_: object
) -> tuple[torch.Tensor, None]:
    """Causal attention of transformers; where there are twice as many keys as queries, the first half serves tokens
    before the module's `window`, the second half tokens within it."""
    position = torch.arange(query.shape[2], device=query.device)
    distance = position[:, None] - position
    hidden = distance < 0
    if key.shape[2] > query.shape[2]:
        hidden = torch.cat((distance < module.window, hidden | (distance >= module.window)), dim=1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill_(hidden, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("windowed", attend)
ALL_MASK_ATTENTION_FUNCTIONS.register("windowed", lambda *_args, **_options: None)


class Model:
    """A model of transformers whose latents can be coded."""

    def __init__(self, name: str, device: str) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "windowed"}
        self.model = AutoModelForCausalLM.from_pretrained(name, **options).eval().to(device)
        self.layers = [layer.self_attn for layer in self.model.model.layers]
        self.expand = [layer.expand_kv for layer in self.layers]

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor, codings: Codings) -> torch.Tensor:
        """Return logits [n, tokens, vocabulary] of rows [n, tokens], each a text, with each layer's coding or none."""
        for layer, expand, coding in zip(self.layers, self.expand, codings, strict=True):
            layer.expand_kv = expand if coding is None else functools.partial(expand_coded, expand, coding)
            layer.window = coding.window if isinstance(coding, Windowed) else 0
        return torch.cat([self.model(input_ids=row[None], use_cache=False).logits for row in rows])


def expand_coded(
    expand: Callable, coding: Coding | Windowed, latent: torch.Tensor, rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V; of a window, all by `far` and, behind them, all by `near`."""
    if isinstance(coding, Windowed):
        far, near = (expand_coded(expand, part, latent, rope) for part in (coding.far, coding.near))
        return torch.cat((far[0], near[0]), dim=2), torch.cat((far[1], near[1]), dim=2)
    for_key, for_value, rope = coding(latent.float(), rope.float())
    return expand(for_key, rope)[0], expand(for_value, rope)[1]


def text_rows(tokenizer: Any, paths: Sequence[Path], tokens: int, context: int) -> torch.Tensor:
    """Pieces of texts, as many of each: int64 [tokens / context, context]."""
    texts = [tokenizer.encode(path.read_text(), add_special_tokens=False) for path in paths]
    each = tokens // context // len(texts)
    return torch.tensor([ids[i * context :][:context] for ids in texts for i in range(each)])


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Add a row to a CSV file, which gets the row's columns if it is new."""
    is_new = not path.exists()
    with open(path, "a", newline="", opener=open_regular) as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--text", nargs="+", type=Path, required=True, metavar="FILE")
    add("--calibration", metavar="FILE")
    add("--tokens", type=int, default=16384, help="of all texts together (default: %(default)s)")
    add("--context", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    add("--prompts", type=int, default=24, help="planted numbers (default: %(default)s)")
    add("--codings", nargs="+", default=["fp8", "nvfp4", "tq4-rope8e4m3", "tq4-rope4", *BOTH_ROPES])
    add("--out", type=Path, metavar="CSV", help="append a row of each coding")
    add("--commit", default="", help="for the rows")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = AutoTokenizer.from_pretrained(options.model), Model(options.model, device)
    config, layers = model.model.config, len(model.layers)
    sizes = config.kv_lora_rank, config.qk_rope_head_dim
    rows = text_rows(tokenizer, options.text, options.tokens, options.context).to(device)
    planted = recall_prompts(tokenizer, options.prompts, min(1800, options.context * 7 // 8)) if options.prompts else []
    asked = torch.tensor([[*prompt.token_ids, *prompt.answer_ids] for prompt in planted]).to(device)
    answer = torch.tensor([prompt.answer_ids for prompt in planted]).to(device)
    known = load(options.calibration).layers if options.calibration else {}
    truth = model.logits(rows, [None] * layers).log_softmax(-1)

    made_with = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "", "torch": torch.__version__,
                 "transformers": transformers.__version__, "commit": options.commit}  # fmt: skip

    def judge(name: str, token_bytes: float, codings: Codings) -> None:
        logits = model.logits(rows, codings).log_softmax(-1)
        kl = token_kl(truth.flatten(0, 1), logits.flatten(0, 1))
        loss = -logits[:, :-1].gather(-1, rows[:, 1:, None]).mean()
        recall = ""
        if planted:
            said = model.logits(asked, codings)[:, -answer.shape[1] - 1 : -1].argmax(-1)
            recall = f"{(said == answer).float().mean():.2f}"
        row = {
            "coding": name, "calibrated": "yes" if known else "no", "bytes": f"{token_bytes:g}",
            "kl": f"{kl.mean():.6f}", "kl_error": f"{kl.std() / len(kl) ** 0.5:.6f}",
            "perplexity": f"{loss.exp():.2f}", "recall": recall, "tokens": rows.numel(), **made_with,
        }  # fmt: skip
        judged[name] = float(kl.mean())
        ratios = [f"{judged[name] / judged[base]:.2f}" if base in judged else "" for base in BASELINES]
        print(f"| {' | '.join([*(str(row[column]) for column in COLUMNS), *ratios])} |", flush=True)
        if options.out:
            append_row(options.out, row)

    print(f"{layers} layers, rank {sizes[0]}, {rows.numel():,} tokens, calibration {options.calibration or 'none'}")
    judged: dict[str, float] = {}
    head = [*COLUMNS, *(f"of {name}" for name in BASELINES)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    judge("plain", 2 * sum(sizes), [None] * layers)
    for name in options.codings:
        found = re.fullmatch(r"(\w+?)(?:-window(\d+))?(?:-rope(\w+))?", name)
        dtype, window, rope = found.groups() if found else (name, None, None)
        if name in ("fp8", "nvfp4"):
            coding = {"fp8": fp8, "nvfp4": nvfp4}[name]
            token_bytes = sum(sizes) if name == "fp8" else sizes[0] * 9 / 16 + 2 * sizes[1]
            judge(name, token_bytes, [coding] * layers)
            continue
        rope = rope or "16"
        taken = FORMATS[dtype].vector_bytes(sizes[0]) + ROPE_BYTES[rope](sizes[1])
        of_layers = (packed(dtype, *sizes, known.get(i), rope, device, int(window or 0)) for i in range(layers))
        judge(name, taken, list(of_layers))


if __name__ == "__main__":
    main()
