"""Hints on this API for schemathesis: names of what is there and hostile addresses are worth trying, and waiting is
not; and what counts as a fault."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis

KNOWN = json.loads(os.environ.get("HOSTILE_KNOWN", "{}"))


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
def map_path_parameters(context: Any, parameters: Any) -> Any:
    return _some_known(parameters)


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    if isinstance(query, dict) and isinstance(query.get("wait"), float | int) and query["wait"] > 0:
        query["wait"] = 0.01
    return _some_known(query)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict):
        if isinstance(body.get("wait_s"), float | int) and body["wait_s"] > 0:
            body["wait_s"] = 0.01
        for holder in (body, body.get("source"), body.get("destination")):
            _some_known(holder)
    return body


def _some_known(holder: Any) -> Any:
    """Half of the texts by which something is looked up name what is there; no address is any but these."""
    for name in KNOWN.keys() & holder.keys() if isinstance(holder, dict) else ():
        drawn = zlib.crc32(repr(holder).encode())
        if isinstance(holder[name], str) and 0 < len(holder[name]) <= 256 and (drawn % 2 or name == "address"):
            holder[name] = KNOWN[name][drawn // 2 % len(KNOWN[name])]
    return holder
