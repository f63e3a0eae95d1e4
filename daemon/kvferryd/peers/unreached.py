"""Why a call to another daemon came to nothing, in words for its operator: gRPC's own name the call that failed.

There are five usual ends: refused, no route, silence, no kvferry peer port, and a proof that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl

import grpc

from kvferry.errors import PeerFailed
from kvferry.rpc import PROBLEM_KEY
from kvferryd.config.types import split_address
from kvferryd.peers.certificates import names_in

DIALLING = "failed to connect to all addresses"
"""gRPC says so where a connection was never made."""
LOOK_S = 1.0
"""The longest look at the certificate that another daemon shows."""
PING_S = 4.5
"""The silence after which a connection is given up: `kvferry.rpc.PEER_OPTIONS`."""
NO_ROUTE = re.compile("no route to host|network is unreachable|host is unreachable|host is down|timed? ?out", re.I)
NO_NAME = re.compile("address lookup failed|DNS resolution failed|domain name not found|errors resolving", re.I)
NO_PEER = re.compile("failed parsing HTTP/2|expected SETTINGS frame|http1|WRONG_VERSION_NUMBER", re.I)
NO_PROOF = re.compile("hostname verification|TLS handshake failed", re.I)
REASON = re.compile(r"OPENSSL_internal:\w+: ([^:]+)")
UNKNOWN_AUTHORITY = re.compile("issuer certificate|self.signed|signature failure", re.I)
SAME_PROOF = "both need one peer_secret_file; or, with tls_*, tls_ca the authority that signed the other's certificate"


def silent(address: str, for_s: float) -> PeerFailed:
    """Nothing comes back from there."""
    remedy = "see whether its daemon or its host stands still, or a firewall drops what is sent there"
    why = f"{address} has not answered for {for_s:.1f} s"
    return _failed("peer_unreachable", address, why, remedy)


async def unreached(error: grpc.aio.AioRpcError, address: str, expected: str, took_s: float) -> PeerFailed | None:
    """The error for a call that failed before the daemon there answered; None where it is none of the usual ones.

    expected: the name for which the other's certificate must be; empty where this daemon asks for no proof.
    """
    if any(key == PROBLEM_KEY for key, _ in error.trailing_metadata() or ()):
        return None  # it has answered
    details, status = error.details() or "", error.code()
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return silent(address, took_s)
    if status is not grpc.StatusCode.UNAVAILABLE:
        return None
    if "ping timeout" in details or "watchdog" in details:
        return silent(address, PING_S)
    if "onnection refused" in details:
        remedy = "see whether its daemon runs, and whether this is its `peer` address"
        return _failed("peer_unreachable", address, f"nobody listens at {address}: the connection was refused", remedy)
    if NO_NAME.search(details):
        why, remedy = f"nobody knows the name in {address}", "correct it, or see whether this host's resolver works"
        return _failed("peer_unreachable", address, why, remedy)
    if NO_PEER.search(details):
        return _no_peer(address, expected)
    if NO_PROOF.search(details):
        return await _unproven(address, expected, details)
    if NO_ROUTE.search(details):
        remedy = "see whether its host is up, and what is between the two: routes, firewalls, network policies"
        return _failed("peer_unreachable", address, f"there is no way to {address}: {_last(details)}", remedy)
    if DIALLING in details and "ocket closed" in details:
        return await _hung_up(address, expected)
    return None


def _failed(code: str, address: str, why: str, remedy: str) -> PeerFailed:
    return PeerFailed(code, why, field="address", value=address, remedy=remedy)


def _no_peer(address: str, expected: str) -> PeerFailed:
    why = f"what listens at {address} is no kvferry peer port"
    remedy = "name the `peer` address of its daemon (port 7411 by default): is this the REST port, or another service?"
    if expected:
        why += ", or its daemon asks for no proof while this one does"
        remedy += f" For a proof {SAME_PROOF}"
    return _failed("peer_unreachable", address, why, remedy)


async def _unproven(address: str, expected: str, details: str) -> PeerFailed:
    shown = await _shown(address) or "a name that cannot be read"
    found = REASON.search(details)
    if found is None:
        remedy = f"issue its certificate for {expected} too, or let it advertise a name that its certificate is for"
        why = "it is for another name"
    elif UNKNOWN_AUTHORITY.search(found[1]):
        why, remedy = "an authority has signed it that this daemon does not know", SAME_PROOF
    else:
        why, remedy = found[1].strip(), "renew it (its daemon reads the files again), or set the clocks"
    said = f"{address} does not prove itself: a certificate for {expected} was expected, one for {shown} was shown"
    return _failed("proof_failed", address, f"{said}: {why}", remedy)


async def _hung_up(address: str, expected: str) -> PeerFailed:
    """It ended the connection before a call was answered, as a daemon does that takes our proof for none."""
    shown = await _shown(address)
    if not shown:
        why = f"{address} ended the connection before it said anything"
        remedy = "see whether a kvferry daemon of this version listens there, and its log"
        return _failed("peer_unreachable", address, why, remedy)
    if not expected:
        why = f"{address} asks for a proof, and this daemon has none: it shows a certificate for {shown}"
        remedy = "set peer_secret_file, or tls_cert, tls_key and tls_ca, as there"
    else:
        why = f"{address} ended the connection when it was shown this daemon's certificate; its own is for {shown}"
        remedy = SAME_PROOF
    return _failed("proof_failed", address, why, remedy)


async def _shown(address: str) -> str:
    """The names in the certificate that is shown there, whoever signed it; empty where none is. Nothing of ours is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = split_address(address)
    with contextlib.suppress(OSError, TimeoutError):  # ssl.SSLError is an OSError
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return ", ".join(names_in(ssl.DER_cert_to_PEM_cert(shown).encode())) if shown else ""
    return ""


def _last(details: str) -> str:
    """The system's words on the last of its addresses."""
    return details.rpartition("host: ")[2] if "host: " in details else details
