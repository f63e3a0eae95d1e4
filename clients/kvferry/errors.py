"""The errors of the project: a kind, a stable code, what was wrong, and what to do about it.

REST answers with these fields as problem+json, gRPC as a `Problem` message, the command line as text. The kind of an
error decides its status. An error that arrives from another process has the class with which it was raised there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

if TYPE_CHECKING:
    from typing import Self

    from pydantic import ValidationError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason why a source and a destination cannot be paired, with both values."""

    code: str
    component: str
    source: str
    destination: str

    def __str__(self) -> str:
        where = f"component {self.component}: " if self.component else ""
        return f"{where}{self.code}: source has {self.source}, destination has {self.destination}"


Refusals: TypeAlias = tuple[Refusal, ...]
LONGEST = 4000
"""The most characters of a text in an error, which may hold what another process sent."""


class Kind(enum.Enum):
    """The kind of a fault, with its HTTP status and the name of its gRPC status."""

    MALFORMED = 422, "INVALID_ARGUMENT"
    UNAUTHORIZED = 401, "UNAUTHENTICATED"
    FORBIDDEN = 403, "PERMISSION_DENIED"
    NOT_FOUND = 404, "NOT_FOUND"
    CONFLICT = 409, "FAILED_PRECONDITION"
    FULL = 429, "RESOURCE_EXHAUSTED"
    INTERNAL = 500, "INTERNAL"
    PEER_FAILED = 502, "UNAVAILABLE"
    UNAVAILABLE = 503, "UNAVAILABLE"
    DEADLINE = 504, "DEADLINE_EXCEEDED"

    def __init__(self, http: int, grpc: str) -> None:
        self.http, self.grpc = http, grpc

    @classmethod
    def of_http(cls, status: int) -> Kind:
        """0: there was no answer."""
        default = cls.MALFORMED if 400 <= status < 500 else cls.INTERNAL if status else cls.UNAVAILABLE
        return next((kind for kind in cls if kind.http == status), default)


class Details(TypedDict, total=False):
    """The optional fields of an error."""

    field: str
    value: object
    remedy: str
    refusals: Refusals


class KvferryError(Exception):
    """Any error of kvferry. Only the subclasses below are raised.

    kind: decides the status. code: stable, snake_case, for programs. message: one sentence for people. field and
    value: the one field that was wrong, if it was one. remedy: what to do. refusals: why a pair was refused; the
    message names the first of them.
    """

    kind: Kind = Kind.INTERNAL

    def __init__(
        self, code: str, message: str, *, field: str = "", value: object = "", remedy: str = "", refusals: Refusals = ()
    ) -> None:
        self.code = code
        self.message = shorten(message, LONGEST)
        self.field = shorten(field, LONGEST)
        self.value = shorten(value)
        self.remedy = shorten(remedy, LONGEST)
        super().__init__(self.message)
        self.refusals = refusals

    def __str__(self) -> str:
        parts = [self.message]
        if self.field:
            parts.append(f"({self.field} = {self.value})")
        if self.remedy:
            parts.append(f"-> {self.remedy}")
        return " ".join(parts)

    def kept(self) -> Self:
        """This error, for a record that outlives the call: without the frames it was raised through, and what lives in
        them, such as calls, which hold connections."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class Malformed(KvferryError):
    """The request is wrong in itself: repeating it does not help."""

    kind = Kind.MALFORMED


class Unauthorized(KvferryError):
    """The caller did not prove its identity."""

    kind = Kind.UNAUTHORIZED


class Forbidden(KvferryError):
    """The caller is not allowed to do that."""

    kind = Kind.FORBIDDEN


class NotFound(KvferryError):
    """There is nothing here with the given name or id."""

    kind = Kind.NOT_FOUND


class Conflict(KvferryError):
    """The request contradicts the current state."""

    kind = Kind.CONFLICT


class Full(KvferryError):
    """A limit is reached: it may be possible later, or with less."""

    kind = Kind.FULL


class Internal(KvferryError):
    """This process has a fault."""

    kind = Kind.INTERNAL


class PeerFailed(KvferryError):
    """Another process that is needed failed or cannot be reached."""

    kind = Kind.PEER_FAILED


class Unavailable(KvferryError):
    """It cannot be done yet, or not any more."""

    kind = Kind.UNAVAILABLE


class Deadline(KvferryError):
    """It was not done in time."""

    kind = Kind.DEADLINE


CLASSES = {each.kind: each for each in KvferryError.__subclasses__()}
"""The class of an error that arrives from another process, by its kind."""


class Caused(KvferryError):
    """An error in which only the class differs from `cause`."""

    def __init__(self, cause: KvferryError) -> None:
        details = Details(field=cause.field, value=cause.value, remedy=cause.remedy, refusals=cause.refusals)
        super().__init__(cause.code, cause.message, **details)
        self.kind = cause.kind


def first_breach(error: ValidationError, root: str, code: str, remedy: str) -> Malformed:
    """The first fault that pydantic found in an object called `root`."""
    first = error.errors(include_url=False)[0]
    field = ".".join([root, *(str(part) for part in first["loc"])])
    return Malformed(code, f"{field}: {first['msg']}", field=field, value=first.get("input", ""), remedy=remedy)


def shorten(value: object, limit: int = 200) -> str:
    """At most `limit` characters of it, as text that any encoding takes: a value from a JSON body may hold lone
    surrogates, written here as `\\ud800`."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
