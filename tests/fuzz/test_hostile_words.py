"""Words that are read without a daemon: settings, kv_transfer_params, manifests and tables. Every fault has a name."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile import FRACTIONS, TEXTS, WHOLE, Hostile
from starlette.responses import PlainTextResponse

from kvferry.asgi import CheckTransferParams
from kvferry.errors import KvferryError
from kvferry.handoff import PARAMS, Handoff
from kvferry.manifest import Manifest
from kvferry.proxy import legs
from kvferry.tables import tables_from_json
from kvferryd.config import OPTIONS, ConfigError, resolve

counts = pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.long)])
HANDOFF: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "prefill", "remote_request_id": "r",
    "remote_host": "10.0.0.7", "remote_port": 7411, "remote_epoch": "1", "remote_block_ids": [[1, 2], [3]],
    "remote_num_tokens": 20, "remote_room": 32, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "transfer_mode": "read",
}  # fmt: skip
EXAMPLES = Path(__file__).parents[1] / "unit" / "examples"


@counts
def test_kv_transfer_params(rng: random.Random, count: int) -> None:
    """As the plug-in for vLLM, the reference engine and the proxy read them."""
    making = Hostile(rng)
    for _ in range(count):
        said = making.json(HANDOFF)
        with contextlib.suppress(KvferryError):
            handoff = Handoff.parse(said)
            handoff.origin("own", 20, lambda _: b"digest")
        with contextlib.suppress(KvferryError):
            answer = httpx.Response(200, json=_encodable({PARAMS: said}), request=httpx.Request("POST", "http://e"))
            if (params := legs.published(answer)) is not None:
                legs.decode_body({"prompt": "x"}, params, ordered=True)
                legs.lease_name(params)
                legs.order(params)


def _encodable(value: object) -> Any:
    """As JSON on the wire: without what UTF-8 does not take."""
    return json.loads(json.dumps(value).replace("\\ud800", "?").replace("NaN", "0").replace("Infinity", "1"))


@counts
@pytest.mark.anyio
async def test_bodies_with_kv_transfer_params(rng: random.Random, count: int) -> None:
    """The middleware before an engine answers 400 or passes the body on, and never fails itself."""
    making = Hostile(rng)
    app = CheckTransferParams(PlainTextResponse("passed"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as engine:
        for _ in range(count // 10):
            body = {"prompt": "x", PARAMS: HANDOFF, "vllm_xargs": {PARAMS: HANDOFF}}
            content = json.dumps(making.json(body)).encode()
            answer = await engine.post(
                "/v1/completions", content=making.garbled(content) if rng.random() < 0.3 else content
            )
            assert answer.status_code in (200, 400), content


@counts
def test_settings(rng: random.Random, count: int, tmp_path: Path) -> None:
    """From flags, variables and a file at once: the settings, or one error that names them."""
    values: list[Any] = [*TEXTS, *WHOLE, *FRACTIONS, True, None, [], {}, ["x"], {"x": 1}]
    file = tmp_path / "kvferry.toml"
    for _ in range(count // 5):
        names = [*OPTIONS, "no_such_setting"]
        flags = {rng.choice(names[:-1]): str(rng.choice(values)) for _ in range(rng.randrange(4))}
        environment = {f"KVFERRY_{rng.choice(names).upper()}": str(rng.choice(values)) for _ in range(rng.randrange(4))}
        lines = [f"{rng.choice(names)} = {_toml(rng.choice(values))}" for _ in range(rng.randrange(4))]
        written = "\n".join(lines).encode("utf-8", "replace")
        file.write_bytes(Hostile(rng).garbled(written) if rng.random() < 0.2 else written)
        wrong: tuple[KvferryError, ...] = ()
        try:
            resolve(flags | {"config": str(file)}, environment)
        except ConfigError as error:
            wrong = error.settings
        assert all(each.field and each.message and each.remedy for each in wrong), wrong


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | bool | list) else str(value)


@counts
def test_manifests_and_tables(rng: random.Random, count: int) -> None:
    making = Hostile(rng)
    manifest = json.loads((EXAMPLES / "hybrid_state_tp1_to_tp2" / "source0.json").read_text())
    tables = json.loads((EXAMPLES / "hybrid_state_tp1_to_tp2" / "destination_tables.json").read_text())
    for _ in range(count // 5):
        with contextlib.suppress(KvferryError):
            Manifest.from_dict(making.json(manifest))
        with contextlib.suppress(KvferryError):
            tables_from_json(making.json(tables))
