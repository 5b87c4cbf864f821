"""The KV connectors that `--kv-transfer-config` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..refusals.facts import Connector

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


def connectors(config: KVTransferConfig | None) -> list[Connector]:
    """An engine's connectors; a MultiConnector is replaced by its parts."""
    if config is None or config.kv_connector is None:
        return []
    path = config.kv_connector_module_path
    return _flat(f"{path}.{config.kv_connector}" if path else config.kv_connector, config.kv_connector_extra_config)


def _flat(name: str, options: dict[str, Any]) -> list[Connector]:
    if name != "MultiConnector":
        return [Connector(name, options)]
    found = []
    for child in filter(lambda child: isinstance(child, dict), options.get("connectors", [])):  # vLLM refuses others
        path, own_name = child.get("kv_connector_module_path"), str(child.get("kv_connector"))
        found += _flat(f"{path}.{own_name}" if path else own_name, child.setdefault("kv_connector_extra_config", {}))
    return found
