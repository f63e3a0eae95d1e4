"""KVFERRY_SGLANG_*: what can be set. SGLang has no place for a backend's own options, so it is the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvferry.errors import Malformed, first_breach
from kvferry.schemas import MAX_REQUEST_ID
from kvferry.sockets import GPU_UUID, beside

PREFIX = "KVFERRY_SGLANG_"


class Options(BaseModel):
    """docs/sglang.md explains when to change which."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda name: PREFIX + name.upper())

    socket: str = "/run/kvferry/engine.sock"
    """The socket of the daemon beside a rank; {rank} stands for the rank's number in its DP rank, {dp_rank} for that
    one's, {gpu_uuid} for its GPU's UUID, by which `kvferry host` names sockets."""
    engine_id: Annotated[str, Field(max_length=MAX_REQUEST_ID)] = ""
    """Names this engine to daemons; empty: made of the host's name and the port."""
    connect_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    lease_ttl_s: Annotated[float, Field(ge=0, le=86400)] = 0.0
    """How long finished KV is kept for a reader that does not come; 0 for the daemon's default."""
    fingerprint: str = ""
    """Both sides must have it in common; empty: derived from the model's configuration and weights."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Raises KvferryError (`bad_option`) naming the variable."""
        try:
            return cls.model_validate({name: value for name, value in environment.items() if name.startswith(PREFIX)})
        except ValidationError as error:
            remedy = f"{PREFIX} and one of {', '.join(cls.model_fields).upper()}: see docs/sglang.md"
            raise first_breach(error, "environment", "bad_option", remedy) from None

    def socket_of(self, rank: int, ranks: int, dp_rank: int = 0, dp_ranks: int = 1, gpu: int | None = None) -> str:
        """gpu: of the rank, as this process counts; None on the CPU. Raises KvferryError (`bad_option`)."""
        needed = {"{rank}": ranks > 1, "{dp_rank}": dp_ranks > 1}
        missing = [name for name, several in needed.items() if several and name not in self.socket]
        if missing and GPU_UUID not in self.socket:
            what = f"every one of {ranks * dp_ranks} ranks needs a daemon of its own"
            remedy = f"name them apart by {' and '.join(missing)}, for example /run/kvferry/engine-{missing[0]}.sock"
            raise Malformed("bad_option", what, field=f"{PREFIX}SOCKET", value=self.socket, remedy=remedy)
        return beside(self.socket.replace("{rank}", str(rank)).replace("{dp_rank}", str(dp_rank)), gpu)
