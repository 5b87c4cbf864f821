"""`--additional-config '{"packed_kv": {...}}'`: what it says, and one line for what it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packed_kv.settings.options import OptionError, Options, check_files, read_options


def test_options_are_read() -> None:
    ours = {"calibration": "~/x.json", "recent_tokens": 0, "decode_kernel": "triton", "latent_rope_bits": 8}
    expected = Options(Path("~/x.json").expanduser(), 0, "triton", 8, mixed_graphs=False)
    assert read_options({"packed_kv": {**ours, "mixed_graphs": False}, "other": 1}) == expected
    assert read_options({"packed_kv": {"calibration": "auto"}}).calibration == Path("auto")
    assert read_options({}) == read_options(None) == read_options({"kv": 1, "packed": {}, 5: {}}) == Options()


@pytest.mark.parametrize(
    "key", ["packed-kv", "packedkv", "PACKED_KV", "packed_kv ", "Packed KV", "packed_kv\n", "paked_kv"]
)
def test_a_key_that_means_ours_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match="the key is packed_kv, not ") as error:
        read_options({key: {"recent_tokens": 0}})
    assert str(error.value).isprintable()


@pytest.mark.parametrize("key", ["calibration", "recent_tokens", "decode_kernel", "latent_rope_bits", "mixed_graphs"])
def test_an_option_outside_of_its_object_is_refused(key: str) -> None:
    said = f'--additional-config: {key} belongs into packed_kv; write {{"packed_kv": {{"{key}": ...}}}}'
    with pytest.raises(OptionError, match=re.escape(said)):
        read_options({key: 1, "packed_kv": {}})


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 2500, "a\0b", "a\nb\x1b", "", 5])
def test_a_path_that_is_none(path: object) -> None:
    with pytest.raises(OptionError) as error:
        read_options({"packed_kv": {"calibration": path}})
    line = str(error.value)
    assert line.startswith("--additional-config: packed_kv.calibration is ") and line.isprintable() and len(line) < 300


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("calibrations", "write calibration"),
        ("Recent-Tokens", "write recent_tokens"),
        ("recent", "write recent_tokens"),
        ("decode kernel\n", "write decode_kernel"),
        ("rope_bits", "write latent_rope_bits"),
        ("dtype", "write one of calibration, recent_tokens, decode_kernel, latent_rope_bits, mixed_graphs"),
        (5, "write one of calibration, recent_tokens, decode_kernel, latent_rope_bits, mixed_graphs"),
    ],
)
def test_a_misspelt_option_is_named_with_the_nearest(key: object, hint: str) -> None:
    with pytest.raises(OptionError) as error:
        read_options({"packed_kv": {"recent_tokens": 0, key: 1}})
    line = str(error.value)
    assert f"packed_kv has no option {key!r}; {hint}" in line and line.endswith(hint) and line.isprintable()


@pytest.mark.parametrize("path", ["no_such_file", "x" * 300, "/", "Auto"])
def test_a_file_that_is_not_there(path: str) -> None:
    with pytest.raises(OptionError, match='there is no such file; write "auto", or the path') as error:
        check_files(read_options({"packed_kv": {"calibration": path}}))
    assert str(error.value).isprintable() and error.value.__context__ is None
    check_files(read_options({"packed_kv": {"calibration": "auto"}}))
    check_files(read_options({"packed_kv": {"calibration": __file__}}))


@pytest.mark.parametrize("bits", [4, "8", True, 8.0, None])
def test_bits_of_rope_that_pages_do_not_have(bits: object) -> None:
    with pytest.raises(OptionError, match=r"packed_kv.latent_rope_bits is .*; write 16 or 8$"):
        read_options({"packed_kv": {"latent_rope_bits": bits}})


HUGE = 10**5000
"""A number of more digits than Python writes."""


@pytest.mark.parametrize("tokens", [HUGE, -HUGE, [HUGE], 10**30, -1, "64", 64.0, True, None], ids=lambda _: "")
def test_recent_tokens_that_are_no_number_of_tokens(tokens: object) -> None:
    with pytest.raises(OptionError, match=r"packed_kv.recent_tokens is .*; write a whole number, or 0 for no window$"):
        read_options({"packed_kv": {"recent_tokens": tokens}})


@pytest.mark.parametrize("said", [0, 1, "false", None, [True]])
def test_mixed_graphs_that_are_neither_true_nor_false(said: object) -> None:
    with pytest.raises(OptionError, match=r"packed_kv.mixed_graphs is .*; write true or false$"):
        read_options({"packed_kv": {"mixed_graphs": said}})


@pytest.mark.parametrize("option", ["calibration", "decode_kernel", "latent_rope_bits", "mixed_graphs"])
def test_a_number_of_too_many_digits(option: str) -> None:
    with pytest.raises(OptionError, match=f"packed_kv.{option} is a number of too many digits; write"):
        read_options({"packed_kv": {option: HUGE}})
