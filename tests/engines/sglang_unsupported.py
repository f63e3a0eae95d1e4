"""Print what the plug-in refuses at the start, by what was asked for. SGLang's own parser reads its options; how wide
it runs is told. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_unsupported.py
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.server_args import ServerArgs

from kvferry.errors import KvferryError
from kvferry.sglang import manager

ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "pipeline": {"pp_size": 2},
    "pipeline of decode": {"pp_size": 2, "mode": DisaggregationMode.DECODE},
    "context of prefill": {"attn_cp_size": 2},
    "context of decode": {"dcp_size": 2, "mode": DisaggregationMode.DECODE},
    "DP ranks on two hosts": {"num_dp_ranks": 2, "nnodes": 2},
    "a draft model's hidden states": {"beside": 64 << 10},
    "larger ones": {"beside": 64 << 11},
    "state": {"state_types": [StateType.MAMBA]},
    "index keys beside a state": {"state_types": [StateType.MAMBA, StateType.DSA]},
    "windows in a pool of their own": {"state_types": [StateType.SWA]},
    "windows beside a ring": {"state_types": [StateType.SWA, StateType.SWA_RING]},
    "elastic": {"flags": ["--elastic-ep-backend", "mooncake"]},
    "stripes": {"flags": ["--enable-kv-cache-sharding"]},
    "saver": {"flags": ["--enable-memory-saver"]},
    "role": {"flags": ["--enable-pd-role-switch"]},
    "checksum": {"flags": ["--disaggregation-enable-kv-checksum"]},
    "rings": {"flags": ["--enable-linear-replayssm"]},
    "rings of drafts": {"flags": ["--enable-linear-replayssm-spec"], "mode": DisaggregationMode.DECODE},
}


def refusal(
    mode: DisaggregationMode = DisaggregationMode.PREFILL, flags: tuple[str, ...] = (), beside: int = 0,
    state_types: tuple[StateType, ...] = (), **wide: int,
) -> str:  # fmt: skip
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(["--model-path", "m", *flags])
    one = {"pp_size": 1, "attn_cp_size": 1, "dcp_size": 1, "num_dp_ranks": 1, "nnodes": 1}
    parallel = SimpleNamespace(**one | wide, load_balance_method="follow_bootstrap_room")
    manager.get_parallel, manager.get_disagg = lambda: parallel, lambda: arguments
    try:
        manager._check(SimpleNamespace(aux_item_lens=[64, beside - 64], state_types=state_types), mode, arguments)
    except KvferryError as error:
        return f"{error.code}: {error.value}"
    return ""


print(json.dumps({what: refusal(**asked) for what, asked in ASKED.items()}))
