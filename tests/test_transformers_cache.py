"""The cache for Hugging Face transformers: reads what the engine reads, holds packed bytes, serves `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from calibration_files import content, write
from checkout import DEMO_MODEL, REPO
from packed_kv import FORMATS, get_codec
from packed_kv.calibration_file import CalibrationError, load
from packed_kv.channel_calibration import LayerCalibration
from packed_kv.codecs import ring
from packed_kv.codecs.pages import PagedCodec
from packed_kv.layout import MEAN_BLOCK
from packed_kv.reference.attention import AttentionOptions, RecentVectors, attend
from packed_kv.transformers import CACHE_ARGUMENT, PackedCache, PackedLayer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
)
from transformers.models.mistral import MistralForCausalLM

HEADS, HEAD_DIM, WINDOW = 2, 64, 16
PROMPTS = ("The secret number of the mill is 4711. ", "Once upon a time there was a miller who had three sons, and ")
every_format = pytest.mark.parametrize("name", FORMATS)


def calibration_of(folder: Path, version: int) -> Path:
    """Write a calibration for layers of `HEADS` heads of `HEAD_DIM` channels."""
    return write(folder, content(2, HEADS, HEAD_DIM, version=version, mean=5.0))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    """A calibration with means by position."""
    return calibration_of(tmp_path_factory.mktemp("calibration"), 3)


@pytest.fixture(scope="module")
def demo():
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keys_and_values(tokens: int, sequences: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """[sequences, HEADS, tokens, HEAD_DIM], about the means of `calibration`."""
    shape = (sequences, HEADS, tokens, HEAD_DIM)
    return 3 * gaussian(*shape, seed=1), gaussian(*shape, seed=2)


def fill(layer: PackedLayer, key: torch.Tensor, value: torch.Tensor, *, at_once: int) -> tuple[torch.Tensor, ...]:
    """Return what the last of the updates returned."""
    for start in range(0, key.shape[2], at_once):
        part = slice(start, start + at_once)
        found = layer.update(key[:, :, part], value[:, :, part])
    return found


def layer_of(cache: PackedCache) -> PackedLayer:
    cache.update(*keys_and_values(0), layer_idx=0)
    return cache.layers[0]


def relative_rms(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x - truth).square().mean() / truth.square().mean()).sqrt().item()


@every_format
@pytest.mark.parametrize("version", [None, 2, 3], ids=["plain", "one_mean", "by_position"])
@pytest.mark.parametrize("window", [0, WINDOW], ids="window{}".format)
def test_a_decode_reads_what_the_engine_reads(name, version, window, tmp_path):
    """By position over two blocks, of which the window has part of each."""
    tokens, group = MEAN_BLOCK + 8 if version == 3 else 50, 3
    key, value = keys_and_values(tokens)
    file = calibration_of(tmp_path, version) if version else None
    cache = PackedCache(name, recent_tokens=window, calibration=file)
    read_key, read_value = fill(layer_of(cache), key, value, at_once=tokens - 1)
    query = gaussian(1, HEADS * group, HEAD_DIM, seed=3)
    scores = torch.einsum("hgd,htd->hgt", query.view(HEADS, group, HEAD_DIM), read_key[0]) * HEAD_DIM**-0.5
    ours = torch.einsum("hgt,htd->hgd", scores.softmax(-1), read_value[0]).reshape(1, HEADS * group, HEAD_DIM)

    fmt = FORMATS[name]
    known = load(file).taken_by(fmt, load(file).layers[0]) if file else LayerCalibration()
    codec = PagedCodec(fmt, HEAD_DIM, known.key, known.value)
    blocks, positions = -(-tokens // 16), torch.arange(tokens)
    flat = [x[0].transpose(0, 1) for x in (key, value)]
    pages = torch.zeros(blocks, HEADS, 16, fmt.slot_bytes(HEAD_DIM), dtype=torch.uint8)
    codec.write(pages, positions, *flat, positions=positions)
    recent = None
    if window:
        held = [ring.round_trip(x)[-window:].transpose(0, 1) for x in codec.prepare(*flat, positions)]
        recent = RecentVectors(tokens - window, window, *codec.whole(*held, positions[-window:]))
    engine = attend(codec, pages, torch.arange(blocks), tokens, query, AttentionOptions(HEAD_DIM**-0.5), recent)[0]
    assert relative_rms(ours, engine) < 1e-5


@every_format
def test_a_prompt_reads_itself_raw_and_what_was_there_as_stored(name):
    key, value = keys_and_values(40)
    cache = PackedCache(name, recent_tokens=WINDOW)
    layer = layer_of(cache)
    first = layer.update(key[:, :, :30], value[:, :, :30])
    assert torch.equal(first[0], key[:, :, :30])
    assert torch.equal(first[1], value[:, :, :30])
    stored = [held.read(layer._positions_held(), torch.float32) for held in layer.vectors]
    second = layer.update(key[:, :, 30:], value[:, :, 30:])
    for found, held, raw in zip(second, stored, (key, value), strict=True):
        assert torch.equal(found[:, :, :30], held)
        assert torch.equal(found[:, :, 30:], raw[:, :, 30:])
        assert relative_rms(held[:, :, -WINDOW:], raw[:, :, 30 - WINDOW : 30]) < 0.01 < relative_rms(
            held[:, :, :-WINDOW], raw[:, :, : 30 - WINDOW]
        )  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 7, 40], ids="steps_of_{}".format)
def test_what_is_stored_does_not_depend_on_the_steps(at_once, calibration):
    key, value = keys_and_values(40, sequences=2)
    caches = [PackedCache("isoquant3", recent_tokens=WINDOW, calibration=calibration) for _ in range(2)]
    for cache, step in zip(caches, (40, at_once), strict=True):
        cache.update(key[:, :, :0], value[:, :, :0], 0)
        fill(cache.layers[0], key, value, at_once=step)
    for ours, other in zip(*(cache.layers[0].all() for cache in caches), strict=True):
        assert torch.equal(ours.held, other.held)


def storages(thing: object, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Memory of all tensors that an object leads to, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage
        return
    parts = [*thing.values()] if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else []
    for part in (*parts, *getattr(thing, "__dict__", {}).values()):
        yield from storages(part, seen)


def held_bytes(thing: object) -> int:
    return sum(storage.nbytes() for storage in storages(thing, set()))


@every_format
@pytest.mark.parametrize("sequences", [1, 3], ids="batch{}".format)
def test_it_holds_packed_bytes_and_nothing_else(name, sequences):
    """All memory that the cache leads to, views and leftovers included, grows by a token's packed bytes and at most an
    eighth of these."""
    key, value = keys_and_values(300, sequences)
    cache = PackedCache(name, recent_tokens=WINDOW)
    cache.update(key[:, :, :0], value[:, :, :0], 0)
    empty = held_bytes(cache)  # the codec's constants
    for start, end in ((0, 100), (100, 101), (101, 300)):
        cache.update(key[:, :, start:end], value[:, :, start:end], 0)
        tokens = sequences * HEADS * end * FORMATS[name].slot_bytes(HEAD_DIM)
        window = sequences * HEADS * WINDOW * 2 * (HEAD_DIM + HEAD_DIM // 32)
        assert cache.nbytes == tokens + window
        assert cache.nbytes <= held_bytes(cache) - empty <= cache.nbytes * 9 / 8
    plain = DynamicCache()
    plain.update(key.bfloat16(), value.bfloat16(), 0)
    assert held_bytes(plain) / tokens == FORMATS[name].compression(HEAD_DIM)
    cache.crop(-280)
    assert cache.nbytes == sequences * HEADS * 20 * FORMATS[name].slot_bytes(HEAD_DIM)
    assert cache.nbytes <= held_bytes(cache) - empty <= cache.nbytes * 9 / 8
    cache.reset()
    assert cache.nbytes == cache.get_seq_length() == 0


def test_a_token_is_not_copied_with_each_that_follows():
    """Memory moves whenever an eighth has been added: 44 times from 1 token to 600, not 600 times. With a sliding
    window, whenever an eighth of it has passed. What is stored is the same."""
    key, value = keys_and_values(600)
    whole = PackedCache("tq4", recent_tokens=WINDOW)
    whole.update(key, value, 0)
    for window in (None, 120):
        config = None if window is None else tiny_mistral(window + 1).config
        cache = PackedCache("tq4", recent_tokens=WINDOW, config=config)
        memory: list[torch.Tensor] = []
        for at in range(600):
            cache.update(key[:, :, at : at + 1], value[:, :, at : at + 1], 0)
            packed = cache.layers[0].vectors[0].packed
            if not memory or packed.memory is not memory[-1]:
                memory.append(packed.memory)
        assert len(memory) <= (44 if window is None else 44 + 600 * 8 // window)
        for ours, other in zip(cache.layers[0].all(), whole.layers[0].all(), strict=True):
            kept = min(window or 600, other.held.shape[2])
            assert torch.equal(ours.held, other.held[:, :, -kept:])


def test_a_copy_goes_on_by_itself():
    """As transformers' users keep the cache of a prompt that many share."""
    key, value = keys_and_values(40)
    cache = PackedCache("tq4", recent_tokens=WINDOW)
    cache.update(key[:, :, :30], value[:, :, :30], 0)
    copied = copy.deepcopy(cache)
    apart = copied.update(key[:, :, 30:], value[:, :, 30:], 0)
    assert (cache.get_seq_length(), copied.get_seq_length()) == (30, 40)
    for ours, other in zip(apart, cache.update(key[:, :, 30:], value[:, :, 30:], 0), strict=True):
        assert torch.equal(ours, other)


def test_padding_on_the_left_changes_nothing_that_is_stored(calibration):
    key, value = keys_and_values(24)
    mask = torch.tensor([[1] * 24, [0] * 9 + [1] * 15])
    cache = PackedCache("tq3", recent_tokens=4, calibration=calibration, attention_mask=mask)
    cache.update(key.expand(2, -1, -1, -1), value.expand(2, -1, -1, -1), 0)
    alone = PackedCache("tq3", recent_tokens=4, calibration=calibration)
    alone.update(key[:, :, 9:], value[:, :, 9:], 0)
    unaware = PackedCache("tq3", recent_tokens=4, calibration=calibration)
    unaware.update(key, value, 0)
    one = (gaussian(1, HEADS, 1, HEAD_DIM, seed=5),) * 2
    padded = cache.update(*(x.expand(2, -1, -1, -1) for x in one), 0)[0]
    assert torch.equal(padded[1:, :, 9:], alone.update(*one, 0)[0])
    whole = unaware.update(*one, 0)[0]
    assert torch.equal(padded[:1], whole)
    assert not torch.equal(padded[1:, :, 9], whole[:, :, 9])  # the mask is what told


@pytest.mark.parametrize(
    "change",
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "repeat"],
)
def test_sequences_move_with_all_that_is_theirs(change, calibration):
    act, rows = change
    key, value = keys_and_values(30, sequences=3)
    mask = torch.tensor([[0] * pad + [1] * (30 - pad) for pad in (0, 4, 9)])
    cache = PackedCache("turboquant35", recent_tokens=8, calibration=calibration, attention_mask=mask)
    cache.update(key, value, 0)
    before = cache.layers[0].vectors[0].read(cache.layers[0]._positions_held(), torch.float32)
    act(cache)
    after = cache.layers[0].vectors[0].read(cache.layers[0]._positions_held(), torch.float32)
    assert torch.equal(after, before[rows])


def generate(model, inputs, cache, tokens: int = 24, **options) -> torch.Tensor:
    return model.generate(
        **inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=1, **options,
    )  # fmt: skip


def test_a_padded_batch_generates_what_each_prompt_does_alone(demo, tokenizer):
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    assert not inputs["attention_mask"].all()
    together = generate(demo, inputs, PackedCache("tq4", attention_mask=inputs["attention_mask"]))
    for prompt, found in zip(PROMPTS, together, strict=True):
        alone = generate(demo, tokenizer(prompt, return_tensors="pt"), PackedCache("tq4"))[0]
        assert torch.equal(found[-24:], alone[-24:])


def test_a_second_call_goes_on_where_the_first_one_ended(demo, tokenizer):
    inputs, cache = tokenizer(PROMPTS[1], return_tensors="pt"), PackedCache("isoquant4")
    whole = generate(demo, inputs, cache)
    assert cache.get_seq_length() == whole.shape[1] - 1
    cache.reset()
    half = generate(demo, inputs, cache, tokens=12)
    assert torch.equal(generate(demo, {"input_ids": half}, cache, tokens=12), whole)


def log_probabilities(demo, inputs, cache, beams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over the 24 tokens that each prompt gets, by the cache that generated them, and by a model without one."""
    made = generate(
        demo, inputs, cache, num_beams=beams, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    new, mask = made.sequences[:, -24:, None], inputs["attention_mask"]
    if beams == 1:
        found = torch.stack(made.logits, 1).log_softmax(-1).gather(2, new)[..., 0].mean(1)
    else:
        found = made.sequences_scores
    mask = torch.cat([mask, mask.new_ones(len(mask), 24)], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = demo(made.sequences, attention_mask=mask, position_ids=places).logits
    return found, logits[:, -25:-1].log_softmax(-1).gather(2, new)[..., 0].mean(1)


@pytest.mark.parametrize("beams", [1, 3], ids="beams{}".format)
def test_what_is_generated_is_as_likely_as_without_a_cache(demo, tokenizer, beams):
    """While the window holds all tokens, but for its 8 bits; which of two beams is kept, these may decide."""
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)

    def distance(cache) -> torch.Tensor:
        found, expected = log_probabilities(demo, inputs, cache, beams)
        return (found - expected).abs()

    assert distance(DynamicCache()).max() < 1e-4
    ring, pages = (
        distance(PackedCache("turboquant25", recent_tokens=n, attention_mask=inputs["attention_mask"]))
        for n in (1000, 0)
    )
    assert ring.max() < 0.01 and pages.min() > 0.05  # and the pages are read, too


def test_assisted_generation_takes_back_what_was_not_accepted(demo, tokenizer):
    inputs = tokenizer(PROMPTS[1], return_tensors="pt")
    cache = PackedCache("tq4", recent_tokens=1000)
    found = generate(demo, inputs, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(found, generate(demo, inputs, DynamicCache()))
    assert cache.get_seq_length() < found.shape[1]


def test_the_script_measures_what_is_lost_and_held(demo, tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    import transformers_cache

    ids = tokenizer(PROMPTS[1], return_tensors="pt")["input_ids"]
    near, far = (transformers_cache.compare(demo, [ids], PackedCache("turboquant25", recent_tokens=n)) for n in (99, 0))
    assert 0 < near.kl_mean < 0.02 * far.kl_mean
    assert far.cache_bytes[1] / far.cache_bytes[0] == 2 * FORMATS["turboquant25"].compression(128)  # fp32 to it
    assert near.cache_bytes[0] > far.cache_bytes[0]


def tiny_mistral(window: int) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=window,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("prompt", [5, 40], ids="prompt{}".format)
def test_a_sliding_layer_holds_its_window(prompt):
    model, window = tiny_mistral(16), 16
    ids = torch.arange(prompt + 30)[None] % 97
    sliding, full = PackedCache("tq4", config=model.config, recent_tokens=4), PackedCache("tq4", recent_tokens=4)
    with torch.no_grad():
        for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + 20)), (prompt + 20, None)]:
            ours, theirs = (model(ids[:, start:end], **{CACHE_ARGUMENT: cache}).logits for cache in (sliding, full))
            assert relative_rms(ours, theirs) < 1e-5
    assert sliding.get_seq_length() == full.get_seq_length() == prompt + 30
    a_token = 2 * HEADS * FORMATS["tq4"].slot_bytes(64)
    assert full.nbytes - sliding.nbytes == (prompt + 30 - (window - 1)) * a_token
    most = (window - 1) * 9 // 8 * HEADS * 34
    assert sliding.layers[0].vectors[0].packed.memory.untyped_storage().nbytes() <= most
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        sliding.crop(-1)


def test_heads_of_a_width_that_is_padded_to_groups():
    config = LlamaConfig(
        vocab_size=97, hidden_size=80, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, head_dim=80,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), torch.arange(20)[None]
    with torch.no_grad():
        found = [generate(model, {"input_ids": ids}, cache) for cache in (PackedCache("tq4"), DynamicCache())]
    assert torch.equal(*found)


@every_format
def test_values_of_fewer_channels_are_those_of_their_codec(name):
    key, value = keys_and_values(40)
    value = value[..., :48]
    cache = PackedCache(name, recent_tokens=0)
    cache.update(key[:, :, :39], value[:, :, :39], 0)
    read_key, read_value = cache.update(key[:, :, 39:], value[:, :, 39:], 0)
    for role, x, read in (("key", key, read_key), ("value", value, read_value)):
        codec = get_codec(name, x.shape[-1], role, layout_dim=HEAD_DIM)
        assert torch.equal(read, codec.decode(codec.encode(x.transpose(1, 2))).transpose(1, 2))


def updated(key: torch.Tensor, value: torch.Tensor | None = None) -> PackedCache:
    """A cache of one sequence with 2 KV heads of 64 channels that is then given these."""
    cache = PackedCache("tq4")
    cache.update(*[torch.zeros(1, 2, 3, 64)] * 2, 0)
    cache.update(key, key if value is None else value, 0)
    return cache


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "unknown KV-cache dtype 'tq5'; known: isoquant3", lambda file: PackedCache("tq5")),
        (ValueError, r"unknown KV-cache dtype \['tq4'\]; known: ", lambda file: PackedCache(["tq4"])),
        (ValueError, r"unknown KV-cache dtype LlamaConfig .*\.\.\.; known: ", lambda file: PackedCache(LlamaConfig())),
        *((ValueError, f"recent_tokens must be a whole number, 0 for none, got {number!r}",
           lambda file, number=number: PackedCache("tq4", recent_tokens=number)) for number in (-1, "64", True, 64.0)),
        *((ValueError, rf"must be a tensor \[sequences, tokens\], as a tokenizer makes it, got {found}",
           lambda file, mask=mask: PackedCache("tq4", attention_mask=mask))
          for mask, found in ((torch.ones(3), r"\(3,\)"), (torch.ones(0, 4), r"\(0, 4\)"), ([[1, 1]], "a list"))),
        (ValueError, "must have 1 for tokens and 0 for padding, got -inf",
         lambda file: PackedCache("tq4").reset(torch.tensor([[0.0, -torch.inf]]))),
        (ValueError, "attention_mask has 5 tokens, the prompts 6; give",
         lambda file: PackedCache("tq4", attention_mask=torch.ones(1, 5)).update(*keys_and_values(6), 0)),
        (ValueError, "attention_mask has 2 sequences, the batch 1",
         lambda file: layer_of(PackedCache("tq4", attention_mask=torch.ones(2, 5)))),
        (ValueError, "head_dim must be a positive multiple of 16, got 40",
         lambda file: PackedCache("tq4").update(*[torch.zeros(1, 1, 1, 40)] * 2, 0)),
        (ValueError, "values of 96 channels do not fit vectors of 64",
         lambda file: PackedCache("tq4").update(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 96), 0)),
        (CalibrationError, "has no entry for layer 2",
         lambda file: PackedCache("tq4", calibration=file).update(*keys_and_values(1), 2)),
        (CalibrationError, "2 KV heads of 64 channels, layer 0 has 4 KV heads of 64 channels",
         lambda file: PackedCache("tq4", calibration=file).update(*[torch.zeros(1, 4, 1, 64)] * 2, 0)),
        (CalibrationError, "lists layer 1, this model has 0 to 0",
         lambda file: PackedCache("tq4", calibration=file, config=LlamaConfig(num_hidden_layers=1))),
        (NotImplementedError, "recurrent|convolution|LinearAttentionLayer",
         lambda file: PackedCache("tq4", config=MambaConfig(num_hidden_layers=1))),
        (ValueError, "layer 0 holds keys of 1 sequences, 2 heads, 64 channels, and got some of 3, 2, 64; make a new",
         lambda file: updated(torch.zeros(3, 2, 1, 64))),
        (ValueError, "layer 0 holds values of 1 sequences, 2 heads, 64 channels, and got some of 1, 2, 32; make a",
         lambda file: updated(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 32))),
        (NotImplementedError, "has convolution states",
         lambda file: PackedCache("tq4").update_conv_state(torch.zeros(1), 0)),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(error, message, make, calibration):
    with pytest.raises(error, match=message) as raised:
        make(calibration)
    assert "\n" not in str(raised.value)
