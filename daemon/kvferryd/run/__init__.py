"""`kvferry run -- ENGINE`: an engine and its daemons under one command, in one container."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvferry.errors import KvferryError, Malformed
from kvferry.memory import cuda
from kvferryd.commands.cli import Parser, seconds
from kvferryd.config import OPTIONS
from kvferryd.run.children import FAILED, check_daemons, left
from kvferryd.run.daemons import APART
from kvferryd.run.family import guarded
from kvferryd.run.launcher import launched
from kvferryd.run.plan import Plan, described, plan, split

USAGE = "kvferry run [settings of the daemons] -- vllm serve MODEL [options of the engine]"
DESCRIPTION = f"""\
Runs an engine, and a daemon under a keeper beside each of its ranks, as one command: in a container, in a job, on a
host. How many ranks there are, and on which GPUs, comes from the engine's own arguments. The engine starts when all
daemons serve, and is told where they are; what you have told it of its connector stays.

Rank N has the ports of `rest` and `peer` (and `advertise`) plus {APART} x N, the GPU that the engine takes for it among
those that are visible here (CUDA_VISIBLE_DEVICES), and a socket of its own. All other settings are those of
`kvferry serve --help`. Every line of the output begins with the name of its process: daemon-0, engine, run.

SIGTERM, SIGINT   the daemons drain (drain_timeout_s); the engine is told to stop (--engine-stop-s); then the daemons
                  stop, which drain what the engine has left (drain_timeout_s). A second one: nothing is waited for
SIGHUP            of a terminal that is closed: the same
SIGUSR1           an upgrade: daemons of the code and the settings that are there now follow, under the engine
the engine ends   the daemons drain and stop; the exit status is the engine's
a daemon dies     its keeper starts another one, and the engine attaches to it
a keeper dies     all else ends; the exit status is 2
"""
EPILOG = """\
engines: `vllm serve`, `python -m sglang.launch_server`, `python -m kvferry.reference serve`; env, numactl and the like
may stand before them

examples:
  kvferry run -- vllm serve MODEL --port 8100
  kvferry run -- vllm serve MODEL --port 8100 --tensor-parallel-size 2
  CUDA_VISIBLE_DEVICES=1 kvferry run --rest 127.0.0.1:7510 --peer 127.0.0.1:7511 -- vllm serve MODEL --port 8200
  kvferry run --peer 0.0.0.0:7411 --advertise 10.0.0.7:7411 --allow-peers 10.0.0.0/16 \\
      --peer-secret-file /etc/kvferry/peers -- vllm serve MODEL
  kvferry run -- python -m sglang.launch_server --model-path MODEL --disaggregation-mode decode
  kvferry run --check -- vllm serve MODEL --tensor-parallel-size 8     what it would start, and what is in the way"""


def main(argv: Sequence[str]) -> int:
    """Raises KvferryError for what is wrong before anything is started."""
    parser = Parser(
        prog="kvferry run", usage=USAGE, description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.settings = True
    parser.add_argument("--check", action="store_true", help="say what would be started, and what is in the way")
    parser.add_argument("--engine-stop-s", type=seconds, default=60.0, metavar="SECONDS",
                        help="longest wait for the engine to stop, before it is killed (default: 60)")  # fmt: skip
    if {"-h", "--help"} & {*argv[: argv.index("--") if "--" in argv else None]}:
        parser.print_help()
        return 0
    own, command = split(argv)
    flags = vars(parser.parse_args(own))
    given = {name: value for name, value in flags.items() if value is not None and name in (*OPTIONS, "config")}
    work = partial(_work, given, command, dict(os.environ), flags["engine_stop_s"], check=flags["check"])
    return guarded("kvferry-run-", work, left)


def _work(
    given: dict[str, object], command: Sequence[str], environment: dict[str, str], engine_stop_s: float, folder: Path,
    *, check: bool,
) -> int:  # fmt: skip
    """The process's first call."""
    try:
        planned = plan(given, command, environment, folder=str(folder), gpus=lambda: len(gpus()), read=_read,
                       engine_stop_s=engine_stop_s)  # fmt: skip
        _check(planned, environment)
        if check:
            print("\n".join(described(planned)))
            return 0
        return launched(planned, folder, environment)
    except KvferryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001  nobody else prints it
        traceback.print_exc()
    return FAILED


def gpus() -> Sequence[cuda.Device]:
    """The GPUs that this process sees."""
    try:
        return cuda.devices()
    except KvferryError:
        return ()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"the engine's file of options cannot be read: {error}"
        raise Malformed("bad_engine", why, field="--config", value=path, remedy="name a YAML file") from None


def _check(planned: Plan, environment: dict[str, str]) -> None:
    """Raises KvferryError for all that is in the way of a start."""
    if shutil.which(planned.engine[0], path=environment.get("PATH")) is None:
        remedy = "install it here, or name it with its folder"
        raise Malformed("unknown_engine", "there is no such program", field="command", value=planned.engine[0],
                        remedy=remedy)  # fmt: skip
    check_daemons(planned.daemons)
