"""How long a soak lasts, and what it draws its requests from."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("SOAK") or 60)
"""Seconds of each soak: `make soak` says ten minutes, the gate nothing."""
SEED = int(os.environ.get("SOAK_SEED") or 0) or int.from_bytes(os.urandom(4))
"""Printed; a soak with the same seed draws the same requests, though they meet in another order."""
