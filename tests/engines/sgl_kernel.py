"""Stands in for SGLang's CPU kernels, which are on no package index: tests/engines/install_sglang.py puts it into the
environment as `sgl_kernel`. It has what a dense model without AMX calls, written from the places that call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    out_cache_loc: torch.Tensor, row_length: int,
) -> None:  # fmt: skip
    """Row r of the table gets the next (end - start) cache locations at [start, end)."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return absent
