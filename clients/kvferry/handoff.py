"""kv_transfer_params: what routers carry between engines.

The names are vLLM's; `remote_epoch`, `remote_lease`, `remote_room`, `remote_first_token` and `order` are our own. The
object comes from a public request body: every field is checked, and whatever it holds, only its own request can fail by
it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvferry.errors import Conflict, KvferryError, Malformed, first_breach
from kvferry.schemas import MAX_NUMBER, MAX_REQUEST_ID, SourceBody

PARAMS = "kv_transfer_params"
MALFORMED = "malformed_kv_transfer_params"
REMEDY = "hand over the object that the prefill answered with, unchanged"
Name = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID)]
V = TypeVar("V")
REMEMBERED = 1 << 16
"""Requests that are remembered: as many as by a daemon, which refuses an attempt whose number it has seen."""
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]


class Handoff(BaseModel):
    """do_remote_decode: keep the KV for another engine. do_remote_prefill: read it from one.

    The answer to a prefill has do_remote_prefill set, so that a router hands it to decode as it is. A request that
    names a source and asks for do_remote_decode reads first and keeps afterwards: the second turn of a conversation.
    order = "router": the router orders the transfer with POST /v1/transfers, so no source is named here.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_host: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[0-9A-Za-z._:-]+$")] | None = None
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    remote_epoch: Name | None = None
    remote_lease: Annotated[int, Field(ge=1, lt=MAX_NUMBER)] | None = None
    remote_block_ids: Annotated[list[list[int]], Field(max_length=1024)] | None = None
    remote_num_tokens: TokenCount | None = None
    remote_room: TokenCount | None = None
    remote_first_token: TokenCount | None = None
    tp_size: Annotated[int, Field(ge=1)] | None = None
    dcp_size: Annotated[int, Field(ge=1)] | None = None
    pp_size: Annotated[int, Field(ge=1)] | None = None
    transfer_mode: Literal["read"] | None = None
    order: Literal["router"] | None = None

    @classmethod
    def parse(cls, data: Any, *, json: bool = False) -> Handoff:
        """json: `data` is JSON text. Raises KvferryError (`malformed_kv_transfer_params`) naming the field."""
        try:
            return cls.model_validate_json(data) if json else cls.model_validate(data)
        except ValidationError as error:
            raise first_breach(error, PARAMS, MALFORMED, REMEDY) from None

    @property
    def reads(self) -> bool:
        """Whether KV is to be read from another engine."""
        return self.do_remote_prefill or (self.do_remote_decode and self.remote_engine_id is not None)

    def source(self) -> SourceBody | None:
        """The source to read from; None when a router orders the transfer. Only where something `reads`.

        Raises KvferryError (`malformed_kv_transfer_params`) when the source is not fully named.
        """
        if self.order == "router":
            return None
        for field in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
            if getattr(self, field) is None:
                raise _malformed(field, None, 'required to read from another engine, unless order is "router"')
        host = f"[{self.remote_host}]" if ":" in str(self.remote_host) else self.remote_host
        try:
            return SourceBody.model_validate({
                "engine_id": str(self.remote_engine_id), "address": f"{host}:{self.remote_port}",
                "epoch": self.remote_epoch, "lease": self.remote_lease,
            })  # fmt: skip
        except ValidationError as error:
            raise _malformed("remote_host", self.remote_host, str(error.errors()[0]["msg"])) from None

    def origin(self, request_id: str, num_prompt_tokens: int, digest_of: Callable[[int], bytes]) -> Origin | None:
        """The source of a first part of the prompt; None for a request that is prefilled here.

        digest_of: the digest of so many first tokens of this engine's own prompt. Raises KvferryError as `source`, and
        `other_prompt` when more tokens were published than the prompt has.
        """
        if not self.reads:
            return None
        source = self.source()
        num_tokens = num_prompt_tokens if self.remote_num_tokens is None else self.remote_num_tokens
        if num_tokens > num_prompt_tokens:
            raise Conflict(
                "other_prompt", f"the {PARAMS} are those of {num_tokens} tokens, this prompt has {num_prompt_tokens}",
                field=f"{PARAMS}.remote_num_tokens", value=num_tokens,
                remedy="send them with the prompt that was prefilled, or with one that continues it",
            )  # fmt: skip
        digest = digest_of(num_tokens) if num_tokens else b""
        name = self.remote_request_id or lease_name(request_id)
        return Origin(name, num_tokens, source, self.remote_room or 0, digest)


@dataclass(frozen=True, slots=True)
class Origin:
    """The KV of the first `num_tokens` tokens, published as `request_id` at `source` (None: a router will order it).

    room: for how many tokens its blocks have room, all of which may be read; what lies after the first `num_tokens`
    means nothing. 0 where the source did not send it. digest: of what the source must have computed;
    empty where nothing is to be read.
    """

    request_id: str
    num_tokens: int
    source: SourceBody | None
    room: int = 0
    digest: bytes = b""


def lease_name(request_id: str) -> str:
    """The request id by which daemons know a request of an engine.

    Engines make theirs of a client's header, which may be longer than a daemon takes, or no Unicode: such an id is cut,
    and its digest keeps it apart from others.
    """
    said = request_id.encode(errors="backslashreplace").decode()
    if said == request_id and len(request_id) <= MAX_REQUEST_ID:
        return request_id
    digest = hashlib.sha256(said.encode()).hexdigest()
    return f"{said[: MAX_REQUEST_ID - len(digest) - 1]}-{digest}"


class Remembered(OrderedDict[str, V]):
    """Something about each of the last requests, by request id."""

    def __setitem__(self, request_id: str, value: V) -> None:
        super().__setitem__(request_id, value)
        self.move_to_end(request_id)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


def answer(
    *, engine_id: str, epoch: str, address: str, request_id: str, lease: int, block_ids: Sequence[Sequence[int]],
    num_tokens: int, tp: int, second_turn: bool, room: int = 0, first_token: int | None = None,
) -> Handoff:  # fmt: skip
    """Parameters with which another engine reads the request.

    address: host:port of a daemon's peer service. request_id: the engine's. lease: its number. room: as of Origin.
    first_token: the one that follows these tokens, for an engine that computes nothing of the prompt.
    """
    host, _, port = address.rpartition(":")
    return Handoff(
        do_remote_prefill=not second_turn, do_remote_decode=second_turn, remote_engine_id=engine_id,
        remote_request_id=lease_name(request_id), remote_host=host.strip("[]"), remote_port=int(port),
        remote_block_ids=[list(ids) for ids in block_ids], remote_num_tokens=num_tokens, remote_room=room or None,
        remote_first_token=first_token, remote_epoch=epoch, remote_lease=lease, tp_size=tp, dcp_size=1, pp_size=1,
        transfer_mode="read",
    )  # fmt: skip


def _malformed(name: str, value: object, why: str) -> KvferryError:
    field = f"{PARAMS}.{name}"
    return Malformed(MALFORMED, f"{field}: {why}", field=field, value=value, remedy=REMEDY)
