"""REST and the commands that use it, against real daemons with engines attached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
from ranks import Shape, start_rank
from structlog.testing import capture_logs

from kvferry.engine import EngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.schemas import TransferRecord
from kvferry.tables import BlockTable
from kvferryd.api.rest.gate import MAX_BODY
from kvferryd.api.rest.server import RestServer
from kvferryd.commands.cli import main
from kvferryd.config import Config
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics

BLOCKS, SLOTS, DIM = 16, 4, 8
TOKENS = 11


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    try:
        yield fleet
    finally:
        fleet.close()


def started(fleet: Fleet, name: str, *flags: str) -> DaemonService:
    daemon = fleet.daemon(f"{name}-{uuid4().hex[:6]}", flags=flags)
    asyncio.run(fleet.ready(daemon, timeout_s=60))
    return daemon


@pytest.mark.parametrize("command", ["status", "transfers"])
def test_a_peer_port_in_place_of_rest_is_named(fleet: Fleet, capsys: pytest.CaptureFixture[str], command: str) -> None:
    peer = f"http://{started(fleet, 'misled').peer}"
    assert main([command, "--daemon", peer]) == 2
    said = capsys.readouterr().err
    assert f"what listens at {peer} is no daemon's REST service" in said
    assert "is this the peer port" in said


def test_an_idle_connection_is_kept_as_long_as_is_set(fleet: Fleet) -> None:
    with contextlib.ExitStack() as stack:

        def idle(seconds: int) -> socket.socket:
            url = httpx.URL(started(fleet, "idle", f"--keep-alive-s={seconds}").url)
            client = stack.enter_context(socket.create_connection((url.host, url.port), timeout=60))
            client.sendall(b"HEAD /healthz HTTP/1.1\r\nhost: h\r\n\r\n")
            assert client.recv(1 << 16)
            return client

        long, short = idle(3600), idle(2)
        assert short.recv(1 << 16) == b"", "it is closed"
        long.setblocking(False)
        with pytest.raises(BlockingIOError):
            long.recv(1)


@pytest.fixture(scope="module")
def prefill(fleet: Fleet) -> DaemonService:
    return started(fleet, "prefill")


@pytest.fixture(scope="module")
def decode(fleet: Fleet) -> DaemonService:
    return started(fleet, "decode")


@asynccontextmanager
async def engine(daemon: DaemonService, engine_id: str) -> AsyncIterator[tuple[EngineClient, Any]]:
    """An engine with one layer of keys, and its array."""
    epoch = uuid4().hex
    async with await EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=epoch) as client:
        region = await client.allocate(BLOCKS * SLOTS * DIM * 4)
        keys = region.array().view(np.float32).reshape(BLOCKS, SLOTS, DIM)
        builder = ManifestBuilder(engine_id, epoch, ModelInfo(name="tiny", fingerprint="tiny"))
        builder.region(0, "host", nbytes=region.nbytes, address=region.address)
        builder.group("full", block_size=SLOTS, num_blocks=BLOCKS)
        builder.component("full", layer=0, name="k", array=keys, axes=("block", "slot", "dim"))
        await client.register(builder.build())
        yield client, keys


def tables(*block_ids: int) -> dict[str, BlockTable]:
    return {"full": BlockTable.of(block_ids)}


def order(request_id: str, source: DaemonService, *block_ids: int) -> dict[str, Any]:
    body: dict[str, Any] = {"request_id": request_id, "source": {"engine_id": "prefill", "address": source.peer}}
    if block_ids:
        body["destination"] = {"tables": {"full": {"block_ids": list(block_ids)}}, "token_range": [0, TOKENS]}
    return body


async def kvferry(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


def test_an_order_moves_the_tokens_and_everything_tells_of_it(
    prefill: DaemonService, decode: DaemonService, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with (
            engine(prefill, "prefill") as (source, sent),
            engine(decode, "decode") as (_, arrived),
            httpx.AsyncClient(base_url=decode.url, timeout=60) as rest,
        ):
            sent[:] = np.arange(sent.size, dtype=np.float32).reshape(sent.shape)
            await source.publish("r/1", tables(5, 2, 9), TOKENS)
            body = order("r/1", prefill, 1, 0, 3)
            first = await rest.post("/v1/transfers", json=body)
            assert first.status_code == 202, first.text
            transfer_id = first.json()["transfer_id"]
            assert first.headers["location"] == f"/v1/transfers/{transfer_id}"
            again = await rest.post("/v1/transfers", json=body)
            assert (again.status_code, again.json()["transfer_id"]) == (200, transfer_id)
            other = await rest.post("/v1/transfers", json=order("r/1", prefill, 1, 0, 4))
            assert (other.status_code, other.json()["code"]) == (409, "order_conflict")

            answer = await rest.get(f"/v1/transfers/{transfer_id}?wait=15")
            record = TransferRecord.model_validate(answer.json())
            assert record.state == "done", answer.text
            assert record.bytes == TOKENS * DIM * 4
            assert np.array_equal(arrived[[1, 0]], sent[[5, 2]])
            assert np.array_equal(arrived[3, :3], sent[9, :3])
            assert not arrived[3, 3:].any()
            waited = await rest.get("/v1/transfers?request_id=r%2F1&wait=15&state=done")
            assert [each["transfer_id"] for each in waited.json()["transfers"]] == [transfer_id]

            for _ in range(2):  # a transfer that has ended stays as it ended
                assert (await rest.delete(f"/v1/transfers/{transfer_id}")).json()["state"] == "done"
            metrics = (await rest.get("/metrics")).text
            assert f'peer_engine="prefill",transport="UCX"}} {float(record.bytes)}' in metrics
            assert 'kvferry_transfer_phase_seconds_count{path="direct",phase="reading"} 1.0' in metrics

            assert await kvferry("status", "--daemon", decode.url) == 0
            assert "full (16 x 4 tokens)" in capsys.readouterr().out
            assert await kvferry("transfers", "--daemon", decode.url, "--request-id", "r/1") == 0
            line = capsys.readouterr().out.splitlines()[1]
            assert line.split()[:7] == ["done", "r/1", "1", "1", "prefill", "decode", "direct"]
            assert await kvferry("transfers", "--daemon", decode.url, "--json") == 0
            assert json.loads(capsys.readouterr().out)["transfers"][0]["transfer_id"] == transfer_id

            assert await kvferry("peers", "--daemon", decode.url) == 0
            assert prefill.peer in capsys.readouterr().out
            assert await kvferry("peers", "--daemon", decode.url, "--forget", "prefill") == 0
            assert capsys.readouterr().out == "no peers yet\n"
            assert await kvferry("peers", "--daemon", decode.url, "--prewarm", f"prefill@{prefill.peer}") == 0
            assert prefill.peer in capsys.readouterr().out

    asyncio.run(run())


def test_an_order_for_an_address_outside_the_list_is_403(prefill: DaemonService, decode: DaemonService) -> None:
    async def run() -> None:
        async with engine(decode, "decode"), httpx.AsyncClient(base_url=decode.url) as rest:
            body = order("r2", prefill, 1, 0, 3)
            body["source"]["address"] = "192.0.2.1:7411"
            answer = await rest.post("/v1/transfers", json=body)
            assert (answer.status_code, answer.json()["code"]) == (403, "address_not_allowed")
            answer = await rest.post("/v1/peers", json={"engine_id": "prefill", "address": "192.0.2.1:7411"})
            assert (answer.status_code, answer.json()["code"]) == (403, "address_not_allowed")

    asyncio.run(run())


def test_a_full_daemon_answers_429_and_an_abort_makes_room(fleet: Fleet, prefill: DaemonService) -> None:
    small = started(fleet, "small", "--max-transfers", "1")

    async def run() -> None:
        async with engine(small, "decode"), httpx.AsyncClient(base_url=small.url, timeout=60) as rest:
            waiting = (await rest.post("/v1/transfers", json=order("a", prefill))).json()
            assert waiting["state"] == "waiting"  # for the engine to reserve its blocks
            full = await rest.post("/v1/transfers", json=order("b", prefill))
            assert (full.status_code, full.json()["code"], full.headers["retry-after"]) == (429, "full", "1")
            for _ in range(2):
                aborted = await rest.delete(f"/v1/transfers/{waiting['transfer_id']}")
                assert (aborted.status_code, aborted.json()["state"]) == (200, "aborted")
            assert (await rest.post("/v1/transfers", json=order("b", prefill))).status_code == 202
            ended = await rest.post("/v1/requests/b/abort")
            assert ended.json()["transfers_ended"] == 1

    asyncio.run(run())


def test_drain_exits_0_only_when_nothing_is_left(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = started(fleet, "drained")

    async def run() -> None:
        async with engine(daemon, "prefill") as (client, _), httpx.AsyncClient(base_url=daemon.url) as rest:
            await client.publish("held", tables(1), 3, ttl_s=60)
            assert await kvferry("drain", "--daemon", daemon.url, "--status") == 1
            assert capsys.readouterr().out == "not draining: 1 lease, 0 transfers here\n"
            assert await kvferry("drain", "--daemon", daemon.url) == 1
            assert "`kvferry drain --cancel` ends that" in capsys.readouterr().err
            assert await kvferry("drain", "--daemon", daemon.url, "--cancel") == 0
            assert capsys.readouterr().out == "not draining: 1 lease, 0 transfers here\n"
            assert await kvferry("drain", "--daemon", daemon.url, "--wait", "0.3") == 1
            assert capsys.readouterr().out == "draining: 1 lease, 0 transfers left\n"
            assert await kvferry("status", "--daemon", daemon.url) == 1
            assert "not ready\n  not ready: draining" in capsys.readouterr().out

            cancelled = asyncio.create_task(kvferry("drain", "--daemon", daemon.url, "--wait", "30"))
            while not cancelled.done():  # the daemon's other drain; it is not begun again
                assert await kvferry("drain", "--daemon", daemon.url, "--cancel") == 0
                await asyncio.wait({cancelled}, timeout=0.2)
            assert await cancelled == 1
            assert "takes no new transfers" not in capsys.readouterr().err
            assert (await rest.get("/v1/drain")).json()["draining"] is False

            draining = asyncio.create_task(kvferry("drain", "--daemon", daemon.url, "--wait", "30"))
            while "1 lease" not in (said := capsys.readouterr().out):
                await asyncio.wait({draining}, timeout=0.02)
                assert not draining.done(), said
            revoked = await rest.delete("/v1/leases/held")
            assert revoked.json()["state"] == "revoked"
            assert await draining == 0
            assert "drained: no lease and no transfer is left" in capsys.readouterr().out

    asyncio.run(run())


@asynccontextmanager
async def served(ferry: Ferry) -> AsyncIterator[int]:
    """The application on a real socket in this loop; gives its port."""
    server = RestServer(ferry)
    await server.listen()
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.wait({serving}, timeout=0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        await ferry.close()


def test_a_command_without_a_token_names_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")

    async def run() -> None:
        async with served(Ferry(Config(rest="127.0.0.1:0", token_file=tokens), Metrics())) as port:
            asked = ("drain", "--status", "--daemon", f"127.0.0.1:{port}")
            assert await kvferry(*asked) == 2
            assert "--token-file" in capsys.readouterr().err
            assert await kvferry(*asked, "--token-file", str(tokens)) == 1

    asyncio.run(run())


def test_status_shows_no_control_characters_that_others_chose(
    decode: DaemonService, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        rank = await start_rank("torn\x1b[2J", decode.socket, Shape.tp(2), 0, "1")
        try:
            assert await kvferry("status", "--daemon", decode.url) == 1
        finally:
            await rank.client.close()

    asyncio.run(run())
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "torn?[2J: the daemons of ranks [1] have not joined" in said


def test_a_long_poll_ends_when_its_client_leaves() -> None:
    class Observed(Ferry):
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def wait_request(self, request_id: str, wait_s: float) -> Any:
            assert wait_s == 60, "the cap"
            self.entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

    async def run() -> None:
        ferry = Observed(Config(rest="127.0.0.1:0"), Metrics())
        async with served(ferry) as port, asyncio.timeout(60):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/transfers?request_id=r&wait=9999 HTTP/1.1\r\nhost: x\r\n\r\n")
            await ferry.entered.wait()
            writer.close()
            await ferry.cancelled.wait()

    asyncio.run(run())


def test_what_nobody_expected_is_a_500_without_its_reason() -> None:
    class Failing(Ferry):
        def info(self) -> Any:
            raise RuntimeError("a secret")

    async def run() -> None:
        config = Config(rest="127.0.0.1:0")
        async with served(Failing(config, Metrics())) as port, httpx.AsyncClient(trust_env=False) as rest:
            answer = await rest.get(f"http://127.0.0.1:{port}/v1/info", headers={"x-request-id": "r-9"})
            assert (answer.status_code, answer.json()["code"]) == (500, "internal")
            assert "secret" not in answer.text
            assert "r-9" in answer.json()["remedy"]

    with capture_logs() as lines:
        asyncio.run(run())
    assert [line["event"] for line in lines if line.get("exc_info")] == ["request failed"], "the log has the reason"


def test_a_body_that_is_much_too_large_is_answered_although_it_is_still_sent() -> None:
    """The connection was reset under the client, and the answer was lost with it."""

    async def run() -> None:
        async with (
            served(Ferry(Config(rest="127.0.0.1:0"), Metrics())) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        ):
            for _ in range(5):
                answer = await http.post("/v1/explain", content=bytes(16 * MAX_BODY))
                assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")

    asyncio.run(run())


def test_a_body_that_grows_too_large_is_refused_before_its_end() -> None:
    async def run() -> None:
        async with served(Ferry(Config(rest="127.0.0.1:0"), Metrics())) as port, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/explain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n" + (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 5
            )  # and no end: the answer comes all the same
            assert b" 413 " in await reader.readline()
            writer.close()

    asyncio.run(run())
