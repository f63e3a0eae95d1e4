"""Host memory: POSIX shared memory, one file per region."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import KvferryError
from kvferry.memory import SharedRegion, open_file_region, open_handed_region
from kvferry.v1 import engine_pb2
from kvferryd.transport import Span

PREFIX = "kvferry-"


@dataclass(slots=True, eq=False)
class HostRegion:
    """A mapped shared file. An owned one has the file's name and lock, and removes both when it closes."""

    shared: SharedRegion
    lock: int | None

    @property
    def slow_source(self) -> str:
        return ""

    @property
    def unmappable(self) -> str:
        return "it is host memory"

    @property
    def owned(self) -> bool:
        return self.lock is not None

    def probe(self) -> None:
        """Peers map GPU memory only."""

    @property
    def span(self) -> Span:
        return Span(self.shared.address, self.shared.nbytes, "host")

    def exported(self, region: int) -> engine_pb2.Memory:
        file = engine_pb2.SharedFile(path=self.shared.path, offset=self.shared.offset)
        return engine_pb2.Memory(region=region, nbytes=self.shared.nbytes, file=file)

    def close(self) -> None:
        self.shared.close()
        if self.lock is not None:
            Path(self.shared.path).unlink(missing_ok=True)
            os.close(self.lock)
            self.lock = None


class HostProvider:
    """Files in `folder`, each held by a lock of its daemon, so that those of a killed one can be told and removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not os.access(folder, os.W_OK | os.X_OK):
            raise KvferryError(
                "bad_config",
                "shm_dir is not a folder to write to",
                field="shm_dir",
                value=folder,
                remedy="mount an emptyDir (medium: Memory) there, or name another folder on tmpfs",
            )
        self._remove_stale()

    def _remove_stale(self) -> None:
        for path in self._folder.glob(f"{PREFIX}*"):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # another user's, or gone by now
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                pass  # its daemon lives
            finally:
                os.close(fd)

    def allocate(self, nbytes: int) -> HostRegion:
        """A new zeroed region. Raises KvferryError (`out_of_memory`) when the file system has no room."""
        path = self._folder / f"{PREFIX}{uuid.uuid4().hex}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not ftruncate: a sparse file on a full tmpfs kills its writer with SIGBUS later.
            os.posix_fallocate(fd, 0, nbytes)
            region = HostRegion(open_file_region(str(path), nbytes), fd)
            region.shared.populate()
            return region
        except BaseException as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if isinstance(error, OSError | OverflowError):  # the latter: more than a file can have
                raise KvferryError(
                    "out_of_memory",
                    f"{self._folder} has no room for {nbytes} bytes: {getattr(error, 'strerror', error)}",
                    field="nbytes",
                    value=nbytes,
                    remedy="enlarge shm_dir (sizeLimit of the emptyDir) or make the cache smaller",
                ) from None
            raise

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> HostRegion:
        """Map a shared file that the engine owns, by its path or handed over. Raises KvferryError."""
        if memory.WhichOneof("kind") == "handed" and len(files) == 1:
            shared = open_handed_region(
                files[0], memory.nbytes, memory.region, memory.handed.offset, sealed=not _of_a_daemon(files[0])
            )
            return HostRegion(shared, None)
        if memory.WhichOneof("kind") != "file":
            raise KvferryError(
                "wrong_memory_kind",
                "a daemon with device = cpu adopts shared files only",
                field="memory.kind",
                value=memory.WhichOneof("kind"),
                remedy="hand over one file or a path, with offset and nbytes, or run with device = cuda:N",
            )
        return HostRegion(open_file_region(memory.file.path, memory.nbytes, memory.region, memory.file.offset), None)

    def close(self) -> None:
        """Nothing of its own: regions belong to their engines."""


def _of_a_daemon(file: int) -> bool:
    """Whether it is a region that a daemon made, which an engine brings when that daemon has gone.

    Such files cannot be sealed; whoever can open one could always have made it shorter.
    """
    return Path(os.readlink(f"/proc/self/fd/{file}")).name.startswith(PREFIX)
