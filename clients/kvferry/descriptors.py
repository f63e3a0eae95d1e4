"""File handles of a process that has many connections."""

from __future__ import annotations

import resource

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
