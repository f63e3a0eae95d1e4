"""One rank's process: maps its KV cache, loads its weights, and runs the steps that the driver sends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from kvferry.errors import KvferryError
from kvferry.memory import open_file_region
from kvferry.reference.cache import CacheGeometry
from kvferry.reference.model import Chunk, Decoder, LayerCache, map_cache
from kvferry.reference.weights import weights_of
from kvferry.reference.wire import Ints, Message, StepInput, WorkerStart

_PR_SET_PDEATHSIG = 1


class Worker:
    def __init__(self, start: WorkerStart) -> None:
        config, engine = start.source.config, start.engine
        if engine.tp > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{start.rendezvous}",
                rank=start.rank,
                world_size=engine.tp,
                timeout=timedelta(seconds=engine.step_timeout_s),
            )
        geometry = CacheGeometry.of(config, engine, start.rank)
        self._caches: list[LayerCache] = map_cache(_region(start, geometry.nbytes), geometry)
        self._decoder = Decoder(config, weights_of(start.source), start.rank, engine.tp)

    def step(self, step: StepInput) -> Ints:
        """The sampled tokens, in the order of the sequences that sample; empty on every rank but 0."""
        tables = torch.split(torch.from_numpy(step.blocks), step.num_blocks.tolist())
        chunks = [
            Chunk(start, count, table)
            for start, count, table in zip(step.starts.tolist(), step.counts.tolist(), tables, strict=True)
        ]
        last = (step.counts.cumsum() - 1)[step.sample == 1]
        logits = self._decoder.step(torch.from_numpy(step.tokens), chunks, self._caches, torch.from_numpy(last))
        return step.tokens[:0] if logits is None else logits.argmax(-1).numpy()


def _region(start: WorkerStart, nbytes: int) -> torch.Tensor:
    if not start.region_path:
        return torch.zeros(nbytes, dtype=torch.uint8)
    return open_file_region(start.region_path, nbytes, offset=start.region_offset).tensor()


def _die_with_parent(parent: int) -> None:
    """Linux ends this process with its driver, however that ended; elsewhere the closed pipe does, a step later."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver stops its workers
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def serve(pipe: Connection) -> None:
    """Answer every message until `stop` or until the driver's end of the pipe is gone."""
    try:
        worker = Worker(WorkerStart.of(Message.from_bytes(pipe.recv_bytes())))
        pipe.send_bytes(Message("ready").to_bytes())
        while (message := Message.from_bytes(pipe.recv_bytes())).op == "step":
            pipe.send_bytes(Message("done", arrays={"tokens": worker.step(StepInput.of(message))}).to_bytes())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver has gone, or wants this process to go
    except (RuntimeError, ValueError, OSError, IndexError, KvferryError) as error:
        traceback.print_exc()
        pipe.send_bytes(Message("failed", text=f"{type(error).__name__}: {error}").to_bytes())


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[2]))
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
