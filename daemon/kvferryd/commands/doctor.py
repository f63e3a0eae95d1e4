"""`kvferry doctor` and `serve --check`: what on this machine would keep a daemon from its work, and what to do.

Every check is a function of the settings that yields what it finds; `CHECKS` has them all. It needs no daemon, no GPU
and no package beyond the client's: what cannot be looked at is said.
"""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from kvferry.descriptors import DESCRIPTORS
from kvferry.errors import KvferryError
from kvferry.memory import cuda
from kvferry.router import RouterClient
from kvferryd.config import Config, ConfigError, misspelt, resolve
from kvferryd.config.types import split_address
from kvferryd.peers import allow
from kvferryd.transport import nixl

PACKAGES = ("fastapi", "uvicorn", "structlog", "prometheus_client", "grpc", "cachetools", "cryptography")
RENEW_DAYS = 14
CAP_IPC_LOCK = 14
SHOWN = 8
"""Interfaces that are named."""
PROBE = "from kvferryd.transport import nixl; nixl.make_agent('doctor', threads=0)"
PROBE_S = 60.0


class Level(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, and should be known."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    remedy: str = ""
    check: str = ""


Check = Callable[[Config], Iterator[Finding]]


ok, note, wrong = partial(Finding, Level.OK), partial(Finding, Level.NOTE), partial(Finding, Level.WRONG)
"""Each takes what is found, and the remedy."""


# ---- what the settings say ----


def variables(config: Config) -> Iterator[Finding]:
    for variable, meant in misspelt():
        yield wrong(f"nothing reads the variable {variable}", f"did you mean {meant}? Else unset it")
    for warning in config.warnings():
        yield note(warning)


def roster(config: Config) -> Iterator[Finding]:
    if config.roster is None:
        yield ok("no roster: right for engines of one rank, and for rank 0")
        return
    for name, address, who in (
        ("roster", config.roster, "this daemon will not dial it"),
        ("advertise", config.advertise, "rank 0's daemon calls back there"),
    ):
        try:
            allow.check(address, config.allow_peers)
        except KvferryError:
            why = f"{name} = {address} is not in allow_peers = {','.join(config.allow_peers)}: {who}"
            yield wrong(why, "add it to allow_peers, on the daemons of all ranks")


def certificates(config: Config) -> Iterator[Finding]:
    from kvferryd.peers.certificates import CertificateFiles, expires_at, is_for, names_in

    if config.tls is None:
        return
    files = CertificateFiles(*config.tls)  # raises when they do not fit
    own, (host, _) = files.current(), split_address(config.advertise)
    names = names_in(own.certificate)
    if not is_for(host, names):
        kind = "IP" if ":" in host or host.replace(".", "").isdigit() else "DNS"
        yield wrong(
            f"{config.tls[0]} is for {', '.join(names) or 'no name'}, and peers dial {host}, the host of advertise",
            f"issue it with the subjectAltName {kind}:{host}, or advertise a name that it is for",
        )
    if not own.vouches_for(own.certificate):
        what = f"no authority in {config.tls[2]} has signed {config.tls[0]}: peers with that tls_ca do not take it"
        yield wrong(what, "issue it by an authority that the tls_ca of all daemons has, its chain in the same file")
    for file in (config.tls[0], config.tls[2]):
        ends = expires_at(file.read_bytes())
        left = (ends - datetime.now(UTC)).total_seconds() / 86400 if ends else RENEW_DAYS
        if left < RENEW_DAYS:
            how = f"expires in {left:.0f} days" if left > 0 else f"expired {-left:.0f} days ago"
            yield (note if left > 0 else wrong)(f"{file} {how}", "renew it; the daemon reads the file again")


# ---- what the daemon needs to start ----


def packages(config: Config) -> Iterator[Finding]:
    needed = [*PACKAGES, *(("torch", "triton") if config.device != "cpu" else ())]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            yield wrong(f"the package {name} is not installed", "pip install 'kvferry[daemon]'")
    builds = [build.partition(".")[0] for build in nixl.BUILDS]
    if not any(map(importlib.util.find_spec, builds)):
        error = nixl.missing()
        yield wrong(f"{error.message}: none of {', '.join(builds)}", error.remedy)


def node_dir(config: Config) -> Iterator[Finding]:
    if (folder := config.node_dir) is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield wrong(f"node_dir = {folder} is no folder that this user may write to",
                    "make it once for all daemons of the node, as their user's, mode 0700")  # fmt: skip


def engine_socket(config: Config) -> Iterator[Finding]:
    path = config.engine_socket
    folder = next(each for each in path.parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield wrong(f"engine_socket = {path} cannot be made: {folder} is no folder this user may write to",
                    "give the folder to this user, or name another engine_socket (kvferry host: --folder)")  # fmt: skip
    elif path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        yield wrong(f"what is at engine_socket = {path} is no socket", "name a path where nothing is")


def ports(config: Config) -> Iterator[Finding]:
    """For a daemon that is to start: a running one has its ports."""
    for name in ("rest", "peer"):
        host, port = split_address(getattr(config, name))
        try:
            found = socket.getaddrinfo(
                "" if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[0][4])
        except OSError as error:
            remedy = "another process has the port, or the address is not this host's"
            yield wrong(f"nothing can listen on {name} = {host}:{port}: {error.strerror}", remedy)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        if probe.connect_ex(str(config.engine_socket)) == 0:
            remedy = "one daemon per GPU, each with its own engine_socket"
            yield wrong(f"another daemon serves engine_socket = {config.engine_socket}", remedy)


def gpu(config: Config) -> Iterator[Finding]:
    if config.device != "cpu":
        yield ok(f"{config.device} is {cuda.device(config.device).uuid}")
        return
    yield ok("device = cpu: host memory, for which no GPU is needed")
    if seen := len(list(Path("/dev").glob("nvidia[0-9]*"))):
        what = f"there are {seen} GPUs, which device = cpu leaves alone"
        yield note(what, "set device = cuda:N beside an engine on one")


# ---- what the machine allows ----


def ipc(config: Config) -> Iterator[Finding]:
    if config.device == "cpu":
        yield ok("engines hand over files of memory through the engine socket: no shared IPC namespace is needed")
        return
    device = cuda.device(config.device)
    address = device.alloc(cuda.GRANULE)
    try:
        device.export(address)
    finally:
        device.free(address)
    yield ok("GPU memory can be handed to other processes of this host")


def pid_namespace(config: Config) -> Iterator[Finding]:
    first = Path("/proc/1/comm").read_text().strip()
    alone = first not in ("pause", "systemd", "init") and Path("/proc/1/cgroup").read_text().strip() == "0::/"
    if config.device != "cpu" and alone and config.node_dir is None:
        yield note(
            f"process 1 is {first}: this container seems to have a PID namespace of its own, across which UCX does not"
            " use cuda_ipc, and CUDA cannot open the memory of a process that has the same number",
            "set shareProcessNamespace: true in the pod",
        )
    else:
        yield ok(f"process 1 is {first}")


def claim(config: Config) -> Iterator[Finding]:
    if config.device == "cpu" or "KUBERNETES_SERVICE_HOST" not in os.environ:
        yield ok("no GPU is wanted from Kubernetes here")
        return
    remedy = "one ResourceClaim that both containers of the pod name, see docs/kubernetes.md"
    given = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        yield wrong("Kubernetes gave this container no GPU", f"{remedy}; or runtimeClassName: nvidia")
    elif given == "all":
        yield note("the GPUs came by NVIDIA_VISIBLE_DEVICES=all, past the scheduler's accounts", remedy)
    else:
        yield ok(f"NVIDIA_VISIBLE_DEVICES={given or '(not set)'}")


def transports(config: Config) -> Iterator[Finding]:
    """In another process, as UCX says what it opens in its log alone."""
    environment = os.environ | {f"UCX_{name}": value for name, value in config.ucx.items()}
    environment |= {"UCX_LOG_LEVEL": "debug", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PROBE],
        env=environment, capture_output=True, text=True, errors="replace", timeout=PROBE_S, check=False,
    )  # fmt: skip
    found = sorted(set(re.findall(r"using (\w+/\S+) on worker", done.stdout + done.stderr)) - {"self/memory"})
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield wrong(
            f"NIXL could not open UCX: {last[:300]}", "correct the ucx setting, or ask for more: UCX_LOG_LEVEL=info"
        )
        return
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    yield ok(f"UCX opens {', '.join(found[:SHOWN])}{more}")
    network = {each.partition("/")[0].partition("_")[0] for each in found} & {"rc", "dc", "ud", "srd", "efa"}
    if not network and config.require_rdma:
        yield wrong(
            "require_rdma is set, and UCX has no RDMA", "see rdma; TLS and NET_DEVICES of the ucx setting choose"
        )
    elif not network and config.device != "cpu":
        yield note("UCX has no RDMA: between hosts KV goes over TCP", "see rdma; on one host NVLink needs none")


def rdma(config: Config) -> Iterator[Finding]:
    devices = sorted(Path("/sys/class/infiniband").glob("*"))
    remedy = "give the container the RDMA resource of its node (docs/kubernetes.md)"
    if not devices:
        what = "there are no RDMA devices: bytes between hosts go over TCP"
        yield wrong(what, remedy) if config.require_rdma else ok(what)
        return
    if not list(Path("/dev/infiniband").glob("uverbs*")):
        yield wrong("the RDMA devices cannot be opened: /dev/infiniband has no uverbs", remedy)
    for device in devices:
        states = {port.name: (port / "state").read_text().strip() for port in (device / "ports").glob("*")}
        up = any("ACTIVE" in state for state in states.values())
        said = ", ".join(f"port {port} {state}" for port, state in sorted(states.items()))
        yield (
            ok(f"{device.name}: {said}")
            if up
            else note(f"{device.name} has no active port: {said}", "check the cable and the fabric")
        )


def memlock(config: Config) -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    effective = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    free = limit == resource.RLIM_INFINITY or bool(effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1)
    if free:
        yield ok("memory may be locked without limit")
    elif any(Path("/sys/class/infiniband").glob("*")):
        yield wrong(f"only {limit >> 10} KiB may be locked, and RDMA locks every cache",
                    "ulimit -l unlimited, or the capability IPC_LOCK")  # fmt: skip
    else:
        yield ok(f"{limit >> 10} KiB may be locked; only RDMA needs more")


def handles(config: Config) -> Iterator[Finding]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < DESCRIPTORS:
        yield note(
            f"at most {most} file handles: an engine takes 30, a peer two or more", f"raise the limit to {DESCRIPTORS}"
        )
    else:
        yield ok("enough file handles can be had")


def daemon(config: Config) -> Iterator[Finding]:
    async def ask() -> list[str]:
        async with RouterClient(config.url, timeout_s=3) as client:
            return (await client.ready()).reasons

    if config.rest_tls:
        yield ok("rest_tls: ask the daemon by `kvferry status`")
        return
    try:
        for reason in asyncio.run(ask()):
            yield note(f"the daemon at {config.url} is not ready: {reason}")
    except KvferryError:
        yield note(f"no daemon answers at {config.url}", "kvferry serve")
    else:
        yield ok(f"a daemon answers at {config.url}")


START: tuple[Check, ...] = (variables, packages, gpu, engine_socket, node_dir, roster, certificates)
CHECK = (*START, ports)
"""The checks of `serve --check`."""
CHECKS = (*START, daemon, ipc, pid_namespace, claim, transports, rdma, memlock, handles)
"""Of `doctor`."""


def findings(config: Config, checks: Iterable[Check]) -> Iterator[Finding]:
    for check in checks:
        name = check.__name__
        try:
            for each in check(config):
                yield replace(each, check=name)
        except KvferryError as error:
            yield wrong(error.message, error.remedy, name)
        except (OSError, ImportError, subprocess.TimeoutExpired) as error:  # no /proc, no package, no answer
            yield note(f"could not be looked at: {error}", check=name)


def doctor(flags: dict[str, object], *, as_json: bool) -> int:
    """Print what is found; 1 where something is wrong, else 0."""
    try:
        config, _ = resolve(flags)
        found = list(findings(config, CHECKS))
    except ConfigError as error:
        found = [wrong(each.message, each.remedy, f"setting {each.field}") for each in error.settings]
    bad = sum(each.level is Level.WRONG for each in found)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [asdict(each) for each in found]}, indent=2))
    else:
        for each in found:
            print(line(each))
        print("nothing is wrong" if not bad else f"{bad} wrong: see above for what to do")
    return 1 if bad else 0


def line(found: Finding) -> str:
    remedy = f"\n{'':<21} -> {found.remedy}" if found.remedy else ""
    return f"{found.level.value:<6} {found.check:<14} {found.what}{remedy}"
