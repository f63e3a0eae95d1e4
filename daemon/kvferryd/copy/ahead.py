"""What a plan's first copies will look like, so that their kernels can be compiled before somebody waits for them."""

from __future__ import annotations

import numpy as np
import structlog

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.tables import BlockTable, Tables
from kvferryd.copy.moves import Move, moves
from kvferryd.plan import Plan, bind

log = structlog.get_logger()
BLOCKS = 4


def sample(plan: Plan) -> list[Move]:
    """The moves of a request of a few blocks; none where no such request can be made up."""
    tokens, tables = BLOCKS * 4096, {rank: _tables(manifest) for rank, manifest in plan.sources.items()}
    for manifest in (plan.destination, *plan.sources.values()):
        for group in manifest.groups:
            if group.kind == "paged":
                tokens = min(tokens, min(BLOCKS, group.num_blocks) * group.block_size)
    try:
        return moves(bind(plan, tables, _tables(plan.destination), (0, tokens)))
    except KvferryError as error:
        log.debug("no kernel is compiled ahead", error=str(error))
        return []


def _tables(manifest: Manifest) -> Tables:
    return {
        group.name: BlockTable.of(np.arange(min(BLOCKS, group.num_blocks) if group.kind == "paged" else 1))
        for group in manifest.groups
    }
