"""File handles of a process: those that it begins with, and how many it may have."""

from __future__ import annotations

import errno
import os
import resource

from kvferry.errors import Full

DESCRIPTORS = 65_536
"""The limit is raised to so many. The usual 1,024 are for programs that use select()."""


def raise_limit() -> int:
    """As far as this user may, at most to DESCRIPTORS; returns the limit."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if now == resource.RLIM_INFINITY or now >= wanted:
        return now if now != resource.RLIM_INFINITY else DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return wanted


def shortage(error: BaseException) -> Full | None:
    """The error for a lack of file handles, with this process's limit; None for every other exception."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    why = "this process may have no more files open"
    remedy = "raise the limit: ulimit -n, LimitNOFILE= of a unit, ulimits of a container"
    return Full("out_of_descriptors", why, field="RLIMIT_NOFILE", value=limit, remedy=remedy)


def open_standard() -> None:
    """Open 0, 1 and 2 on /dev/null where this process was started without them. Their numbers would go to what it opens
    first otherwise, and lines of the log there: to a connection."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
