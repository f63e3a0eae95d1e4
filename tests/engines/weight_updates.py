"""The names of weights in the midst of an update of vLLM's, and after it.

.venv-engines/bin/python tests/engines/weight_updates.py

vLLM's own worker keeps the session of the update; its transfer engine is one of this file, which fails when it is told
to. Prints a line of JSON: for each way to update the names that the daemon was told, `-` for one that no other engine
knows.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from descriptions import Shape, config_of
from vllm.config import KVTransferConfig
from vllm.v1.worker.gpu_worker import Worker

from kvferry.blocking import BlockingEngineClient
from kvferry.v1 import engine_pb2, engine_pb2_grpc
from kvferry.vllm.weights import VllmWeights

START, PART, BROKEN, FINISH = "start_weight_update", "update_weights", "broken", "finish_weight_update"
UPDATES = {
    "told inside": [START, "v2", PART, "v2", PART, FINISH],
    "told after it": [START, PART, FINISH, "v2"],
    "never told": [START, PART, FINISH],
    "broken": [START, "v2", BROKEN],
    "whole after a broken one": [START, PART, BROKEN, START, "v2", PART, FINISH],
    "by the caller itself": ["kvferry_weights", START, "kvferry_weights", PART, FINISH],
    "told without one": ["v2"],
}


class Daemon(engine_pb2_grpc.EngineServicer):
    """Notes the names of weights that it is told."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def Attach(
        self, commands: AsyncIterator[engine_pb2.Command], context: Any
    ) -> AsyncIterator[engine_pb2.Event]:
        async for command in commands:
            if command.HasField("attach"):
                yield engine_pb2.Event(attached=engine_pb2.Attached(session="s", peer_address="127.0.0.1:1"))
            elif command.HasField("weights"):
                self.names.append(command.weights.weights)
                yield engine_pb2.Event(answer=engine_pb2.Answer(id=command.id))


class Transfer:
    """Puts no weight anywhere."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: dict[str, Any]) -> None:
        if info:
            raise ConnectionError("the trainer has gone")

    def finish_weight_update(self) -> None: ...

    def reset_weight_update_target(self) -> None: ...


def update(worker: Worker, steps: list[str]) -> None:
    for step in steps:
        if step == "kvferry_weights":
            worker.kvferry_weights("mine")
        elif step == BROKEN:
            with suppress(ConnectionError):
                worker.update_weights({"fails": True})
        elif step == PART:
            worker.update_weights({})
        elif step in (START, FINISH):
            getattr(worker, step)()
        else:
            worker.kvferry_rename_weights(step)


async def main() -> None:
    daemon, server, path = Daemon(), grpc.aio.server(), str(Path(tempfile.mkdtemp()) / "s")
    engine_pb2_grpc.add_EngineServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    client = await asyncio.to_thread(BlockingEngineClient.connect, path, engine_id="e", epoch="1")
    config = config_of(Shape(1), {})
    config.kv_transfer_config = KVTransferConfig(engine_id="e")
    weights = VllmWeights(client, config)
    told = {}
    for how, steps in UPDATES.items():
        worker = Worker.__new__(Worker)
        worker.vllm_config, worker.weight_transfer_engine, worker.rank = config, Transfer(), 0
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        daemon.names.clear()
        await asyncio.to_thread(update, worker, steps)
        told[how] = [name if name in ("v2", "mine") else "-" for name in daemon.names]
    assert weights.of(1)
    await asyncio.to_thread(client.close)
    await server.stop(0)
    print(json.dumps(told))


asyncio.run(main())
