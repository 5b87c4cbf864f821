"""A store of pages on disk under vLLM's block hashes, as its offloading has them, that runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens


class BlockStore(ExampleConnector):
    """vLLM's example, which finds the pages of a prompt by its tokens, made to find them by its last block's hash."""

    def _generate_foldername_debug(
        self, token_ids: torch.Tensor, mm_hashes: list[str], create_folder: bool = False
    ) -> str:
        block_hash: BlockHash | None = None
        full = len(token_ids) // self._block_size * self._block_size
        for block in token_ids[:full].split(self._block_size):
            block_hash = hash_block_tokens(sha256, block_hash, block.tolist())
        folder = Path(self._storage_path, block_hash.hex() if block_hash else "none")
        if create_folder:
            folder.mkdir(exist_ok=True)
        return str(folder)
