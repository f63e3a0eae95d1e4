"""A rank's process: maps its KV cache, loads its weights, and runs the steps that the driver sends."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import BinaryIO

import torch
import torch.distributed as dist

from kvferry.errors import KvferryError
from kvferry.memory import open_file_region
from kvferry.reference.cache import CacheGeometry, describe
from kvferry.reference.model import Chunk, Decoder, map_cache, weights_of
from kvferry.reference.workers import Reply, Start, Step


class Worker:
    def __init__(self, start: Start) -> None:
        config, engine = start.source.config, start.engine
        if engine.tp > 1:
            timeout, at = timedelta(seconds=engine.step_timeout_s), f"file://{start.rendezvous}"
            dist.init_process_group("gloo", init_method=at, rank=start.rank, world_size=engine.tp, timeout=timeout)
        geometry = CacheGeometry.of(config, engine, start.rank)
        region = _region(start, geometry.nbytes)
        self._caches = map_cache(region, geometry)
        self.manifest = describe(
            start.source, engine, start.rank, epoch=start.epoch, region=region, caches=self._caches
        )
        self._decoder = Decoder(config, weights_of(start.source), start.rank, engine.tp)

    def step(self, step: Step) -> list[int]:
        """The sampled tokens, in the order of the sequences that sample; empty on every rank but 0."""
        tables = [torch.tensor(blocks) for blocks in step.blocks]
        chunks = [Chunk(*chunk) for chunk in zip(step.starts, step.counts, tables, strict=True)]
        last = (torch.tensor(step.counts).cumsum(0) - 1)[torch.tensor(step.sample)]
        logits = self._decoder.step(torch.tensor(step.tokens), chunks, self._caches, last)
        return [] if logits is None else [int(token) for token in logits.argmax(-1)]


def _region(start: Start, nbytes: int) -> torch.Tensor:
    if start.region is None:
        return torch.zeros(nbytes, dtype=torch.uint8)
    path, offset = start.region
    return open_file_region(path, nbytes, offset=offset).tensor()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer every message until the driver closes its end, or has gone."""

    def reply(message: Reply) -> None:
        replies.write(message.model_dump_json().encode() + b"\n")
        replies.flush()

    try:
        if first := requests.readline():
            worker = Worker(Start.model_validate_json(first))
            reply(Reply(manifest=worker.manifest.to_json()))
        for line in requests:
            reply(Reply(tokens=worker.step(Step.model_validate_json(line))))
    except ConnectionError:
        return
    except (RuntimeError, ValueError, OSError, IndexError, KvferryError) as error:
        traceback.print_exc()
        reply(Reply(failed=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver stops its workers
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # output of a library is no reply
        serve(sys.stdin.buffer, replies)
