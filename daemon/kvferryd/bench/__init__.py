"""`kvferry bench`: the figures of docs/benchmarks.md, measured side by side in one run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

PARTS = {
    "plan": "the planner: plan of 128 layers x 16 ranks, bind of 80 layers x 512 blocks",
    "host": "host memory: kvferry beside raw NIXL, and the control cost of one transfer",
    "staged": "host memory: direct beside staged for runs of 128 B to 4 KiB, NHD to HND",
    "gpu": "one or two GPUs: the copy ceiling, scattered NIXL reads, and kvferry with every layout change",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for, those that need no GPU by default; 0 when every budget was kept."""
    parser = argparse.ArgumentParser(
        prog="kvferry bench",
        description="Measure this machine. Ratios hold; absolute figures drift with whatever else runs.",
        epilog="parts:\n" + "\n".join(f"  {name:6} {what}" for name, what in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts to run (default: those without a GPU)")
    wanted = parser.parse_args(argv).parts or [name for name in PARTS if name != "gpu"]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}: choose from {', '.join(PARTS)}")
    # Each part has its own imports: the planner is measured without NIXL.
    return max(int(importlib.import_module(f"kvferryd.bench.{name}").main()) for name in wanted)
