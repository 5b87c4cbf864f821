"""The benchmarks run on a CPU with the demo model's shape: what they write, not how fast anything is."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import latent_hybrids
import pytest
import sparse_models
import tiny_models
import torch
from checkout import DEMO_MODEL, REPO
from packed_kv import FORMATS

BENCHMARKS = REPO / "benchmarks"
DTYPE, BUDGET, INPUT, OUTPUT = "isoquant4", 24 << 20, 250, 6
DECODE = f"""
    --model {DEMO_MODEL} --dtypes {DTYPE} isoquant5 --shapes 1x256 2x128 900x256 --steps 3 --prefill 64 --prompts 2
    --budget {BUDGET} --input {INPUT} --output {OUTPUT} --max-requests 3 --kv-cache-memory {48 << 20} --commit abc1234
    --kernels
"""


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def run(script: str, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the output of one run of decode.py: the rows of a dtype, and none of one that vLLM does not know."""
    target = tmp_path_factory.mktemp("rows")
    output = run("decode.py", *DECODE.split(), "--out", str(target), code=1)
    assert "Invalid kv_cache_dtype: 'isoquant5'" in output and output.endswith("failed: isoquant5\n")
    return target


def test_decode_rows(folder: Path) -> None:
    from rows import read

    rows = read(folder / "decode.csv")
    assert [(row["dtype"], row["requests"], row["context"]) for row in rows] == [
        (DTYPE, "1", "256"),
        (DTYPE, "2", "128"),
        (DTYPE, "900", "256"),
    ]
    *rows, row = rows
    assert {row[name] for name in ("p20_ms", "p50_ms", "p80_ms", "kernels_ms")} == {""}, "it does not fit"
    for row in rows:
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert row["attention"] == f"PACKED_KV_{DTYPE.upper()}" and row["commit"] == "abc1234"
        assert row["kernels_ms"] == "0.000"  # no GPU


def test_time_that_overlapping_kernels_cover() -> None:
    from step_kernels import covered

    assert covered([]) == 0
    assert covered([(7, 9), (0, 2), (1, 4), (2, 3), (4, 5)]) == 7


def test_mixed_rows(tmp_path: Path) -> None:
    """A prompt in each step, or chunks of prompts, or one behind cached tokens; what does not fit the cache beside the
    decodes is not measured."""
    from rows import read

    arguments = f"--model {DEMO_MODEL} --dtypes {DTYPE}:FULL --shapes 2x128 --prompts 16 150 1500 --step-tokens 64"
    arguments += f" --prefixes 0 256 --steps 2 --first 1 --no-compile --kv-cache-memory {5 << 20} --together"
    output = run("mixed.py", *arguments.split(), "--commit", "abc1234", "--out", str(tmp_path))
    assert f"{DTYPE}:FULL: 2x128 and prompts of 1500 behind 0 do not fit the KV cache" in output
    rows = read(tmp_path / "mixed.csv")
    assert [(row["prompt"], row["prefix"], row["graph"]) for row in rows] == [
        ("16", "0", "NONE 18"),
        ("150", "0", "NONE 64"),
        ("16", "256", "NONE 18"),
    ]
    for row in rows:
        assert (row["dtype"], row["mode"], row["steps"], row["round"]) == (DTYPE, "FULL", "2", "1")
        assert 0 < float(row["launch_ms"]) < float(row["p80_ms"]) and float(row["first_ms"]) > 0
        assert {row[name] for name in ("kernel_ms", "kernels", "span_ms", "gap_ms")} == {""}  # no GPU


def test_prompts_hit_their_prefix_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache has all tokens before each prompt, once computed; a prompt of known tokens is refused."""
    import bench_engine
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = bench_engine.start(str(DEMO_MODEL), DTYPE, 1024, 4, 24 << 20, chunk=512, enable_prefix_caching=True)
    try:
        engine = bench_engine.Engine(llm)
        engine.fill_pages()
        blocks = 2 * engine.block_size
        found = engine.mixed_steps(2, 130, blocks + 8, 3, prefix=blocks)
        assert [sorted(step.tokens) for step in found.seen] == [[1, 1, blocks + 8]] * 3
        assert len(found.seconds) == len(found.launches) == 3 and found.kernels is None
        with pytest.raises(ValueError, match=f"behind {blocks + 1} beside 2 decodes: a prefix of whole blocks"):
            engine.mixed_steps(2, 130, 8, 1, prefix=blocks + 1)
        monkeypatch.setattr(engine, "_random", lambda tokens: [5] * tokens)
        with pytest.raises(
            RuntimeError, match=rf"most steps had \(1, 1, 8\) tokens of a request, not \(1, 1, {blocks + 8}"
        ):
            engine.mixed_steps(2, 130, blocks + 8, 3, prefix=blocks)
        assert not llm.llm_engine.has_unfinished_requests()
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def test_prefill_rows(folder: Path) -> None:
    from rows import read

    (row,) = read(folder / "prefill.csv")
    assert row["tokens"] == "64" and row["prompts"] == "2"
    assert float(row["tokens_s"]) == pytest.approx(64 / (float(row["p50_ms"]) * 1e-3), rel=0.02)


def test_throughput_rows(folder: Path) -> None:
    """The budget holds less than 2 blocks of 128 tokens a request take, in 6 layers of 2 KV heads: requests have rings,
    as the planner counts them."""
    from rows import read

    (row,) = read(folder / "throughput.csv")
    pages = BUDGET // (6 * 2 * 128 * FORMATS[DTYPE].slot_bytes(128)) // 2
    assert pages / 2 <= int(row["fit"]) < pages
    assert int(row["requests"]) == 3 and float(row["prefill_seconds"]) < float(row["seconds"])
    assert 0 < int(row["p50_ttft_ms"]) <= int(row["p99_ttft_ms"])
    assert int(row["p99_ttft_ms"]) == pytest.approx(1e3 * float(row["prefill_seconds"]), abs=6)
    assert float(row["output_tokens_s"]) == pytest.approx(3 * OUTPUT / float(row["seconds"]), rel=0.1, abs=1)


def test_tables_show_ratios_of_the_last_rows(tmp_path: Path) -> None:
    from rows import append

    rates = ("auto", 64, 10), ("auto", 64, 50), ("auto", 128, 40), (DTYPE, 64, 75), ("auto", 256, ""), (DTYPE, 256, 30)
    for dtype, tokens, rate in rates:
        append(tmp_path / "prefill.csv", {"dtype": dtype, "tokens": tokens, "tokens_s": rate})
    assert run("measured.py", "--of", str(tmp_path)).splitlines() == [
        "| tokens/s, tokens: | 64 | 128 | 256 |",
        "| --- | ---: | ---: | ---: |",
        "| bf16 | 50 | 40 | does not fit |",
        f"| {DTYPE} | 75 (1.50) | not run | 30 |",
    ]


def test_a_table_of_figures_shows_the_last_row_of_a_case(tmp_path: Path) -> None:
    from rows import append

    for dtype, rate in (("auto", 100), (DTYPE, 120), (DTYPE, 150)):
        row = {"dtype": dtype, "concurrency": 8, "output_tokens_s": rate, "p50_ttft_ms": 20, "p50_tpot_ms": 7}
        append(tmp_path / "serve.csv", row)
    lines = run("measured.py", "--of", str(tmp_path)).splitlines()
    assert lines[-2:] == ["| 8 | bf16 | 100 | 20 | 7.0 |", f"| 8 | {DTYPE} | 150 (1.50) | 20 (1.00) | 7.0 (1.00) |"]


def least_blocks(engine: Any) -> int:
    """Blocks of a cache that holds two requests of 400 tokens."""
    before = engine.blocks
    for engine.blocks in range(before):
        if engine.fits(2, 400, 1):
            break
    found, engine.blocks = engine.blocks, before
    return found


def test_pages_beside_states_are_filled_behind_their_zeroing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM zeroes blocks that it hands out beside states: requests read what the model wrote all the same, of the first
    shape and of the next, and their states are numbers, though they lie where pages were."""
    import bench_engine
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.kv_cache_interface import MambaSpec

    model = latent_hybrids.install(monkeypatch, tmp_path / "model", "kimi")
    llm = bench_engine.start(model, "tq4", 512, 2, 16 << 20, recent_tokens=0)
    try:
        engine = bench_engine.Engine(llm)
        assert (engine.states, engine.groups, engine.scheduler.needs_kv_cache_zeroing) == (2, 1, True)
        assert engine.fits(2, 400, 1) and not engine.fits(2, 400 * engine.blocks, 1)
        least = least_blocks(engine)
        with monkeypatch.context() as patch:  # each token of a draft has a state, too
            for group in engine.scheduler.kv_cache_config.kv_cache_groups:
                if isinstance(group.kv_cache_spec, MambaSpec):
                    patch.setattr(group, "kv_cache_spec", replace(group.kv_cache_spec, num_speculative_blocks=3))
            assert least_blocks(bench_engine.Engine(llm)) == least + 2 * 2 * 3, "requests x groups of states x tokens"
        engine.fill_pages()
        worker, manager = llm.llm_engine.model_executor.driver_worker, engine.scheduler.kv_cache_manager
        layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
        states = [state for layer in layers if isinstance(layer.kv_cache, (list, tuple)) for state in layer.kv_cache]
        step, found = engine.engine.step, []

        def recorded_step():
            outputs = step()
            for request in engine.scheduler.running:
                (pages,) = engine._paged_ids(request)
                of_states = [of_group[0] for of_group in manager.get_block_ids(request.request_id) if of_group != pages]
                written = all(torch.equal(cache[pages[0]], source[0]) for cache, _, source in worker.kept_pages)
                found.append((written, all(state[of_states].isfinite().all() for state in states)))
            return outputs

        monkeypatch.setattr(engine.engine, "step", recorded_step)
        for _ in range(2):
            assert len(engine.decode_steps(2, 400, 1)) == 1
            assert found[-2:] == [(True, True)] * 2
        monkeypatch.setattr(engine, "_step", lambda: vars(engine.scheduler.waiting[0]).update(num_preemptions=1) or 0)
        with pytest.raises(RuntimeError, match="the cache is too small: 2 requests of 400 tokens preempt others"):
            engine.decode_steps(2, 400, 1)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def test_keys_of_an_indexer_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all tokens would score alike. Its keys on a CPU lie elsewhere; it marks the pages that would have them."""
    import bench_engine
    import in_worker
    from vllm.distributed import cleanup_dist_env_and_memory

    sparse_models.install(monkeypatch)
    model = tiny_models.save(tiny_models.deepseek_v32(), tmp_path)
    options = {"additional_config": {"packed_kv": {"latent_rope_bits": 8}}, "block_size": 16}
    llm = bench_engine.start(model, "tq4", 256, 2, 4 << 20, compilation={"custom_ops": ["none"]}, **options)
    try:
        engine = bench_engine.Engine(llm)
        engine.fill_pages()
        layers = in_worker.paged_layers(llm.llm_engine.model_executor.driver_worker)
        widths = [layer.kv_cache.shape[-1] for layer in layers]
        assert sorted(set(widths)) == [132, 352] and widths.count(132) == widths.count(352)
        for layer in layers:
            assert layer.kv_cache.flatten(1).any(dim=1).all()
        assert engine.block_size == 16 and len(engine.decode_steps(2, 64, 1)) == 1
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def test_pages_are_filled_and_requests_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page holds what the model wrote, and every request reads pages of its own and verifies whole drafts. It
    stands behind the other engines: drafts of n-grams load numba, beside which vLLM 0.32 starts one engine.

    On a GPU vLLM always drafts, and refuses all drafts if told to; here it drafts only where it finds an n-gram.
    """
    import bench_engine
    from vllm.distributed import cleanup_dist_env_and_memory

    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}
    limits = {"max_model_len": 256, "max_requests": 4, "kv_cache_memory": 32 << 20}
    llm = bench_engine.start(str(DEMO_MODEL), DTYPE, **limits, **drafts)
    try:
        engine = bench_engine.Engine(llm)
        runner, lengths = llm.llm_engine.model_executor.driver_worker.worker.model_runner, [3, 3, 3]
        monkeypatch.setattr(runner.drafter, "propose", lambda *_, **__: [[9] * length for length in lengths])
        caches = runner.kv_caches
        for cache in caches:
            cache.fill_(0)
        engine.fill_pages()
        for cache in caches:
            assert cache.flatten(1).any(dim=1).all()
        manager, tables, generated = engine.scheduler.kv_cache_manager, {}, {}
        step = engine.engine.step

        def recorded_step():
            tables.update({r.request_id: manager.get_block_ids(r.request_id)[0] for r in engine.scheduler.running})
            if len(engine.scheduler.running) == 3:
                generated.update({r.request_id: r.num_output_tokens for r in engine.scheduler.running})
            return step()

        monkeypatch.setattr(engine.engine, "step", recorded_step)
        assert len(engine.decode_steps(3, 130, 2)) == 2
        blocks = [block for table in tables.values() for block in table]
        assert min(generated.values()) > engine.window == 64, "rings hold other bytes than theirs"
        assert len(tables) == 3 and len(blocks) == len(set(blocks)) == 3 * 2
        lengths[1] = 2
        with pytest.raises(RuntimeError, match=r"a step had \[4, 3, 4\] tokens, not 4 of 3 requests each"):
            engine.decode_steps(3, 130, 2)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def test_rows_of_other_columns_are_refused(tmp_path: Path) -> None:
    from rows import append

    append(tmp_path / "x.csv", {"a": 1, "b": 2})
    append(tmp_path / "x.csv", {"a": 3, "b": 4})
    assert (tmp_path / "x.csv").read_text().split() == ["a,b", "1,2", "3,4"]
    with pytest.raises(ValueError, match="has the columns"):
        append(tmp_path / "x.csv", {"a": 1, "c": 2})


def test_percentiles() -> None:
    from rows import percentiles

    assert percentiles([i * 1e-3 for i in range(11)]) == {"p20_ms": "2.000", "p50_ms": "5.000", "p80_ms": "8.000"}
    assert percentiles([0.007])["p80_ms"] == "7.000"


def test_plots(tmp_path: Path) -> None:
    from rows import append

    made_with = {"gpu": "none", "vllm": "0", "torch": "0", "triton": "0", "commit": "abc1234"}
    for dtype in ("auto", DTYPE):
        for i in (1, 2):
            times = {"p20_ms": i, "p50_ms": i + 0.1, "p80_ms": i + 0.2}
            append(tmp_path / "decode.csv", {"dtype": dtype, "requests": 32, "context": 512 * i, **times, **made_with})
            serve = {"concurrency": i, "input": 8, "output": 8, "output_tokens_s": 10 * i}
            append(tmp_path / "serve.csv", {"dtype": dtype, **serve, **made_with})
    names = ("step_time.png", "throughput.png")
    assert run("plot.py", str(tmp_path)).split() == [str(tmp_path / name) for name in names]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_load_is_what_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own parser takes the arguments; a run in which requests fail is refused."""
    import serve
    from vllm.benchmarks import serve as vllm_serve

    seen = []

    def fake(arguments: argparse.Namespace) -> dict[str, int]:
        seen.append(arguments)
        return {"completed": 12 if len(seen) == 1 else 11}

    monkeypatch.setattr(vllm_serve, "main", fake)

    def load(*more: str) -> dict[str, int]:
        return serve.load(1234, "folder", 4, serve.parse_arguments(["--input", "100", "--output", "7", *more]))

    assert load("--request-rate", "2.5") == {"completed": 12}
    with pytest.raises(RuntimeError, match="11 of 12 requests completed"):
        load()
    arguments = seen[0]
    assert (arguments.num_prompts, arguments.max_concurrency, arguments.request_rate) == (12, 4, 2.5)
    assert (arguments.random_input_len, arguments.random_output_len, arguments.burstiness) == (100, 7, 1.0)
    with pytest.raises(RuntimeError, match="11 of 12"):
        load("--concurrency", "4", "--prefixes", "4", "--prefix", "50")
    shared = seen[-1]
    assert (shared.dataset_name, shared.prefix_repetition_num_prefixes) == ("prefix_repetition", 4)
    lengths = shared.prefix_repetition_prefix_len, shared.prefix_repetition_suffix_len
    assert (*lengths, shared.prefix_repetition_output_len) == (50, 100, 7)


def test_hits_are_those_of_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's counters have earlier requests, which are left out."""
    import serve
    from rows import read
    from vllm.benchmarks import serve as vllm_serve

    counters = {"vllm:prefix_cache_hits_total": 10.0, "vllm:prefix_cache_queries_total": 1000.0}
    server = SimpleNamespace(port=1234, wait_until_healthy=lambda seconds: None, counters=lambda: dict(counters))

    def fake(arguments: argparse.Namespace) -> dict[str, float]:
        for name, tokens in zip(counters, (700, 800), strict=True):
            counters[name] += tokens
        figures = dict.fromkeys((*serve.METRICS, "output_throughput", "total_token_throughput"), 1.0)
        return {"completed": arguments.num_prompts, **figures}

    monkeypatch.setattr(vllm_serve, "main", fake)
    csv = tmp_path / "prefixes.csv"
    options = serve.parse_arguments(["--prefixes", "8", "--concurrency", "4", "--rounds", "4", "--csv", str(csv)])
    serve.measure("tq4", ["--stream-interval", "8"], server, options, "abc1234")
    (row,) = read(csv)
    assert (row["dtype"], row["concurrency"], row["requests"], row["hit_rate"]) == ("tq4", "4", "16", "0.875")
    assert row["server_options"].endswith("} --stream-interval 8") and row["p99_tpot_ms"] == "1.00"


@pytest.mark.parametrize("wrong", [["--concurrency", "4", "8"], ["--concurrency", "4", "--rounds", "3"]])
def test_prefixes_divide_the_requests_of_one_concurrency(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import serve

    assert serve.parse_arguments(["--prefixes", "8", "--concurrency", "4", "--rounds", "4"]).prefixes == 8
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--prefixes", "8", *wrong])
    assert "--prefixes 8 takes one --concurrency" in capsys.readouterr().err


def test_start_up_finds_a_package_in_a_relative_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import startup

    monkeypatch.chdir(REPO)
    assert startup.tree_of("abc1234=overlay") == ("abc1234", str(REPO / "overlay"))
    for wrong in ("abc1234=docs", "abc1234"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}': expected COMMIT=FOLDER"):
            startup.tree_of(wrong)


def test_a_warm_start_has_the_model_of_the_cold_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder's name is in vLLM's keys of what torch.compile made; no other case finds that."""
    import startup

    models: list[Path] = []

    class Worker:
        def __init__(self, target: object, args: tuple) -> None:
            models.append(args[3])

        def start(self) -> None: ...
        def join(self, *_: float) -> None: ...
        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr(startup.multiprocessing, "get_context", lambda _method: SimpleNamespace(Process=Worker))
    options = ["--dtypes", "auto", "tq4", "--commit", "abc1234", "--caches", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["startup.py", *options])
    assert startup.main() == 1, "no worker printed a row"
    for more in (["--all-graphs"], ["--dtypes", "tq4:MIXED"]):
        monkeypatch.setattr(sys, "argv", ["startup.py", *options, *more])
        with pytest.raises(SystemExit):
            startup.main()
    cold, warm, *other = models
    assert cold == warm and len(other) == 2 and {*other}.isdisjoint({cold})
    config = json.loads(Path(startup._model(cold, startup.config_of(None, 3)), "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    qwen = startup.config_of(str(REPO / "benchmarks" / "shapes" / "qwen3.8-27b"), None)
    assert (qwen["num_hidden_layers"], qwen["head_dim"]) == (64, 256)


def test_the_gpu_tests_load_and_the_cases_of_the_memory_check_exist() -> None:
    """They import nothing of vLLM's worker for a CPU, which replaces `torch.cuda.Event` and more as it is imported."""
    environment = {
        **os.environ,
        "PYTHONPROFILEIMPORTTIME": "1",
        "PYTEST_ADDOPTS": "-s",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", str(REPO / "scripts" / "gpu_tests.sh"), "collect"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")]
    assert done.returncode == 0, done.stdout
    assert "vllm" in imported
    assert not [name for name in imported if name.startswith("vllm.v1.worker.cpu")]


@pytest.mark.parametrize("means", ["one", "blocks"])
def test_a_made_up_calibration_fits_its_model(means: str, tmp_path: Path) -> None:
    from bench_engine import write_model
    from packed_kv.calibration_file import FILE_NAME, load
    from packed_kv.model.rope import rope_parameters

    found = load(Path(write_model(str(tmp_path), means), FILE_NAME))
    config = json.loads((tmp_path / "config.json").read_text())
    found.check_model(layers=config["num_hidden_layers"], kv_heads=8, head_size=128)
    found.check_rope(rope_parameters(config))
    assert all((layer.key.rope is not None) == (means == "blocks") for layer in found.layers.values())


def test_rows_of_a_build(tmp_path: Path) -> None:
    from rows import read

    file = tmp_path / "cpu_build.csv"
    run("cpu_build.py", "--compilers", "c++", "--dtype", "turboquant25", "--csv", str(file))
    (row,) = read(file)
    assert float(row["cold_ms"]) > 500 and float(row["warm_ms"]) < float(row["cold_ms"]) / 4


def test_rows_of_a_cpu(tmp_path: Path) -> None:
    from rows import read

    shapes = ("--shapes", "2,40,2,2,64", "--repetitions", "2", "--threads", "1")
    output = run("cpu.py", *shapes, "--csv", str(tmp_path / "cpu.csv"))
    rows = read(tmp_path / "cpu.csv")
    assert [row["dtype"] for row in rows] == ["tq4", "turboquant25"] and "dtype tq4 requests 2" in output
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["packed_ms"]) / float(row["auto_ms"]), rel=0.2)
