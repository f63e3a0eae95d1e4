"""Whether the connector is all that the installed vLLM wants of one, without an engine.

    PYTHONPATH=clients python tests/engines/interface.py

For versions whose engine cannot run here: their Python over another version's kernels is enough.
"""

from __future__ import annotations

import inspect
from types import FunctionType

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvferry.vllm.connector import KvferryConnector


def parameters(method: object) -> list[str]:
    return list(inspect.signature(getattr(method, "__func__", method)).parameters)  # type: ignore[arg-type]


assert not KvferryConnector.__abstractmethods__, KvferryConnector.__abstractmethods__
for name, own in vars(KvferryConnector).items():
    asked = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
    if isinstance(own, FunctionType | classmethod) and asked is not None:
        assert parameters(own) == parameters(asked), f"{name} has {parameters(own)}, vLLM calls {parameters(asked)}"
if hasattr(KVConnectorBase_V1, "supports_sleep_mode"):
    assert not KvferryConnector.supports_sleep_mode(None)
print(f"KvferryConnector has what vLLM {vllm.__version__} wants")
