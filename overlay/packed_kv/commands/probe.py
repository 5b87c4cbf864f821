"""Facts that only vLLM knows, as one line of JSON. It runs in its own process, because vLLM may fail to load or
crash."""

from __future__ import annotations

import json
import sys
from typing import Any


def probe(head_dim: int, folder: str = "") -> dict[str, Any]:
    """Platform, device and registered backends; FlashAttention's version for heads of `head_dim` channels; and the
    facts that vLLM reads from a folder's config.json."""
    import torch
    import vllm.config.cache as cache_config
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from ..formats import FORMATS

    load_general_plugins()
    known = getattr(cache_config, "KV_CACHE_DTYPES", ())
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "platform": current_platform.device_type,
        "registered": [name for name in FORMATS if name in known],
        "devices": 0,
    }
    if current_platform.is_cuda() and torch.cuda.is_available():
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        found |= {
            "devices": torch.cuda.device_count(),
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "memory": torch.cuda.get_device_properties(0).total_memory,
            "flash_attention": get_flash_attn_version(head_size=head_dim),
        }
    return found | (_model(folder) if folder else {})


def _model(folder: str) -> dict[str, Any]:
    """`unknown`: a line saying that vLLM does not know the architecture, or "". `ropes`: the model's RoPEs, which an
    engine compares with a calibration file's; or `unreadable`: why vLLM cannot read the config. `has_code`: the model
    brings code."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    from ..model.rope import rope_parameters
    from ..planning.config_file import load
    from ..vllm_compat import unknown_architecture

    written, _ = load(folder)
    found: dict[str, Any]
    try:
        config = get_config(folder, trust_remote_code=False)
        names, found = config.architectures, {"ropes": rope_parameters(get_hf_text_config(config))}
    except Exception as error:  # transformers may raise any error for a bad config
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        names, found = written.get("architectures"), {"unreadable": reason}
    has_code = "auto_map" in written
    return found | {"has_code": has_code, "unknown": unknown_architecture(names or [], has_code=has_code)}


if __name__ == "__main__":
    print(json.dumps(probe(int(sys.argv[1]), *sys.argv[2:])))
