"""vLLM in one process, one model after another: importing vLLM takes longer than loading a small model.

.venv-engines/bin/python tests/engines/in_process.py SOCKET: what `Staged` of architectures.py asks for comes there.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the engine and its worker are processes of their own
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one for GPUs: it has no logits processors such as forced.py's
}

import checkpoints
import torch
from forced import Forced
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

STEP_S = 0.002
ALWAYS: dict[str, Any] = {
    "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 4096, "max_num_batched_tokens": 512,
    "seed": 0, "skip_tokenizer_init": True, "distributed_executor_backend": "uni", "logits_processors": [Forced],
    "disable_log_stats": False,
}  # fmt: skip
if torch.cuda.is_available():
    ALWAYS["gpu_memory_utilization"] = 0.1  # vLLM only checks that so much is free: both engines share a GPU


class Stage:
    """The calls that come by the socket."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    def write(self, name: str, folder: str) -> None:
        checkpoints.main(folder, name)

    def load(self, **options: Any) -> None:
        self.close()
        self._llm = LLM(**ALWAYS | options)

    def close(self) -> None:
        """Also what a model that could not be loaded has left."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()

    def generate(self, tokens: list[int], max_tokens: int, salt: str = "", **extra: Any) -> tuple[list[int], Any]:
        """The tokens, and the answer's kv_transfer_params. salt: the prefix cache gives what has the same one only."""
        assert self._llm is not None
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        asked = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        (answer,) = self._llm.generate(asked, params, use_tqdm=False)
        return list(answer.outputs[0].token_ids), answer.kv_transfer_params

    def step(self) -> None:
        """Requests that are over may still be published, and held, by steps to come."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.engine_core.step()


def main(socket: str) -> None:
    stage = Stage()
    with Client(socket, family="AF_UNIX") as asked:
        asked.send("ready")
        while True:
            while not asked.poll(STEP_S):
                stage.step()
            try:
                call, arguments = asked.recv()
            except EOFError:
                stage.close()
                return
            try:
                asked.send(getattr(stage, call)(**arguments))
            except Exception as error:  # noqa: BLE001  # the test is told
                traceback.print_exc()
                asked.send(RuntimeError(f"{type(error).__name__}: {error}"[:2000]))


if __name__ == "__main__":
    main(sys.argv[1])
