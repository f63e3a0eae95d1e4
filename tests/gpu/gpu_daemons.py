"""Daemons beside GPUs, as the modules of this folder start them."""

from __future__ import annotations

import uuid

from kvferryd.demo.fleet import DaemonService, Fleet


async def daemon(
    fleet: Fleet, name: str, gpu: int | None, *flags: str, roster: DaemonService | None = None
) -> DaemonService:
    """gpu: None is a daemon of host memory."""
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    started = fleet.daemon(f"{name}-{uuid.uuid4().hex[:4]}", roster=roster, flags=["--device", device, *flags])
    await fleet.ready(started, timeout_s=60)
    return started
