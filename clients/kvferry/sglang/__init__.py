"""SGLang's transfer backend for kvferry.

    python -m sglang.launch_server ... --disaggregation-mode prefill --disaggregation-transfer-backend kvferry

In the scheduler of every rank SGLang makes one manager, which describes the rank's cache to its daemon, a sender for
each request that prefill computes and a receiver for each that decode waits for, and polls them. docs/sglang.md.
"""

from __future__ import annotations

BACKEND = "kvferry"


def register() -> None:
    """Make the backend known to SGLang in this process: the entry point `sglang.srt.plugins`."""
    from kvferry.sglang.patches import install

    install()
