"""`kvferry`: the one command. Imports wait until a command runs, so that --help needs nothing."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry import __version__
from kvferry.descriptors import open_standard
from kvferry.errors import KvferryError, Malformed, Unavailable

OK, FAILED = 0, 2
INTERRUPTED = 130

EPILOG = """\
examples:
  kvferry demo                                two engines of different shape on this machine, every token compared
  kvferry run -- vllm serve MODEL             an engine, and a daemon beside each of its ranks
  kvferry host                                a daemon for each GPU of this host
  kvferry serve --device cpu                  a daemon for host memory
  kvferry serve --device cuda:0 --config /etc/kvferry.toml
  kvferry keep --device cuda:0                the same, started again when it dies, under living engines
  kvferry status                              is it ready, and if not, why
  kvferry doctor                              what is wrong on this machine
  kvferry transfers --watch                   what is moving
  kvferry drain --wait 300                    take no more work, return when all leases are read

`kvferry COMMAND --help` has examples of each. docs/reference has every setting, metric, error and route."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A command that reads its own arguments. extra: what pip must install for it."""

    module: str
    help: str
    extra: str = "daemon"


FORWARDED = {
    "run": Forwarded("kvferryd.run", "an engine and its daemons, as one command: kvferry run -- vllm serve MODEL"),
    "host": Forwarded("kvferryd.host", "a daemon for each GPU of this host, as one command"),
    "keep": Forwarded(
        "kvferryd.process.keeper", "run the daemon, and start it again when it dies; holds its GPU memory"
    ),
    "demo": Forwarded("kvferryd.demo", "two engines of different shape, their daemons and a proxy", "daemon,reference"),
    "bench": Forwarded("kvferryd.bench", "the benchmarks of docs/benchmarks.md", "bench"),
    "explain": Forwarded("kvferryd.explain", "what a transfer between two manifests would do, or what one did"),
    "proxy": Forwarded("kvferry.proxy", "the reference routing proxy, OpenAI-compatible", "proxy"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 not (yet) so, 2 an error, told on stderr."""
    open_standard()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(arguments)
        if sys.stdout is not None:  # it was not closed when we began
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # `kvferry transfers | head`
        _leave_unwritten()
        return OK
    except OSError as error:  # the disk of the output is full
        _leave_unwritten()
        print(f"kvferry: {error}", file=sys.stderr)
        return FAILED


def _leave_unwritten() -> None:
    """The interpreter's own last words go nowhere."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    try:
        if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
            importlib.import_module("argcomplete").autocomplete(_parser())
        if not arguments:
            _parser().print_help()
            return OK
        if arguments[0] in FORWARDED:
            return int(importlib.import_module(FORWARDED[arguments[0]].module).main(arguments[1:]))
        parsed = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = parsed.command
        return command(parsed)
    except KvferryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        print(f"kvferry: {_not_installed(error, arguments[0] if arguments else 'completion')}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _not_installed(error: ModuleNotFoundError, command: str) -> KvferryError:
    """The package to install, when one is missing that a command builds on."""
    missing = (error.name or "").partition(".")[0]
    if missing in ("kvferry", "kvferryd"):
        why, remedy = f"kvferry {command} is not part of this installation", "install kvferry from a release"
        return Malformed("not_in_this_build", why, field="module", value=error.name, remedy=remedy)
    extra = FORWARDED[command].extra if command in FORWARDED else "daemon"
    if missing == "torch" and command == "bench":
        extra = "cuda13"
    why = f"kvferry {command} needs the package {missing}, which is not installed"
    return Unavailable("missing_extra", why, remedy=f"pip install 'kvferry[{extra}]'")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Moves finished KV cache from one LLM engine to another: the transfer daemon and its tools.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, help: str, description: str, *examples: str) -> Parser:
        return commands.add_parser(
            name, help=help, description=description, epilog="\n  ".join(("examples:", *examples)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    def asking(name: str, help: str, description: str, *examples: str) -> Parser:
        asks = command(name, help, description, *examples)
        asks.set_defaults(command=partial(_ask, name))
        asks.add_argument("--daemon", metavar="URL", help="its REST address (default: that of this machine's daemon)")
        asks.add_argument("--token-file", metavar="FILE", help="its bearer token, on the first line")
        asks.add_argument("--config", metavar="FILE", help="the daemon's settings; KVFERRY_* variables count as well")
        asks.add_argument("--json", action="store_true", help="what the daemon answered, for programs")
        return asks

    serve = command(
        "serve", "run the daemon",
        "Runs the daemon beside one GPU, until SIGTERM; then it drains. Settings come from flags, KVFERRY_* variables"
        " and a TOML file, in this order.",
        "kvferry serve --device cpu --engine-socket /tmp/kvferry.sock",
        "kvferry serve --device cuda:0 --peer 0.0.0.0:7411 --advertise 10.0.0.7:7411 --allow-peers 10.0.0.0/16"
        " --peer-secret-file /etc/kvferry/peers",
        "KVFERRY_DEVICE=cuda:0 kvferry serve --config /etc/kvferry.toml --check",
    )  # fmt: skip
    serve.settings = True
    serve.set_defaults(command=_serve)
    serve.add_argument(
        "--check",
        action="store_true",
        help="print every setting and its origin, and what the daemon would stumble over; start nothing",
    )
    serve.add_argument("--keeper", type=int, help=argparse.SUPPRESS)
    doctor = command(
        "doctor", "what is wrong on this machine, and what to do",
        "Looks at what a daemon with these settings needs: GPU, UCX transports, RDMA, limits, namespaces,"
        " certificates, the roster. Needs no daemon and no GPU. Exits 0 when nothing is wrong, else 1.",
        "kvferry doctor", "kvferry doctor --config /etc/kvferry.toml --json",
        "kubectl exec POD -c kvferry -- kvferry doctor",
    )  # fmt: skip
    doctor.settings = True
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="what is found, for programs")
    for name, forwarded in FORWARDED.items():
        commands.add_parser(name, help=forwarded.help, add_help=False)
    status = asking(
        "status", "is a daemon ready, what is wrong, and what has it moved",
        "Shows a daemon, its warnings and its engines. Exits 0 when it is ready and nothing is wrong, 1 when it is not"
        " ready, has warnings or a request failed in the last 5 minutes, 2 when it does not answer.",
        "kvferry status", "kvferry status --daemon http://10.0.0.7:7410 --token-file token",
        "kvferry status --all         every rank of the engine, by its roster",
        "kvferry status --host        every daemon of this host's `kvferry host`",
        "kvferry status --ready       a readiness probe: warnings and failures do not count",
    )  # fmt: skip
    status.add_argument("--all", action="store_true", help="every rank of the engines here: 0 when all are so")
    status.add_argument("--host", nargs="?", const="/run/kvferry", metavar="FOLDER",
                        help="every daemon that `kvferry host` runs there: 0 when all are so, or idle"
                        " (default: /run/kvferry)")  # fmt: skip
    status.add_argument(
        "--ready", action="store_true", help="only whether it is ready: 0, also with warnings or failures, or 1"
    )
    transfers = asking(
        "transfers", "what moves and what has moved",
        "Lists what this daemon reads and has read, unfinished transfers first. Ask the daemon of the decode engine.",
        "kvferry transfers --watch", "kvferry transfers --state failed --json",
    )  # fmt: skip
    transfers.add_argument("--request-id", metavar="ID", help="only those of one request")
    transfers.add_argument("--state", metavar="STATE", help="only those in one state, for example reading or failed")
    transfers.add_argument(
        "--watch", nargs="?", const=2.0, type=seconds, metavar="SECONDS", help="again every 2 seconds, until Ctrl-C"
    )
    top = asking(
        "top", "all ranks of an engine and what they move, refreshed",
        "Shows the daemons of all ranks of the engines beside a daemon, what they read and serve a second, and the"
        " newest transfers. Exits as the last look found them: 0 when all are ready and nothing is wrong, else 1.",
        "kvferry top", "kvferry top --every 10 --times 6 > log",
    )  # fmt: skip
    top.add_argument("--every", type=seconds, default=2.0, metavar="SECONDS", help="how often (default: 2)")
    top.add_argument("--times", type=looks, default=0, metavar="N", help="end after N looks (default: at Ctrl-C)")
    leases = asking(
        "leases", "what was published here, and who reads it",
        "Lists leases, those that are held first, with their readers.",
        "kvferry leases", "kvferry leases --ended 0", "kvferry leases --ended 100 --json",
    )  # fmt: skip
    leases.add_argument("--ended", type=int, default=20, metavar="N", help="the N that ended last, too (default: 20)")
    leases.add_argument("--limit", type=int, default=100, metavar="N", help="the newest N that are held (default: 100)")
    history = asking(
        "history", "what has ended since when, restarts, upgrades and drains",
        "Lists what has ended in the last hour by five minutes, or in more hours by the hour, with the daemon's starts,"
        " deaths, upgrades and drains between; then the same of each peer.",
        "kvferry history", "kvferry history --hours 24", "kvferry history --json",
    )  # fmt: skip
    history.add_argument("--hours", type=among(1, 24), default=1, metavar="N", help="1 to 24 (default: 1)")
    peers = asking(
        "peers", "whom the daemon reads from, how they fare, and who reads here",
        "Lists peers, those that do not answer first, and readers; with --prewarm shakes hands first, with --forget"
        " drops an engine first. Exits 1 when a peer does not answer.",
        "kvferry peers", "kvferry peers --prewarm prefill-0@10.0.0.7:7411", "kvferry peers --forget prefill-0",
    )  # fmt: skip
    peers.add_argument("--prewarm", metavar="ENGINE@HOST:PORT", help="shake hands with every rank of that engine now")
    peers.add_argument("--forget", metavar="ENGINE", help="drop what is held of that engine's ranks")
    drain = asking(
        "drain", "take no more work, wait until leases are read",
        "Tells a daemon to take no more work, until --cancel. Exits 0 only when nothing is left: no lease, no transfer;"
        " else 1.",
        "kvferry drain --wait 300     a pod's preStop hook: return when all is read, or after 300 seconds",
        "kvferry drain --status       what is left now, and whether it drains at all; changes nothing",
        "kvferry drain --cancel       take new work again",
    )  # fmt: skip
    instead = drain.add_mutually_exclusive_group()
    instead.add_argument("--wait", type=seconds, default=0.0, metavar="SECONDS", help="how long to wait (default: 0)")
    instead.add_argument("--status", action="store_true", help="ask only: neither begin nor end a drain")
    instead.add_argument("--cancel", action="store_true", help="end the drain; new transfers are taken again")
    return parser


class Parser(argparse.ArgumentParser):
    """A command's parser. settings: it takes a flag for every setting, also in the spelling of the file.

    They are added when they are needed, as pydantic is loaded for them.
    """

    settings = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        if self.settings:
            _add_flags(self)
            args = [
                word.replace("_", "-", word.partition("=")[0].count("_")) if word[:2] == "--" else word for word in args
            ]
        return super().parse_known_args(args, namespace)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per setting; `parse_args` leaves what was not given at None, and everything else raw."""
    from kvferryd.config import OPTIONS, PREFIX, form, written

    parser.add_argument("--config", metavar="FILE", help=f"TOML file of settings (environment: {PREFIX}CONFIG)")
    group = parser.add_argument_group("settings", f"also in the file, and as {PREFIX}* variables; flags win")
    for name, field in OPTIONS.items():
        flag, help = f"--{name.replace('_', '-')}", f"{field.description} (default: {written(field.default) or 'none'})"
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
        else:
            action = "append" if isinstance(field.default, tuple | dict) else "store"
            group.add_argument(flag, action=action, metavar=form(field).metavar, help=help)


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 86400 seconds")
    return value


def looks(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number, 0 or more")
    return int(text)


def among(first: int, last: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from first to last."""

    def number(text: str) -> int:
        if not text.isdecimal() or not first <= int(text) <= last:
            raise argparse.ArgumentTypeError(f"{text} is not from {first} to {last}")
        return int(text)

    return number


def _serve(arguments: argparse.Namespace) -> int:
    from kvferryd.config import OPTIONS, misspelt, resolve, written

    config, origins = resolve(vars(arguments))
    if arguments.check:
        for name in OPTIONS:
            print(f"{name:<18} {written(getattr(config, name)) or '-':<32} {origins[name]}")
        from kvferryd.commands.doctor import CHECK, Level, findings

        bad = False
        for found in findings(config, CHECK):
            if found.level is Level.WRONG:
                bad = True
                print(f"kvferry: {found.what} -> {found.remedy}", file=sys.stderr)
            elif found.level is Level.NOTE:
                print(f"note: {found.what}")
        return FAILED if bad else OK
    gc.disable()  # until all is imported, of which nothing is garbage: a tenth of the start. `serve.run` enables it
    from kvferryd.observe import logs
    from kvferryd.process import serve

    if config.log_format == "json":
        from kvferry.output import wrap  # before anything else can write

        logs.configure(config, wrap())
    else:
        logs.configure(config)
    for variable, meant in misspelt():
        logs.get(__name__).warning("nothing reads this variable", variable=variable, did_you_mean=meant)
    return int(serve.run(config, arguments.keeper))


def _doctor(arguments: argparse.Namespace) -> int:
    from kvferryd.commands.doctor import doctor

    return doctor(vars(arguments), as_json=arguments.json)


def _ask(command: str, arguments: argparse.Namespace) -> int:
    """Ask a daemon over REST: the coroutine of the command's name, in the module of that name."""
    from kvferryd.config import reach

    asks = getattr(importlib.import_module(f"kvferryd.commands.{command}"), command)

    flags = {"token_file": arguments.token_file, "config": arguments.config}
    try:
        return int(asyncio.run(asks(reach(flags), arguments)))
    except KvferryError as error:
        if error.code == "unauthorized":
            error.remedy = "name the daemon's token with --token-file FILE, or KVFERRY_TOKEN_FILE"
        raise
