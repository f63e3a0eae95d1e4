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


# ---- a model whose drafts are chains: each guess follows the one before ----


def copy_all_layer_kv_cache_cpu(*_: object) -> None:
    """A pool warms it up. It moves guesses that are not next to each other, which those of a chain are."""


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor,
    row_length: int, topk: int, steps: int,
) -> None:  # fmt: skip
    """The locations at which each request's guesses go, behind what it has."""
    each = topk * steps
    for at, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[at * each : (at + 1) * each] = req_to_token[row, length : length + each]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    out_cache_loc: torch.Tensor, row_length: int,
) -> None:  # fmt: skip
    """The locations at [start, end) of each request's row, one request behind the other."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[at : at + last - first] = req_to_token[row, first:last]
        at += last - first


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor, selected: torch.Tensor, seq_lens: torch.Tensor, mask: torch.Tensor,
    positions: torch.Tensor, index: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor, topk: int,
    depth: int, guessed: int, mask_mode: int,
) -> None:  # fmt: skip
    """Each guess has the next one as its only child."""
    if topk != 1:
        raise NotImplementedError("sgl_kernel.build_tree_kernel_efficient_cpu stands in for chains alone")
    import torch

    rows, steps = len(seq_lens), torch.arange(guessed)
    positions.copy_((seq_lens[:, None] + steps).flatten())
    index.copy_(torch.arange(rows * guessed).view(rows, guessed))
    next_token[:, :-1] = steps[1:]
    mask.view(rows, guessed, guessed).copy_(torch.ones(guessed, guessed).tril().bool())


def verify_tree_greedy_cpu(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
    retrive_index: torch.Tensor, retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:  # fmt: skip
    """Guesses are taken as long as they are what the model says."""
    for row, guesses in enumerate(candidates.tolist()):
        taken, said = 0, target_predict[row].tolist()
        while taken + 1 < accept_index.shape[1] and guesses[taken + 1] == said[taken]:
            taken += 1
        accept_token_num[row] = taken
        accept_index[row, : taken + 1] = retrive_index[row, : taken + 1]
        predicts[retrive_index[row, : taken + 1]] = target_predict[row, : taken + 1].to(predicts.dtype)


def fill_bonus_tokens_cpu(accepted: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int) -> None:
    """The last token that was taken of each request."""
    bonus.copy_(accepted.view(-1, stride).gather(1, lengths.long()[:, None] - 1).flatten())


def fill_accept_out_cache_loc_cpu(index: torch.Tensor, locations: torch.Tensor, taken: torch.Tensor) -> None:
    """The locations of guesses that were taken, without gaps."""
    chosen = index[index > -1].long()
    taken[: len(chosen)] = locations[chosen]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return absent
