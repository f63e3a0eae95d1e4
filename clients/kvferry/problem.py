"""What a daemon's answer means when it is not the one that was asked for: problem+json, refusals, strangers."""

from __future__ import annotations

import json
import math

import httpx
from pydantic import ValidationError

from kvferry.errors import Kind, KvferryError, Refusal
from kvferry.schemas import Problem, RefusalBody


class DaemonError(KvferryError):
    """What a daemon answered, or that it did not.

    status: the HTTP status, 0 when no answer came. retry_after_s: set when the daemon is full (429) or draining.
    Codes of our own: `daemon_unreachable`, `daemon_timeout`, `malformed_answer`; all others are the daemon's.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int = 0,
        retry_after_s: float | None = None,
        field: str = "",
        value: object = "",
        remedy: str = "",
        refusals: tuple[Refusal, ...] = (),
    ) -> None:
        super().__init__(code, message, field=field, value=value, remedy=remedy, refusals=refusals)
        self.kind = Kind.of_http(status)
        self.status = status
        self.retry_after_s = retry_after_s


def problem(response: httpx.Response) -> DaemonError:
    """The error that a response of 400 and above stands for."""
    try:
        parsed = json.loads(response.content)
        if isinstance(parsed, dict) and parsed.get("refused"):
            return refused(response.status_code, parsed["refused"])
        body = Problem.model_validate(parsed)
    except (ValueError, RecursionError) as error:
        return malformed(response, error)
    return DaemonError(
        body.code,
        body.detail or body.title,
        status=response.status_code,
        retry_after_s=_retry_after(response),
        field=body.field,
        value=body.value,
        remedy=body.remedy,
        refusals=tuple(_refusal(refusal) for refusal in body.refusals),
    )


def refused(status: int, entries: object) -> DaemonError:
    """explain's own form of a refusal: {"refused": [...]}."""
    try:
        bodies = [RefusalBody.model_validate(entry) for entry in entries] if isinstance(entries, list) else []
    except ValidationError:
        bodies = []
    code = bodies[0].code if bodies else "refused"
    return DaemonError(
        code, "the pair is refused", status=status, refusals=tuple(_refusal(body) for body in bodies),
        remedy="make both sides agree on what the refusals name",
    )  # fmt: skip


def _refusal(body: RefusalBody) -> Refusal:
    return Refusal(body.code, body.component, body.source, body.destination)


def malformed(response: httpx.Response, error: Exception) -> DaemonError:
    start = response.content[:120].decode(errors="replace")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DaemonError(
        "malformed_answer",
        f"{response.request.method} {response.request.url} answered {response.status_code} with something that is "
        f"not kvferry's: {reason}",
        status=response.status_code,
        field="body",
        value=start,
        remedy="is this the daemon's REST address, of a daemon that speaks /v1?",
    )


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
