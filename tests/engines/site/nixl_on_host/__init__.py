"""SGLANG_EXTERNAL_MODEL_PACKAGE, as few_models is; and SGLang's NIXL backend on host memory.

The backend says VRAM of all KV. Without a GPU it lies in DRAM, and NIXL must be told so.
"""

from __future__ import annotations

from typing import Any

from nixl._api import nixl_agent


def _in_host_memory(name: str) -> None:
    asked = getattr(nixl_agent, name)

    def told(self: Any, *args: Any) -> Any:
        return asked(self, *("DRAM" if isinstance(each, str) and each == "VRAM" else each for each in args))

    setattr(nixl_agent, name, told)


for each in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
    _in_host_memory(each)
