"""The path at which a rank finds the daemon of its GPU."""

from __future__ import annotations

from kvferry.errors import Malformed
from kvferry.memory import cuda

GPU_UUID = "{gpu_uuid}"
"""In the path of a socket; `kvferry host` names sockets by it."""


def beside(path: str, index: int | None) -> str:
    """A path with the UUID of a GPU for GPU_UUID. index: as this process counts GPUs; None for an engine on the CPU.

    Raises KvferryError (`bad_option`, `cuda_missing`, `unknown_gpu`).
    """
    if GPU_UUID not in path:
        return path
    if index is None:
        what, remedy = "an engine on the CPU has no GPU", "name its daemon's socket: /run/kvferry/cpu-{rank}.sock"
        raise Malformed("bad_option", what, field="socket", value=path, remedy=remedy)
    return path.replace(GPU_UUID, cuda.device(f"cuda:{index}").uuid)
