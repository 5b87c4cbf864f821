"""LoRA adapters in the keys of pages: their files' content, besides the name and path that vLLM puts there.

An adapter that is saved again in its folder computes other pages. vLLM's block hashes know its name and path alone,
so after a restart a tier on disk would return pages of the earlier weights. vLLM asks no plugin for these keys, so a
function of its `kv_cache_utils` is wrapped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from ..vllm_compat import wrap_adapter_keys
from .model_identity import content_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

CONFIG = "adapter_config.json"
Keys = list[tuple[Any, ...]]


def name_adapters() -> None:
    """Have block hashes of this process, an engine core's, name the content of adapters that its engine loads."""
    wrap_adapter_keys(lambda keys: AdapterKeys(keys.keys if isinstance(keys, AdapterKeys) else keys))


class AdapterKeys:
    """vLLM's keys of a request's adapter, and its content.

    The content is as of the first request after the adapter was loaded: an engine keeps the loaded weights, whatever is
    written into the folder meanwhile.
    """

    def __init__(self, keys: Callable[[Request], Keys]) -> None:
        self.keys = keys
        self.contents: dict[tuple[int, str], str] = {}

    def __call__(self, request: Request) -> Keys:
        adapter = request.lora_request
        if not adapter:
            return self.keys(request)
        return [*self.keys(request), ("adapter", self._content(request, adapter))]

    def _content(self, request: Request, adapter: LoRARequest) -> str:
        known = (adapter.lora_int_id, adapter.lora_path)
        is_loaded_anew = adapter.load_inplace and not getattr(request, "_block_hashes_begun", False)
        if is_loaded_anew:
            request._block_hashes_begun = True  # the next block is of the same load
        if is_loaded_anew or known not in self.contents:
            self.contents[known] = adapter_identity(adapter.lora_path)
        return self.contents[known]


def adapter_identity(path: str) -> str:
    """Identity of an adapter's weights: the commit of one of the Hugging Face Hub, or the content of a folder's files,
    wherever they lie; for a missing folder, the adapter's name."""
    folder = Path(os.path.expanduser(path))
    if not folder.exists():
        config = try_to_load_from_cache(path, CONFIG)
        if not isinstance(config, str):
            return path
        folder = Path(config).parent
    if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name):
        return folder.name
    return content_of(folder)
