"""Processes that begin with their imports done: forks of one that does nothing else.

A daemon's start takes a second and a half of processor time, an engine's half a minute, nearly all of it imports, and
tests start a thousand of them. `start` stands where a fleet calls subprocess.Popen: a fork of the template runs what
the command says, to the end of its interpreter. Other commands start as they always do.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import IO, Any

KVFERRY = "import sys; from kvferryd.commands.cli import main; sys.exit(main())"
PROGRAMS: Mapping[tuple[str, ...], Sequence[str]] = {
    ("-c", KVFERRY, "serve"): ("kvferryd.process.serve", "pydantic.v1"),
    ("-m", "kvferry.proxy"): ("kvferry.proxy.app", "kvferry.proxy.options"),
    ("-m", "kvferry.reference"): ("kvferry.reference.engine", "kvferry.reference.server"),
    ("-m", "vllm.entrypoints.openai.api_server"): (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
    ),
    ("-m", "sglang.launch_server"): (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
    ),
}
"""How a Python's arguments begin where it may be a fork, and modules that it imports whatever follows."""
LATE = ("_BIND", "_PORT")
EARLY = ("GLIBC_", "GRPC_", "HF_", "LD_", "MALLOC_", "OMP_", "PYTHON", "SGLANG_", "TORCH", "VLLM_")
"""Variables that count before a command runs begin so, and do not end like those of LATE."""
PATH = os.environ.get("PYTHONPATH")
"""Another one may begin with a sitecustomize that looks at the command."""
ENV = "/usr/bin/env"
MESSAGE = 1 << 20
ANSWER_S = 240.0
PR_SET_PDEATHSIG = 1


class Template:
    """The process of which the others are forks, and their parent. It ends with this one."""

    def __init__(self, python: str, env: Mapping[str, str]) -> None:
        self.forks = set[int]()
        self._asking = threading.Lock()
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._here.settimeout(ANSWER_S)
        with there:
            self._process = subprocess.Popen(
                [python, __file__, str(there.fileno())], env=env, pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def ask(self, what: Mapping[str, Any], *files: int) -> int:
        with self._asking:
            socket.send_fds(self._here, [json.dumps(what).encode()], files)
            answer = self._here.recv(MESSAGE)
        assert answer, "the template of the forks has ended"
        return int(answer)


class Forked(subprocess.Popen[bytes]):
    """A fork, as subprocess shows a child: its number stays its own until it is waited for."""

    def __init__(self, args: Sequence[str], pid: int, template: Template) -> None:
        self.args, self.pid = args, pid
        self.stdin = self.stdout = self.stderr = None
        self._status: int | None = None
        self._template, self._waiting = template, threading.Lock()
        template.forks.add(pid)

    def __del__(self) -> None:
        """The template's end is that of forks for which nobody has waited."""

    @property
    def returncode(self) -> int | None:  # type: ignore[override]  # Popen's is an attribute, and None at first as well
        return self._status

    def poll(self) -> int | None:
        return self._reaped(0)

    def wait(self, timeout: float | None = None) -> int:
        if (status := self._reaped(None if timeout is None else timeout * 1000)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def _reaped(self, timeout_ms: float | None) -> int | None:
        with self._waiting:
            if self._status is None:
                ended, poll = os.pidfd_open(self.pid), select.poll()
                try:
                    poll.register(ended, select.POLLIN)
                    if poll.poll(timeout_ms):
                        self._template.forks.discard(self.pid)
                        self._status = self._template.ask({"reap": self.pid})
                finally:
                    os.close(ended)
            return self._status


def _namespaces() -> list[str]:
    """A thread that has entered another means its children to be there too."""
    return [os.readlink(f"/proc/thread-self/ns/{each}") for each in ("mnt", "net")]


HOST = _namespaces()
_templates: dict[tuple[str, ...], Template] = {}
"""Templates by their Python, and by the variables that count early."""
_making = threading.Lock()


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[bytes],
    preexec_fn: Callable[[], None] | None,
    **others: Any,
) -> subprocess.Popen[bytes]:
    """As subprocess.Popen for a fleet: a session of its own, nothing on stdin, errors where its output goes."""
    set_here = list(itertools.takewhile(lambda each: "=" in each, command[1:] if command[0] == ENV else []))
    python, *arguments = command[1 + len(set_here) if set_here else 0 :]
    inside = {**env, **dict(each.split("=", 1) for each in set_here)}
    imports = next((each for start, each in PROGRAMS.items() if tuple(arguments[: len(start)]) == start), None)
    changed = "LD_PRELOAD" in inside or (python == sys.executable and inside.get("PYTHONPATH") != PATH)
    if imports is None or changed or _namespaces() != HOST:
        return subprocess.Popen(command, env=env, stdout=stdout, preexec_fn=preexec_fn, **others)
    early = [f"{k}={v}" for k, v in sorted(inside.items()) if k.startswith(EARLY) and not k.endswith(LATE)]
    with _making:
        template = _templates.get((python, *early)) or Template(python, inside)
        _templates[python, *early] = template
    asked = {"arguments": arguments, "imports": imports, "env": inside, "with_parent": preexec_fn is not None}
    return Forked(command, template.ask(asked, stdout.fileno()), template)


def stands_still(pid: int) -> bool:
    """Once the kernel has said what became of a child that was sent SIGSTOP: whether it lives."""
    for template in _templates.values():
        if pid in template.forks:
            return template.ask({"stop": pid}) == os.CLD_STOPPED
    return _told(pid) == os.CLD_STOPPED


def _told(child: int) -> int:
    return os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code


def _forks(door: socket.socket) -> tuple[Mapping[str, Any], int]:
    """Fork and reap as asked, until nobody asks. Returns in each fork, with what it was asked and its output."""
    while True:
        message, files, _, _ = socket.recv_fds(door, MESSAGE, 1)
        if not message:
            os._exit(0)
        asked = json.loads(message)
        if "reap" in asked:
            door.send(str(os.waitstatus_to_exitcode(os.waitpid(asked["reap"], 0)[1])).encode())
        elif "stop" in asked:
            door.send(str(_told(asked["stop"])).encode())
        else:
            for each in asked["imports"]:
                with contextlib.suppress(ModuleNotFoundError):  # in another version of an engine
                    importlib.import_module(each)
            gc.collect()
            gc.freeze()
            if os.fork() == 0:  # and it answers
                return asked, files[0]
            os.close(files[0])


def _become(asked: Mapping[str, Any], output: int, door: socket.socket) -> None:
    """Run the program that was asked for."""
    os.setsid()
    if asked["with_parent"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    door.send(str(os.getpid()).encode())  # now it may be signalled, and its group
    door.close()
    how, *arguments = asked["arguments"]
    if how == "-m":
        sys.argv, sys.path[0] = arguments, os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(arguments[0], vars(main))


if __name__ == "__main__":
    opened = socket.socket(fileno=int(sys.argv[1]))
    _become(*_forks(opened), opened)
