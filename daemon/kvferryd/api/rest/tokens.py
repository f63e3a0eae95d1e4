"""Bearer tokens from a file that may be replaced while the daemon runs."""

from __future__ import annotations

import hmac
from pathlib import Path

from kvferryd import logs

log = logs.get(__name__)


class TokenFile:
    """Tokens, one a line, so that a new one can be let in before the old one goes.

    The file is looked at on every request and read when it changed. While it cannot be read nobody is let in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._tokens: list[bytes] = []
        self._readable = True

    def accepts(self, token: str) -> bool:
        """Whether it is one of the tokens, in a time that does not depend on how much of it is right."""
        given = token.encode("utf-8", "surrogateescape")
        found = False
        for held in self._current():
            found |= hmac.compare_digest(held, given)
        return found

    def _current(self) -> list[bytes]:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen != self._seen:
                self._tokens = [line.strip() for line in self._path.read_bytes().splitlines() if line.strip()]
                self._seen = seen
            self._readable = True
        except OSError as error:
            if self._readable:
                log.error(
                    "the token file cannot be read, nobody is let in", path=str(self._path), reason=error.strerror
                )
            self._readable, self._seen, self._tokens = False, None, []
        return self._tokens
