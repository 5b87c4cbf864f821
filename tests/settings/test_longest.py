"""`--max-model-len auto`: tables by position are made before the fit, and are no longer than memory could hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from calibration_files import content, write
from harness import engine, model_of
from packed_kv.formats import FORMATS
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import rope_parameters
from packed_kv_quality.engines import attention_layers

CONFIG_LENGTH, MEMORY = 10_000_000, 8 << 20
A_TOKEN = 3 * 2 * FORMATS["tq4"].slot_bytes(64)


@pytest.mark.parametrize(("length", "largest"), [(-1, MEMORY // A_TOKEN + 1), (1024, 1024)], ids=["fitted", "given"])
def test_tables_are_as_long_as_what_can_be_served(length: int, largest: int, tmp_path: Path) -> None:
    config = tiny_models.llama(max_position_embeddings=CONFIG_LENGTH)
    model, file = Path(tiny_models.save(config, tmp_path)), content(3, 2, 64, version=3)
    file["ropes"][0]["parameters"] = rope_parameters(config)[""]
    write(model, file)
    options = {"max_model_len": length, "kv_cache_memory_bytes": MEMORY, "skip_tokenizer_init": True, "max_num_seqs": 2}
    with engine(str(model), "tq4", **options, max_num_batched_tokens=512, dtype="float32") as llm:
        fitted = llm.llm_engine.model_config.max_model_len
        assert model_of(llm) is not None
        packed = [layer.impl.attention for layer in attention_layers(llm) if hasattr(layer.impl, "attention")]
        codecs = [attention.kernels.codec for attention in packed]
        tables = {codec.key.transform.spectrum.data_ptr() for codec in codecs}
        (blocks,) = {codec.key.transform.mean_blocks for codec in codecs}
    assert len(codecs) == 3 and len(tables) == 1  # one table for all layers
    assert -(-fitted // MEAN_BLOCK) <= blocks <= -(-largest // MEAN_BLOCK) < CONFIG_LENGTH // MEAN_BLOCK
