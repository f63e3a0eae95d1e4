"""`kvferry host`: a daemon under a keeper for each GPU of a host, as one command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvferry.errors import KvferryError
from kvferryd.commands.cli import Parser, among
from kvferryd.config import OPTIONS
from kvferryd.host import places
from kvferryd.host.plan import ALL, FOLDER, plan
from kvferryd.host.supervisor import hosted
from kvferryd.run import gpus
from kvferryd.run.children import FAILED, check_daemons, left
from kvferryd.run.daemons import APART
from kvferryd.run.family import guarded

USAGE = "kvferry host [--gpus 0-7] [--folder FOLDER] [settings of the daemons]"
DESCRIPTION = f"""\
Runs a daemon under a keeper for each GPU of this host, as one command. Engines are started apart from it, also later,
and find the daemon of their GPU in FOLDER: its socket is named by the GPU's UUID. The ranks of an engine find each
other by the first daemon, which is the roster of all (--roster names one of another host).

The daemon of GPU N (as this process counts those it sees) has the ports of `rest` and `peer` (and `advertise`) plus
{APART} x N. All other settings are those of `kvferry serve --help`, but for --device and --engine-socket, which follow
from the GPU. Every line of the output begins with the name of its process: daemon-0, host.

SIGTERM, SIGINT   the daemons drain (drain_timeout_s) and stop. A second one: nothing is waited for
SIGHUP            of a terminal that is closed: the same
SIGUSR1           an upgrade: daemons of the code and the settings that are there now follow, under the engines
a daemon dies     its keeper starts another one, and its engine attaches to it
a keeper dies     its daemon ends with it, and both are started again. An engine in host memory attaches to them; one
                  whose GPU memory the keeper held is to be started again"""
EPILOG = """\
examples:
  kvferry host                                     a daemon for each GPU that can be seen
  kvferry host --gpus 0-3 --folder /run/kvferry
  kvferry host --cpu 2 --folder /tmp/kvferry       two for host memory, on a machine without a GPU
  kvferry host --check                             what it would start, and what is in the way
  kvferry status --host /run/kvferry               all of them
  vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"socket": "/run/kvferry/{gpu_uuid}.sock"}}'"""


def main(argv: Sequence[str]) -> int:
    """Raises KvferryError for words that are wrong."""
    parser = Parser(
        prog="kvferry host", usage=USAGE, description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.settings = True
    parser.add_argument("--check", action="store_true", help="say what would be started, and what is in the way")
    parser.add_argument("--folder", default=FOLDER, help=f"of the daemons' sockets and records (default: {FOLDER})")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpus", default=ALL, metavar="0-7", help=f"numbers and ranges, or {ALL} (default)")
    which.add_argument("--cpu", type=among(1, 64), default=0, metavar="N",
                       help="N daemons for host memory instead, 64 at most; their sockets: cpu-0.sock")  # fmt: skip
    if {"-h", "--help"} & {*argv}:
        parser.print_help()
        return 0
    flags = vars(parser.parse_args(argv))
    given = {name: value for name, value in flags.items() if value is not None and name in (*OPTIONS, "config")}
    where = str(Path(flags["folder"]).absolute())
    work = partial(_work, given, where, flags["gpus"], flags["cpu"], check=flags["check"])
    return guarded("kvferry-host-", work, _leave)


def _work(given: dict[str, object], where: str, chosen: str, cpus: int, folder: Path, *, check: bool) -> int:
    """The process's first call. folder: of this run; where: of the sockets."""
    try:
        environment = dict(os.environ)
        daemons = plan(given, environment, folder=where, gpus=() if cpus else gpus(), chosen=chosen, cpus=cpus)
        check_daemons(daemons)
        if check:
            print("\n".join(daemon.described for daemon in daemons))
            return 0
        with places.held(daemons, folder):
            return hosted(daemons, folder, environment)
    except (KvferryError, OSError) as error:
        print(f"kvferry: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001  nobody else prints it
        traceback.print_exc()
    return FAILED


def _leave(folder: Path) -> None:
    places.leave(folder)
    left(folder)
