"""From the words of the command line to the daemons of a host's GPUs, and where each is found. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvferry.errors import Malformed
from kvferry.memory.cuda import Device
from kvferryd.config import bad_config, resolve
from kvferryd.run.daemons import Daemon, moved, placed

FOLDER = "/run/kvferry"
ALL = "all"
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def plan(
    given: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    folder: str,
    gpus: Sequence[Device],
    chosen: str = ALL,
    cpus: int = 0,
) -> tuple[Daemon, ...]:
    """given: the first daemon's settings as flags, raw, by name. gpus: those that this process sees. cpus: daemons for
    host memory instead. The number of a GPU gives its daemon's ports. Raises KvferryError."""
    base, origins = resolve(given, environment)
    for name in ("device", "engine_socket"):
        if origins[name] != "default":
            what = f"{name} follows from the GPU that a daemon is for, and kvferry host starts one for each"
            raise bad_config(name, getattr(base, name), what, f"leave {name} out; --gpus, --cpu and --folder choose")
    if cpus:
        beside = {number: ("cpu", f"cpu-{number}") for number in range(cpus)}
    else:
        beside = {number: (f"cuda:{number}", gpus[number].uuid) for number in _numbers(chosen, len(gpus))}
    if not cpus and origins["node_dir"] == "default":  # engines of other pods need descriptors
        given = {**given, "node_dir": folder}
    first = moved("advertise", base.advertise, min(beside))
    roster = str(base.roster or (first if len(beside) > 1 else ""))
    return tuple(
        placed(number, given, environment, device=device, socket=f"{folder}/{name}.sock", roster=roster)
        for number, (device, name) in beside.items()
    )


def _numbers(chosen: str, count: int) -> Sequence[int]:
    if not count:
        remedy = "let it see GPUs (the container's devices, CUDA_VISIBLE_DEVICES), or ask for --cpu N"
        raise Malformed("too_few_gpus", "no GPU can be seen here", field="--gpus", value=chosen, remedy=remedy)
    found = [*range(count)] if chosen == ALL else [*_listed(chosen)]
    if wrong := [number for number in found if number >= count]:
        remedy = f"0 to {count - 1} can be seen here"
        raise Malformed("too_few_gpus", f"there is no GPU {wrong[0]}", field="--gpus", value=chosen, remedy=remedy)
    return sorted({*found})


def _listed(chosen: str) -> Iterator[int]:
    for word in chosen.split(","):
        match = RANGE.fullmatch(word.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise Malformed("bad_argument", "--gpus cannot be understood", field="--gpus", value=chosen,
                            remedy="write all, or numbers and ranges: 0-3,6")  # fmt: skip
        yield from range(int(match[1]), int(match[2] or match[1]) + 1)


def record_of(daemon: Daemon) -> Path:
    """The file in which others of this host read what the daemon is: beside its socket."""
    return daemon.config.engine_socket.with_suffix(".json")
