"""vLLM's KV connector for kvferry.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_role": "kv_both"}'

vLLM makes one connector in its scheduler, which knows requests and block tables, and one in every worker, which has the
memory and the session with the daemon. They speak in one direction, by the Step that goes with every engine step, and
in the other by what vLLM itself gathers from the workers: what has been read and what has arrived. docs/vllm.md.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

__all__ = ["KvferryConnector", "NixlConnector"]


def register() -> None:
    """Make the connector known to vLLM by its name: the entry point `vllm.general_plugins`, which vLLM calls in each
    process before a model is made."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.vllm import heads

    heads.watch()
    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector("KvferryConnector", "kvferry.vllm.connector", "KvferryConnector")


def __getattr__(name: str) -> Any:
    """The connector only when it is asked for: the modules beside it work without vLLM.

    NixlConnector is another name of it, for routers and runtimes that only hand over between engines which have this.
    """
    if name in __all__:
        from kvferry.vllm.connector import KvferryConnector

        return KvferryConnector
    raise AttributeError(name)
