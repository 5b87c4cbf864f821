"""Cost of packed latents in a trained model with sparse attention (DeepSeek V3.2): KL divergence and changed picks.

    python quality/sparse_quality.py MODEL --text FILE ... [--calibration FILE] [--out CSV --commit COMMIT]

MODEL (`scripts/train_sparse_demo.py` trains one) runs in transformers' class, in fp32, teacher-forced over rows of
text. Each token decodes as an engine's would: it picks `index_topk` tokens by the scores of the layer's indexer, and
reads their rows as stored and then gathered to bf16, its own row included. Prompts of an engine read the chunk's own
tokens as they are; that is not here. Index keys are not packed: picks move because hidden states moved. With
`--index-keys fp8`, vLLM's, index queries and keys are e4m3 with a power of two per vector in every run, else fp32.

KL is from the same model with rows in bf16 (`auto`, run again as a control), in nats a token, over tokens behind the
first `index_topk`, as all figures are; its error is that of the mean over rows of text. `kl_same_picks` is KL where
tokens read the picks of `auto`. `picks_differ` is the share of picks that `auto` has not, in layers behind the first,
whose picks no cache moves; `picks_by_layer` has all, in percent. `mass` is the share of attention over all tokens that
is in the picks. Besides our dtypes: `fp8_ds_mla`, e4m3 with a scale per 128 channels and RoPE in bf16; `rounded`, rows
in bf16 and attention's outputs rounded to bf16, as another kernel may; `dense`, where tokens read all rows, in bf16. A
coding DTYPE-rope8 has RoPE at 8 bits.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from latent_quality import BOTH_ROPES, Coding, append_row, channels_of, e4m3, expand_coded, text_rows
from packed_kv import FORMATS
from packed_kv.calibration_file import load
from packed_kv.channel_calibration import LayerCalibration
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv_quality.teacher_forced import token_kl
from sparse_model import ATTENTION, best_picks, causal, exact, index_scores, install
from transformers import AutoTokenizer, DeepseekV32ForCausalLM

COLUMNS = ("coding", "index_keys", "bytes", "kl", "kl_error", "kl_same_picks", "top1", "perplexity", "picks_differ",
           "picks_by_layer", "mass")  # fmt: skip
FP8_TILE, E4M3_LARGEST = 128, 448
BASELINE, NOISE, DENSE, FP8 = "auto", "rounded", "dense", "fp8_ds_mla"
CODINGS = (BASELINE, NOISE, DENSE, FP8, *(name for name in BOTH_ROPES if not name.startswith(("iso", "planar"))))
INDEX_KEYS = ("fp8", "fp32")


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def plain(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    latent = bf16(latent)
    return latent, latent, bf16(rope)


def fp8_ds_mla(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of vLLM's `fp8_ds_mla`, 656 bytes with 512 + 64 channels."""
    tiles = bf16(latent).unflatten(-1, (-1, FP8_TILE))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_LARGEST
    coded = bf16((e4m3(tiles / scale) * scale).flatten(-2))
    return coded, coded, bf16(rope)


def row_coding(codec: LatentRowCodec) -> Coding:
    """Latent rows: their bytes, read and rounded to bf16 as gathered rows are. V's gain is `W_UV`'s, not a row's."""

    def coded(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = bf16(latent).flatten(0, -2), bf16(rope).flatten(0, -2)
        stored, read_rope = (bf16(x) for x in codec.decode(codec.encode(*flat)))
        parts = codec.restore(stored), codec.restore(stored * codec.value_gain())
        for_key, for_value = (part.view(latent.shape) for part in parts)
        return for_key, for_value, read_rope.view(rope.shape)

    return coded


def index_keys_as_fp8(x: torch.Tensor) -> torch.Tensor:
    """Index queries or keys, as vLLM has them: e4m3, with a power of two per vector."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_LARGEST)))
    return e4m3(x / scale) * scale


@dataclass
class Reading:
    """A pass of the model: how it reads rows, and its results.

    given: picks of each layer, bool [1, tokens, tokens], instead of the indexers' picks; None: the indexers pick.
    dense: all rows are read. rounded: attention's outputs are rounded to bf16. `picks`: what indexers picked, layer by
    layer; `mass`: share of a dense softmax that is in these picks, behind the first `top_k` tokens.
    """

    top_k: int
    given: Sequence[torch.Tensor] | None = None
    dense: bool = False
    rounded: bool = False

    def __post_init__(self) -> None:
        self.picks: list[torch.Tensor] = []
        self.mass: list[float] = []

    def __call__(
        self, _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        picks = best_picks(scores, self.top_k) if self.given is None else self.given[len(self.picks)]
        self.picks.append(picks)
        logits = (query @ key.transpose(2, 3) * scale).masked_fill_(~causal(query.shape[2], query.device), -torch.inf)
        weights = logits.softmax(-1)
        self.mass.append((weights * picks[:, None])[:, :, self.top_k :].sum(-1).mean().item())
        if not self.dense:
            weights = logits.masked_fill_(~picks[:, None], -torch.inf).softmax(-1)
        output = weights @ value
        return bf16(output) if self.rounded else output


class Model:
    """A model of transformers whose layers read coded rows of the tokens that their indexers pick."""

    def __init__(self, name: str, device: str) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": ATTENTION}
        self.model: Any = DeepseekV32ForCausalLM.from_pretrained(name, **options).eval().to(device)
        self.layers = [layer.self_attn for layer in self.model.model.layers]
        self.expand = [layer.expand_kv for layer in self.layers]
        self.top_k = self.model.config.index_topk

    @torch.inference_mode()
    def log_probs(
        self, row: torch.Tensor, codings: Sequence[Coding], reading: Reading, index_keys: str
    ) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] of a row int64 [tokens], with each layer's coding."""
        rounding = index_keys_as_fp8 if index_keys == "fp8" else exact
        install(self.model, reading, functools.partial(index_scores, rounding=rounding))
        for layer, expand, coding in zip(self.layers, self.expand, codings, strict=True):
            layer.expand_kv = functools.partial(expand_coded, expand, coding)
        return self.model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)


def differing(picks: Sequence[torch.Tensor], true: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """Share of each layer's picks that are not among the true ones, behind the first `top_k` tokens, [layers]."""
    found = [(own & ~other)[:, top_k:].sum() / (top_k * own[:, top_k:].shape[1])
             for own, other in zip(picks, true, strict=True)]  # fmt: skip
    return torch.stack(found).cpu()


@dataclass
class Tally:
    """Figures of a coding, a value per row of text; token-wise figures are means over the tokens that count."""

    kl: list[float]
    same: list[float]
    top1: list[float]
    loss: list[float]
    differ: list[torch.Tensor]
    mass: list[float]

    def shown(self) -> dict[str, str]:
        kl = torch.tensor(self.kl, dtype=torch.float64)
        by_layer = torch.stack(self.differ).mean(0)
        return {
            "kl": f"{kl.mean():.6f}", "kl_error": f"{kl.std() / len(kl) ** 0.5:.6f}" if len(kl) > 1 else "",
            "kl_same_picks": f"{mean(self.same):.6f}", "top1": f"{mean(self.top1):.5f}",
            "perplexity": f"{torch.tensor(mean(self.loss)).exp():.3f}", "picks_differ": f"{by_layer[1:].mean():.5f}",
            "picks_by_layer": " ".join(f"{100 * share:.2f}" for share in by_layer.tolist()),
            "mass": f"{mean(self.mass):.4f}",
        }  # fmt: skip


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure(
    model: Model, rows: torch.Tensor, codings: dict[str, Sequence[Coding]], index_keys: str
) -> Iterator[tuple[str, Tally]]:
    """Each coding by its name in `--codings`, and its figures on rows int64 [rows, tokens]."""
    layers, top_k = len(model.layers), model.top_k
    tallies = {name: Tally([], [], [], [], [], []) for name in codings}
    for row in rows:
        truth = Reading(top_k)
        true = model.log_probs(row, [plain] * layers, truth, index_keys)[top_k:]
        for name, of_layers in codings.items():
            reading = Reading(top_k, dense=name == DENSE, rounded=name == NOISE)
            found = model.log_probs(row, of_layers, reading, index_keys)[top_k:]
            same = Reading(top_k, truth.picks, name == DENSE, name == NOISE)
            at_same = model.log_probs(row, of_layers, same, index_keys)[top_k:]
            tally = tallies[name]
            tally.kl.append(token_kl(true, found).mean().item())
            tally.same.append(token_kl(true, at_same).mean().item())
            tally.top1.append((true.argmax(-1) == found.argmax(-1)).float().mean().item())
            tally.loss.append(-found[:-1].gather(-1, row[top_k + 1 :, None]).mean().item())
            tally.differ.append(differing(reading.picks, truth.picks, top_k))
            tally.mass.append(mean(reading.mass))
    yield from tallies.items()


def coding_of(
    name: str, config: Any, known: dict[int, LayerCalibration], device: str
) -> tuple[float, Sequence[Coding]]:
    """Bytes of a token and layer, and the coding of each layer."""
    layers, rank, rope_dim = config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim
    if name in (BASELINE, NOISE, DENSE):
        return 2 * (rank + rope_dim), [plain] * layers
    if name == FP8:
        return rank + 4 * rank // FP8_TILE + 2 * rope_dim, [fp8_ds_mla] * layers
    dtype, _, rope = name.partition("-rope")
    codecs = [
        LatentRowCodec(
            FORMATS[dtype], rank, rope_dim, device, channels_of(FORMATS[dtype], known.get(i)), int(rope or 16)
        )
        for i in range(layers)
    ]
    return codecs[0].slot_bytes, [row_coding(codec) for codec in codecs]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--text", nargs="+", type=Path, required=True, metavar="FILE")
    add("--calibration", metavar="FILE")
    add("--tokens", type=int, default=131072, help="of all texts together (default: %(default)s)")
    add("--context", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    add("--codings", nargs="+", default=CODINGS, help="default: %(default)s")
    add("--index-keys", nargs="+", default=INDEX_KEYS, choices=INDEX_KEYS, help="default: %(default)s")
    add("--out", type=Path, metavar="CSV", help="append a row of each coding")
    add("--commit", default="", help="for the rows")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(options.model, device)
    config = model.model.config
    if options.context <= model.top_k:
        parser.error(f"--context {options.context}: every token reads all up to {model.top_k}; take more")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = text_rows(tokenizer, options.text, options.tokens, options.context).to(device)
    known = load(options.calibration).layers if options.calibration else {}
    codings = {name: coding_of(name, config, known, device) for name in options.codings}
    made_with = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "", "torch": torch.__version__,
                 "transformers": transformers.__version__, "commit": options.commit}  # fmt: skip
    print(
        f"{len(model.layers)} layers, {config.index_n_heads} index heads, {model.top_k} picks, {len(rows)} rows of "
        f"{options.context:,} tokens, calibration {options.calibration or 'none'}"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for index_keys in options.index_keys:
        by_layer = {name: coding for name, (_, coding) in codings.items()}
        for name, tally in measure(model, rows, by_layer, index_keys):
            row = {
                "coding": name, "index_keys": index_keys, "calibrated": "yes" if known else "no",
                "bytes": f"{codings[name][0]:g}", **tally.shown(), "rows": len(rows), "context": options.context,
                "topk": model.top_k, **made_with,
            }  # fmt: skip
            print(f"| {' | '.join(str(row[column]) for column in COLUMNS)} |", flush=True)
            if options.out:
                append_row(options.out, row)


if __name__ == "__main__":
    main()
