#!/usr/bin/env python3
"""What the recent window is worth behind a prompt whose pages come from elsewhere: figures of docs/attention.md.

    python experiments/behind_transfer.py --model MODEL --text FILE [--dtypes tq4 turboquant25] [--texts 4]

KL divergence from an engine without quantization, by the distance behind the prompt; a decode of one token a step. The
prompt's pages come from the OffloadingConnector's host memory on a CPU (`tests/support/cpu_offload.py`): what arrives
over NIXL leaves the window as empty. Beside it the same without a transfer, where the window is full from the prompt
on, and pages alone. Prints the rows of a table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from packed_kv_quality.engines import prepare_environment

REPO = Path(__file__).resolve().parents[1]
sys.path.append(str(REPO / "tests" / "support"))
prepare_environment(small_model=True)

import torch  # noqa: E402
from cpu_offload import connector, count_copies  # type: ignore[import-not-found]  # noqa: E402
from harness import engine, mean_kl, newest_logits  # type: ignore[import-not-found]  # noqa: E402
from packed_kv_quality import lockstep  # noqa: E402
from packed_kv_quality.teacher_forced import logits, text_windows  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

PROMPT, ANSWER = 512, 192
PARTS = {"1 to 8": slice(0, 8), "1 to 64": slice(0, 64), "65 to 192": slice(64, 192)}
"""Tokens behind the prompt."""


def computed(llm: LLM, text: list[int]) -> torch.Tensor:
    """Logits of the tokens behind a prompt that the engine computes itself."""
    return logits(llm, lockstep.run(llm, [text], [PROMPT, *[1] * ANSWER])[0][PROMPT:])


def transferred(llm: LLM, text: list[int]) -> torch.Tensor:
    """The same, where its pages come from host memory."""
    llm.generate({"prompt_token_ids": text[: PROMPT + 1]}, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.reset_prefix_cache()
    with count_copies() as copied:
        rows = newest_logits(llm, text, chunk=1)
    assert copied["load"] and len(rows) == ANSWER
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(REPO / "models" / "demo-7m"))
    add("--text", type=Path, required=True)
    add("--dtypes", nargs="+", default=["tq4", "turboquant25"])
    add("--texts", type=int, default=4, help="pieces of the text (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "block_size": 128}
    with engine(options.model, "auto", **common) as llm:
        texts = text_windows(llm.get_tokenizer(), options.text.read_text(), PROMPT + ANSWER, options.texts)
        truth = torch.stack([computed(llm, text) for text in texts])
    for dtype in options.dtypes:
        found = {}
        for window in (0, None):
            with engine(options.model, dtype, recent_tokens=window, **common) as llm:
                found["pages alone" if window == 0 else "computed"] = [computed(llm, text) for text in texts]
        transfer = connector(host_bytes=256 << 20)
        with engine(options.model, dtype, recent_tokens=None, kv_transfer_config=transfer, **common) as llm:
            found["transferred"] = [transferred(llm, text) for text in texts]
        for name, part in PARTS.items():
            rows = {key: mean_kl(truth[:, part].flatten(0, 1), torch.stack(of)[:, part].flatten(0, 1))
                    for key, of in found.items()}  # fmt: skip
            print(f"| {dtype} | {name} |", " | ".join(f"{rows[key]:.4f}" for key in found), "|", flush=True)


if __name__ == "__main__":
    main()
