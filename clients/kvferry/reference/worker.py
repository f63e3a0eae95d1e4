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
from kvferry.reference.wire import Done, Failed, Start, Step, packed, unpacked

_PR_SET_PDEATHSIG = 1


class Worker:
    def __init__(self, start: Start) -> None:
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

    def step(self, step: Step) -> list[int]:
        """The sampled tokens, in the order of the sequences that sample; empty on every rank but 0."""
        tables = torch.split(torch.tensor(step.blocks), step.num_blocks)
        chunks = [Chunk(*chunk) for chunk in zip(step.starts, step.counts, tables, strict=True)]
        last = (torch.tensor(step.counts).cumsum(0) - 1)[torch.tensor(step.sample)]
        logits = self._decoder.step(torch.tensor(step.tokens), chunks, self._caches, last)
        return [] if logits is None else [int(token) for token in logits.argmax(-1)]


def _region(start: Start, nbytes: int) -> torch.Tensor:
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
    """Answer every message until the driver's end of the pipe is gone."""
    try:
        start = unpacked(pipe.recv_bytes())
        assert isinstance(start, Start)
        worker = Worker(start)
        pipe.send_bytes(packed(Done()))
        while True:
            step = unpacked(pipe.recv_bytes())
            assert isinstance(step, Step)
            pipe.send_bytes(packed(Done(worker.step(step))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver has gone, or wants this process to go
    except (RuntimeError, ValueError, OSError, IndexError, KvferryError) as error:
        traceback.print_exc()
        pipe.send_bytes(packed(Failed(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[2]))
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
