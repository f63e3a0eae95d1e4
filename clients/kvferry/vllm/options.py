"""kv_connector_extra_config: what can be set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvferry.errors import Malformed, first_breach
from kvferry.sockets import beside

Seconds = Annotated[float, Field(ge=0, le=86400)]


class Options(BaseModel):
    """docs/vllm.md explains when to change which."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: str = "/run/kvferry/engine.sock"
    """The socket of the daemon beside a worker: {rank} (of the engine), {local_rank} (of the host), {dp_rank},
    {gpu_uuid} (of the worker's GPU: `kvferry host` names sockets so)."""
    connect_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    load_timeout_s: Seconds = 0.0
    """How long KV may take to arrive; 0 for the daemon's default."""
    lease_ttl_s: Seconds = 0.0
    """How long finished KV is kept for a reader that does not come; 0 for the daemon's default."""
    memory: Literal["owned", "adopted"] = "owned"
    """Which process allocates the cache: the daemon, or vLLM, which hands it over (GPU only)."""
    progressive: bool = False
    """Publish every chunk of a chunked prefill, for routers that start both legs at once."""
    second_turn: bool = False
    """Keep the KV of what was decoded here, for the prefill of the conversation's next turn."""
    fingerprint: str = ""
    """The fingerprint of both sides; empty: derived from the model's configuration and weights."""

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> Options:
        """Raises KvferryError (`bad_option`) naming the option."""
        try:
            return cls.model_validate(extra)
        except ValidationError as error:
            remedy = f"one of {', '.join(cls.model_fields)}: see docs/vllm.md"
            raise first_breach(error, "kv_connector_extra_config", "bad_option", remedy) from None

    def socket_of(self, rank: int, world_size: int, local_rank: int, dp_rank: int, gpu: int | None = None) -> str:
        """gpu: of the worker, as this process counts; None on the CPU. Raises KvferryError (`bad_option`)."""
        socket = beside(self.socket, gpu)
        try:
            path = socket.format(rank=rank, local_rank=local_rank, dp_rank=dp_rank)
        except (KeyError, IndexError, ValueError):
            path = ""
        if not path or (world_size > 1 and path == self.socket):
            what = f"every one of {world_size} ranks needs a daemon of its own"
            remedy = "name them apart, for example /run/kvferry/engine-{rank}.sock"
            field = "kv_connector_extra_config.socket"
            raise Malformed("bad_option", what, field=field, value=self.socket, remedy=remedy)
        return path
