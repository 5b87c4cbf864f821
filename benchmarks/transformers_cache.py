"""Cost of `packed_kv.transformers.PackedCache` on a model: KL divergence, agreement, memory and time by dtype.

    python benchmarks/transformers_cache.py MODEL --text FILE... --dtypes tq4 --calibration turboquant_kv.json

Windows of the texts are decoded token by token, all at once, over transformers' own cache and over a packed one beside
it: `packed-kv-quality teacher-forced --chunk 1` through transformers instead of vLLM, with its windows, its scored
positions and its error bar. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from packed_kv.layout import RECENT_TOKENS
from packed_kv.transformers import CACHE_ARGUMENT, PackedCache
from packed_kv_quality.teacher_forced import text_windows, token_kl
from packed_kv_quality.uncertainty import block_means, standard_error
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Found:
    """KL in nats; `cache_bytes`, at the end, and `step_ms`, medians: of the packed cache and of transformers' own."""

    kl_mean: float
    kl_error: float | None
    top1: float
    cache_bytes: tuple[int, int]
    step_ms: tuple[float, float]


def compare(model: PreTrainedModel, texts: Sequence[torch.Tensor], cache: PackedCache) -> Found:
    """Decode texts, each int64 [windows, tokens], over `cache` and over a plain one."""
    ids = torch.cat([*texts])
    plain = DynamicCache()
    kl, same = [], []
    times: tuple[list[float], list[float]] = ([], [])
    for at in range(ids.shape[1] - 1):
        packed, exact = (
            step(model, ids[:, at : at + 1], held, spent) for held, spent in zip((cache, plain), times, strict=True)
        )
        if at:  # the first token has no others to read
            kl.append(token_kl(exact, packed))
            same.append((exact.argmax(-1) == packed.argmax(-1)).float())
    blocks = [block_means([*windows]) for windows in torch.stack(kl, 1).split([len(text) for text in texts])]
    plain_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    return Found(
        torch.stack(kl).mean().item(),
        standard_error(blocks),
        torch.stack(same).mean().item(),
        (cache.nbytes, plain_bytes),
        (1e3 * statistics.median(times[0]), 1e3 * statistics.median(times[1])),
    )


def step(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, spent: list[float]) -> torch.Tensor:
    """Log-probabilities fp32 [windows, vocabulary] after one more token of each; its seconds are added to `spent`."""
    start = time.perf_counter()
    with torch.inference_mode():
        logits = model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True).logits[:, -1]
    spent.append(time.perf_counter() - start)
    return logits.float().log_softmax(-1)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--context", type=int, default=768, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=1, help="of each text (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["tq4"])
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--recent-tokens", type=int, default=RECENT_TOKENS)
    parser.add_argument("--dtype", default="float32", help="of the model (default: %(default)s)")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    texts = [
        torch.tensor(text_windows(tokenizer, path.read_text(encoding="utf-8"), options.context, options.windows))
        for path in options.text
    ]
    rows = {}
    for dtype in options.dtypes:
        cache = PackedCache(dtype, recent_tokens=options.recent_tokens, calibration=options.calibration)
        rows[dtype] = asdict(compare(model, texts, cache))
    used = {name: version(name) for name in ("packed-kv", "torch", "transformers")}
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(json.dumps({"made_with": used, "machine": machine, "tokens": sum(map(torch.numel, texts)), "rows": rows}))


if __name__ == "__main__":
    main()
