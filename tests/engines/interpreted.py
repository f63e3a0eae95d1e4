"""vLLM and its Triton kernels in a process without a GPU and without an engine: import this before vLLM.

vLLM takes Triton's kernels where Triton has a driver; Triton's interpreter runs them, 10 ms for each program.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TRITON_INTERPRET": "1",
}  # fmt: skip

import torch
import triton.backends


class Driver:
    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch="", warp_size=1)

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu


triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=Driver))
