"""Requests without pause, while daemons die and are replaced."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from keepers import eventually, serving

from engines import MODEL, PREFILL_LEG, Pair, complete, prompt
from kvferryd.demo.fleet import DaemonService

WORKERS = 3


class Requests:
    """Prompts that nobody had before, of 40 to 600 tokens. tokens: decoded of each."""

    def __init__(self, engines: Pair, seed: int, *, tokens: int, vocabulary: int = MODEL.vocab_size) -> None:
        self._engines, self._seed = engines, itertools.count(seed * 100_000)
        self._tokens, self._vocabulary = tokens, vocabulary
        self._changed, self._over = threading.Condition(), False
        self.right = list[tuple[list[int], list[int]]]()
        """Prompts and what was decoded; they are compared afterwards."""
        self.failed_s = list[float]()
        """How long each request took that ended with an error."""

    @property
    def failed(self) -> int:
        return len(self.failed_s)

    def __enter__(self) -> Requests:
        self._threads = [threading.Thread(target=self._work) for _ in range(WORKERS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Wait until so many more have been handed over."""
        with self._changed:
            wanted = len(self.right) + count
            assert self._changed.wait_for(lambda: len(self.right) >= wanted, 120), "nothing is handed over any more"

    def _work(self) -> None:
        rng = random.Random(next(self._seed))
        while not self._over:
            tokens = prompt(rng.randrange(40, 600), next(self._seed), self._vocabulary)
            began = time.monotonic()
            answer = self._one(tokens)
            with self._changed:
                if answer is None:
                    self.failed_s.append(time.monotonic() - began)
                else:
                    self.right.append((tokens, answer))
                self._changed.notify_all()

    def _one(self, tokens: list[int]) -> list[int] | None:
        prefilled = complete(self._engines.prefill, tokens, max_tokens=1, kv_transfer_params=PREFILL_LEG)
        params = prefilled.json().get("kv_transfer_params")
        if prefilled.status_code != 200 or params is None:
            return None
        decoded = complete(self._engines.decode, tokens, max_tokens=self._tokens, kv_transfer_params=params)
        return decoded.json()["choices"][0]["token_ids"] if decoded.status_code == 200 else None


def replaced(daemon: DaemonService, pid: int) -> None:
    eventually(lambda: serving(daemon) != pid, "another daemon serves")
