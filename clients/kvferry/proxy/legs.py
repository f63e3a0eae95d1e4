"""The two legs of a request, as JSON: pure functions over the client's body.

`kv_transfer_params` is an opaque object that passes verbatim from prefill's answer to decode's request. A client
cannot bring its own: its coordinates would be dialled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeAlias

import httpx

from kvferry.errors import KvferryError, Malformed, PeerFailed
from kvferry.handoff import MALFORMED, PARAMS, Handoff
from kvferry.schemas import OrderBody

JsonObject: TypeAlias = Mapping[str, object]
EXTRA = "vllm_xargs"
ASK_TO_PUBLISH: JsonObject = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def read_body(content: bytes) -> JsonObject:
    """The client's JSON object. Raises KvferryError `malformed_json`."""
    try:
        body = json.loads(content, parse_constant=_no_constant, parse_float=_finite)
        if not isinstance(body, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise _no_object(error) from None
    return body


def encode(leg: JsonObject) -> bytes:
    """An engine's body: ASCII, as half a character is legal JSON and no UTF-8. Raises KvferryError `malformed_json`
    where a client's body is nested too deeply."""
    try:
        return json.dumps(leg, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _no_object(error) from None


def prefill_body(body: JsonObject) -> dict[str, object]:
    """A single token, not streamed, and please publish.

    Several prompts count by their first: one kv_transfer_params object describes the KV of one, and decode computes the
    others.
    """
    leg = {key: value for key, value in _own(body).items() if key != "stream_options"}
    leg |= {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, PARAMS: dict(ASK_TO_PUBLISH)}
    if "min_tokens" in leg:
        leg["min_tokens"] = 1
    prompt = leg.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        leg["prompt"] = prompt[0]
    return leg


def decode_body(body: JsonObject, params: JsonObject | None, *, ordered: bool) -> dict[str, object]:
    """The client's body and what prefill answered. `ordered`: the router orders; the engine only reserves blocks."""
    leg = _own(body)
    if params is not None:
        leg[PARAMS] = {**params, "order": "router"} if ordered else dict(params)
    return leg


def _own(body: JsonObject) -> dict[str, object]:
    """The client's body without coordinates: neither as such, nor where vLLM takes extra arguments from."""
    kept = {key: value for key, value in body.items() if key != PARAMS}
    extra = kept.get(EXTRA)
    if isinstance(extra, Mapping):
        kept[EXTRA] = {key: value for key, value in extra.items() if key != PARAMS}
    return kept


def published(response: httpx.Response) -> JsonObject | None:
    """prefill's `kv_transfer_params`; None when it published nothing.

    Raises KvferryError: `malformed_answer`, `malformed_kv_transfer_params`.
    """
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise PeerFailed(
            "malformed_answer", f"the prefill engine answered with something that is not JSON: {error}",
            field="prefill", value=str(response.url), remedy="is this an OpenAI-compatible engine?",
        ) from None  # fmt: skip
    params = answer.get(PARAMS) if isinstance(answer, Mapping) else None
    if params is None:
        return None
    try:
        if not isinstance(params, Mapping):
            raise ValueError("it is not an object")
        json.dumps(params, allow_nan=False, ensure_ascii=False).encode()  # or no engine and no daemon can be sent them
    except (ValueError, RecursionError) as error:
        raise _bad_params(PARAMS, params, str(error)) from None
    return params


def lease_name(params: JsonObject | None) -> str:
    """The lease's request_id, which the transfer carries too; empty when the engine named none."""
    value = (params or {}).get("remote_request_id")
    return value if isinstance(value, str) else ""


def order(params: JsonObject) -> OrderBody:
    """The order for the decode side's daemon. Raises KvferryError naming the field that cannot be used."""
    handoff = Handoff.parse(params)
    source = handoff.source()
    if source is None:
        raise _bad_params(f"{PARAMS}.order", handoff.order, "it names no source")
    return OrderBody(request_id=lease_name(params), source=source)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is more than a number can be")
    return number


def _no_object(error: Exception) -> KvferryError:
    remedy = 'send an object such as {"model": "m", "prompt": "Once"}'
    return Malformed("malformed_json", f"the body is no JSON object: {error}", remedy=remedy)


def _bad_params(field: str, value: object, why: str) -> KvferryError:
    what = f"prefill answered with a {field} that cannot be used: {why}"
    remedy = "does the prefill engine run a kvferry plug-in that is attached to a daemon?"
    return PeerFailed(MALFORMED, what, field=field, value=value, remedy=remedy)
