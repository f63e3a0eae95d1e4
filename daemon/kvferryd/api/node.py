"""The memory of this daemon's engines for the other daemons of its node: descriptors at a socket in the folder that
they share. No namespace need be common. The ticket for them is told to a peer that has proven itself, over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kvferry.errors import Unavailable
from kvferry.file import File
from kvferry.memory.handover import SUFFIX
from kvferryd.api.handover import Handovers
from kvferryd.config import bad_config
from kvferryd.memory.node import NodeDir, is_dead
from kvferryd.observe import logs

log = logs.get(__name__)
MOST = 4096
"""Descriptors that are offered to a peer at once."""


class NodeSocket:
    def __init__(self, node: NodeDir, gpu: str) -> None:
        """gpu: the UUID of the daemon's."""
        self._node, self._folder, self._gpu, self._handovers = node, node.folder, gpu, Handovers(most=MOST)
        self.name = node.socket_name(gpu)
        """Told to peers: the socket's file has SUFFIX behind it."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Raises KvferryError (`bad_config`)."""
        path = self._folder / f"{self.name}{SUFFIX}"
        async with AsyncExitStack() as stack:
            try:
                self._sweep()
                # It has SUFFIX once it listens: a socket with SUFFIX at which nobody listens is a dead daemon's.
                serving = self._handovers.serving(path, made_at=self._folder / self.name)
                await stack.enter_async_context(serving)
            except OSError as error:
                remedy = "name a folder that this user may write to, and that the other daemons of the node have too"
                raise bad_config(
                    "node_dir", self._folder, f"it holds no socket: {error.strerror or error}", remedy
                ) from None
            yield

    def offer(self, session: str, files: Sequence[File]) -> str:
        """A ticket for copies of the files, which a peer fetches once, within seconds, naming this session. Raises
        KvferryError (`too_many_files`, `handover_failed`).

        A socket that somebody has removed is made again here, as a cleaner of old files does."""
        try:
            self._handovers.listen_again()
        except OSError as error:
            why = f"its socket in {self._folder} is gone, and cannot be made again: {error.strerror or error}"
            remedy = "make the folder of node_dir again, as the daemons' user's, where no cleaner looks"
            raise Unavailable(
                "handover_failed", why, field="node_dir", value=str(self._folder), remedy=remedy
            ) from None
        return self._handovers.offer(session, files)

    def withdraw(self, session: str) -> None:
        """Files that nobody has fetched are closed. Idempotent."""
        self._handovers.withdraw(session)

    def _sweep(self) -> None:
        """Remove what killed daemons of this node have left. Raises OSError."""
        for path in self._node.of_before(self._gpu):
            self._remove(path)
        for path in self._node.of_this_kernel():
            if path.suffix == SUFFIX and is_dead(path):  # without SUFFIX it may be about to listen
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # another user's, in a folder where each removes only what is its own
            log.warning("a dead daemon's socket cannot be removed", path=str(path), error=str(error))
        else:
            log.info("removed a dead daemon's socket", path=str(path))
