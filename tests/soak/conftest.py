"""The soaks use the helpers of tests/faults and tests/engines."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("faults", "engines")]
