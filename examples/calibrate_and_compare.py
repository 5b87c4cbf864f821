"""Calibrate a model, and compare each dtype with and without the calibration on a text.

    python examples/calibrate_and_compare.py [MODEL] [--text FILE] [--dtypes isoquant4 tq4 turboquant35]

The text's first half is read at once, the second token by token over the packed cache; KL divergence is of the model's
predictions from those over an exact cache, in nats a token. Needs no vLLM. `packed-kv-quality run` measures the same
in vLLM, on more text, with error bars. Without a model, the checkout's demo model runs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from packed_kv import FORMATS
from packed_kv.transformers import CACHE_ARGUMENT, PackedCache
from tq_calibrate.cli import main as tq_calibrate
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel

CHECKOUT = Path(__file__).parents[1]


def predictions(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Log-probabilities fp32 [half of the tokens, vocabulary] of a text int64 [1, tokens]."""
    half = ids.shape[1] // 2
    steps = [ids[:, :half], *ids[:, half:].split(1, dim=1)]
    with torch.inference_mode():
        logits = [model(step, **{CACHE_ARGUMENT: cache}).logits[0, -1] for step in steps]
    return torch.stack(logits[1:]).float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(CHECKOUT / "models" / "demo-7m"))
    parser.add_argument("--text", type=Path, default=CHECKOUT / "README.md")
    parser.add_argument("--tokens", type=int, default=192, help="of the text (default: %(default)s)")
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", choices=FORMATS, default=["isoquant4", "tq4", "turboquant35"])
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "turboquant_kv.json"  # in the model's folder, vLLM would find it by itself
        code = tq_calibrate(["model", options.model, "--tokens", str(options.calibration_tokens), "--out", str(file)])
        if code:
            raise SystemExit(code)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(options.model)(options.text.read_text(encoding="utf-8"))["input_ids"]
        text = torch.tensor([ids[: options.tokens]])
        exact = predictions(model, text, DynamicCache())
        print(f"{'dtype':>14}  {'KL, as it is':>12}  {'calibrated':>12}")
        for dtype in options.dtypes:
            found = [predictions(model, text, PackedCache(dtype, calibration=path)) for path in (None, file)]
            kl = [(exact.exp() * (exact - ours)).sum(-1).mean().item() for ours in found]
            print(f"{dtype:>14}  {kl[0]:12.4f}  {kl[1]:12.4f}")


if __name__ == "__main__":
    main()
