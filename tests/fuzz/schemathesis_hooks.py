"""Hints on this API for schemathesis: hostile addresses are worth trying, and waiting is not; and what counts as a
fault."""

from __future__ import annotations

import json
import os
from typing import Any

import schemathesis

ADDRESSES = json.loads(os.environ.get("HOSTILE_ADDRESSES", "[]"))


@schemathesis.hook
def before_load_schema(context: Any, schema: dict[str, Any]) -> None:
    """schemathesis 4.32 cannot read its own form of prefixItems. Ours are pairs of one type."""
    _plain(schema)


def _plain(node: Any) -> None:
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _plain(each)
    if isinstance(node, dict) and "prefixItems" in node:
        node["items"] = node.pop("prefixItems")[0]


@schemathesis.check
def no_fault_of_its_own(context: Any, response: Any, case: Any) -> None:
    """502 to 504 are documented answers: of a peer, of a daemon that drains, of what takes too long."""
    assert response.status_code < 500 or response.status_code in (502, 503, 504), response.text


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    if isinstance(query, dict) and isinstance(query.get("wait"), float | int) and query["wait"] > 0:
        query["wait"] = 0.01
    return query


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("wait_s"), float | int) and body["wait_s"] > 0:
        body["wait_s"] = 0.01
    for holder in (body, body.get("source")):
        if isinstance(holder, dict) and isinstance(holder.get("address"), str) and ADDRESSES:
            holder["address"] = ADDRESSES[len(str(body)) % len(ADDRESSES)]
    return body
