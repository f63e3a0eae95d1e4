"""A rank finds the daemon of its GPU by the UUID, however it counts GPUs."""

from __future__ import annotations

import pytest
from needs import GPUS

from kvferry.sockets import beside
from kvferry.vllm.options import Options

pytestmark = pytest.mark.gpu


def test_the_path_has_the_uuid_of_the_gpu() -> None:
    for number, gpu in enumerate(GPUS):
        assert beside("/f/{gpu_uuid}.sock", number) == f"/f/{gpu.uuid}.sock"
        assert Options(socket="/f/{gpu_uuid}.sock").socket_of(number, 8, 0, 0, number) == f"/f/{gpu.uuid}.sock"
