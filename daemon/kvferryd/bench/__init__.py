"""`kvferry bench`: the figures of docs/benchmarks.md, measured side by side in one run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS = {
    "plan": "the planner: plan of 128 layers x 16 ranks, bind of 80 layers x 512 blocks",
    "host": "host memory: kvferry beside raw NIXL, and the control cost of one transfer",
    "ways": "direct and staged for runs of 2 B to 1 MiB beside what is expected of them, and what auto takes",
    "control": "the control path: turns, messages, tasks, calls and microseconds of a transfer on each event loop",
    "rpc": "grpc.aio between two processes: what a message and its answer cost at least",
    "watch": "what open status pages cost a daemon, with a full history",
    "first": "the first request between two engines that have never met, on host memory and on GPUs, beside later ones",
    "again": "the first request after a daemon was killed under its keeper, on either side, beside later ones",
    "peers": "many peers: to meet them, to keep them, to order beside them, to replace them; a source of many readers",
    "gpu": "one, two or four GPUs: the copy ceiling, NIXL alone, and every way of kvferry with every layout change",
}
PROGRAMS = {
    "fleet": "what the fleet page costs a proxy that knows 64 pairs of engines, and each of their daemons",
    "cost": "a daemon at rest and at work: memory, threads, wake-ups, processor time for each request and each GB",
    "paged": "pages in no order by the rules of CollectiveX kv-transfer: kvferry and NIXL as shares of one bulk copy",
    "trace": "a public request trace, replayed through one pair, beside an ideal link of the measured ceiling",
}
"""Each has options of its own."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the parts gpu and peers. `device`: cuda, or cpu for a rehearsal on host memory, much smaller."""

    quick: bool = False
    case: str = ""
    json: Path | None = None
    device: str = "cuda"
    checksum: bool = False
    peers: int = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for, those that need no GPU by default; 0 when every budget was kept."""
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in PROGRAMS:
        program = importlib.import_module(f"kvferryd.bench.{given[0]}")
        status: int = program.main(given[1:])
        return status
    parser = argparse.ArgumentParser(
        prog="kvferry bench",
        description="Measure this machine. Ratios hold; absolute figures drift with whatever else runs.",
        epilog=f"parts:\n{_listed(PARTS)}\n\nwith options of their own (NAME --help):\n{_listed(PROGRAMS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts to run (default: the short ones)")
    parser.add_argument("--quick", action="store_true", help="gpu: the cases to know, with few repeats")
    parser.add_argument("--case", default="", metavar="TEXT", help="gpu: cases whose name has this, such as TP or MLA")
    parser.add_argument("--json", type=Path, metavar="FILE", help="gpu: keep every row as a line of JSON as well")
    parser.add_argument("--checksum", action="store_true", help="gpu: readers compare checksums of what they have read")
    parser.add_argument("--peers", type=int, default=100, metavar="N", help="peers: how many (1000 take some 4 GB)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    wanted = arguments.parts or [name for name in PARTS if name not in ("gpu", "first", "again", "peers")]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}: choose from {', '.join((*PARTS, *PROGRAMS))}")
    options = Options(
        arguments.quick, arguments.case, arguments.json, arguments.device, arguments.checksum, arguments.peers
    )
    if options != Options(peers=arguments.peers) and "gpu" not in wanted:
        parser.error("--quick, --case, --json and --checksum are for the part gpu")
    return max(_run(name, options) for name in wanted)


def _listed(parts: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:7} {what}" for name, what in parts.items())


def _run(part: str, options: Options) -> int:
    # Each part has its own imports: the planner is measured without NIXL.
    module = importlib.import_module(f"kvferryd.bench.{part}")
    status: int = module.main(options) if part in ("gpu", "peers") else module.main()
    return status
