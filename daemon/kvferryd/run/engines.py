"""The engines that `kvferry run` knows: words that start each, the ranks that its arguments ask for, and the options
that name their daemons. Pure: words in, words out."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from kvferry.errors import KvferryError, Malformed

RANK = "{rank}"
"""In the path of a socket: the rank's number. The plug-ins know it."""
SCALAR = re.compile(r"^[\"']?([A-Za-z][\w-]*)[\"']?\s*:\s*(.*?)\s*(?:\s#.*)?$")
"""A line of an engine's own file of options, of which only plain values are needed."""

SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
"""In the name of a flag or a variable: its value is not shown."""
NAMED = re.compile(r"^(-{0,2}[A-Za-z_][\w.-]*)=")


@dataclass(frozen=True, slots=True)
class Connected:
    """An engine's command, with our words in it."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """To add to its own."""


class Engine(ABC):
    """words: the whole command, with what stands before the engine's name (env, numactl), as the user wrote it.

    Raises KvferryError from every method, naming the argument that is wrong.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    """After `python -m`."""
    ranks_flags: ClassVar[tuple[tuple[str, ...], ...]]
    """Flags whose product is the number of ranks."""
    alone: ClassVar[Mapping[str, tuple[str, ...]]]
    """Flags by which it would run on several hosts, or as several engines; by what they mean."""
    config_flag: ClassVar[str] = "--config"

    def __init__(
        self, words: Sequence[str], start: int, environment: Mapping[str, str], read: Callable[[str], str]
    ) -> None:
        """start: where the engine's own arguments begin. read: the text of a file. Raises KvferryError."""
        before = (word.partition("=") for word in words[:start])
        self.words = tuple(words)
        self.environment = {
            **environment,
            **{name: value for name, equals, value in before if equals and name.isidentifier()},
        }
        self._before, self._own = self.words[:start], self.words[start:]
        self._filed: Mapping[str, str] = {}
        named = self.value(self.config_flag)
        if named and named.endswith((".yaml", ".yml")):
            self._filed = _filed(read(named))
        for meaning, flags in self.alone.items():
            if (value := self.value(*flags)) not in (None, "0", "1"):
                raise Malformed(
                    "unsupported_engine", f"{flags[0]} asks for {meaning}, which kvferry run does not start",
                    field=flags[0], value=value, remedy="start daemons and engine each by hand: docs/vllm.md",
                )  # fmt: skip

    @classmethod
    def begins(cls, words: Sequence[str]) -> int:
        """The index of its first own argument; 0 where the command starts something else."""
        for i, (word, after) in enumerate(itertools.pairwise(words)):
            if (Path(word).name, after) == (cls.name, "serve") or (word == "-m" and after in cls.modules):
                return i + 2
        return 0

    def values(self, *flags: str) -> list[str]:
        """The words behind these flags on the command line, in order."""
        found = []
        for i, word in enumerate(self._own):
            flag, equals, value = word.partition("=")
            if _dashed(flag) in flags:
                found.append(value if equals else self._own[i + 1] if i + 1 < len(self._own) else "")
        return found

    def value(self, *flags: str) -> str | None:
        """The last one counts; the engine's file of options is behind all of them. None where it is not given."""
        filed = (self._filed.get(flag) for flag in flags)
        return next(reversed([*filter(None, filed), *self.values(*flags)]), None)

    @property
    def ranks(self) -> int:
        product = 1
        for flags in self.ranks_flags:
            product *= self._number(*flags, default=1, least=1)
        return product

    def _number(self, *flags: str, default: int, least: int) -> int:
        text = self.value(*flags)
        if text is None:
            return default
        if not text.isdecimal() or int(text) < least:
            remedy = f"a whole number, {least} or more"
            raise Malformed("bad_engine", f"{flags[0]} is no number", field=flags[0], value=repr(text), remedy=remedy)
        return int(text)

    @property
    def on_cpu(self) -> bool:
        """It was told to compute there; it may do so untold, where it sees no GPU."""
        return self.value("--device") == "cpu"

    def gpu(self, rank: int) -> int:
        """The GPU of a rank, as this process counts them."""
        return rank

    @property
    @abstractmethod
    def socket(self) -> str:
        """The path at which the user has told it to find its daemons; empty where it was not told."""

    @abstractmethod
    def connected(self, socket: str, folder: str) -> Connected:
        """Told of its daemons, whose sockets are at `socket` with RANK in it; what the user has told it stays.
        folder: where it may leave sockets of its own, which are removed with it."""


class Vllm(Engine):
    name, modules = "vllm", ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
    ranks_flags = (
        ("--tensor-parallel-size", "-tp"),
        ("--pipeline-parallel-size", "-pp"),
        ("--prefill-context-parallel-size", "-pcp"),
    )
    alone = MappingProxyType({"several engines": ("--data-parallel-size", "-dp"), "several hosts": ("--nnodes", "-n")})
    FLAG = "--kv-transfer-config"

    @property
    def _config(self) -> dict[str, Any]:
        """vLLM's configuration of connectors; empty where none is given."""
        if dotted := [word for word in self._own if _dashed(word).startswith(f"{self.FLAG}.")]:
            raise _bad(
                dotted[0], f"{self.FLAG} is given in parts", f"write it as one JSON object: {self.FLAG} '{{...}}'"
            )
        if self.FLAG in self._filed:
            remedy = f"give {self.FLAG} on the command line"
            raise _bad("in the file", f"{self.FLAG} is given in the file of {self.config_flag}", remedy)
        given = self.values(self.FLAG)
        if len(given) > 1:
            raise _bad(" and ".join(given), f"{self.FLAG} is given {len(given)} times", "give it once")
        if not given:
            return {}
        try:
            config = json.loads(given[0])
        except ValueError as error:
            raise _bad(
                given[0], f"{self.FLAG} is not JSON: {error}", "write one JSON object, in single quotes"
            ) from None
        if not isinstance(config, dict):
            raise _bad(given[0], f"{self.FLAG} is no JSON object", 'write {"kv_connector": "KvferryConnector", ...}')
        return config

    @property
    def socket(self) -> str:
        if not (config := self._config):
            return ""
        named = _extra(_ours(config)).get("socket", "")
        return str(named).replace("{local_rank}", RANK).replace("{dp_rank}", "0")

    def connected(self, socket: str, folder: str) -> Connected:
        config = self._config or {"kv_connector": "KvferryConnector"}
        ours = _ours(config)
        if "kvferry" not in self.environment.get("VLLM_PLUGINS", "kvferry").split(","):
            ours.setdefault("kv_connector_module_path", "kvferry.vllm")
        ours.setdefault("kv_role", "kv_both")
        ours["kv_connector_extra_config"] = {"socket": socket} | _extra(ours)
        words = (*self._before, *_without(self._own, self.FLAG), self.FLAG, json.dumps(config))
        return Connected(words, {"VLLM_RPC_BASE_PATH": folder})


class Sglang(Engine):
    name, modules = "sglang", ("sglang.launch_server",)
    ranks_flags = (("--tp-size", "--tp", "--tensor-parallel-size"), ("--pp-size", "--pipeline-parallel-size"))
    alone = MappingProxyType(
        {"several engines": ("--dp-size", "--dp", "--data-parallel-size"), "several hosts": ("--nnodes",)}
    )
    MODE, BACKEND = "--disaggregation-mode", "--disaggregation-transfer-backend"
    SOCKET = "KVFERRY_SGLANG_SOCKET"

    def gpu(self, rank: int) -> int:
        first, step = (self._number(flag, default=default, least=default) for flag, default in
                       (("--base-gpu-id", 0), ("--gpu-id-step", 1)))  # fmt: skip
        return first + rank * step

    @property
    def socket(self) -> str:
        return self.environment.get(self.SOCKET, "")

    def connected(self, socket: str, folder: str) -> Connected:
        if (mode := self.value(self.MODE)) not in ("prefill", "decode"):
            why = "SGLang moves KV only between engines that it is told to split"
            remedy = f"add {self.MODE} prefill, or decode"
            raise Malformed("bad_engine", why, field=self.MODE, value=mode, remedy=remedy)
        backend = self.value(self.BACKEND)
        if backend not in (None, "kvferry"):
            remedy = "leave it out: kvferry run sets it"
            raise Malformed("other_connector", f"{self.BACKEND} names another", field=self.BACKEND, value=backend,
                            remedy=remedy)  # fmt: skip
        words = self.words if backend else (*self.words, self.BACKEND, "kvferry")
        # SGLang leaves sockets in TMPDIR, also when it ends well. Kernels that torch has compiled outlive them.
        kept = f"{self.environment.get('TMPDIR', '/tmp')}/torchinductor_{self.environment.get('USER', 'kvferry')}"  # noqa: S108
        added = {"TORCHINDUCTOR_CACHE_DIR": kept, self.SOCKET: socket}
        untold = {name: value for name, value in added.items() if name not in self.environment}
        return Connected(words, untold | {"TMPDIR": folder})


class Reference(Engine):
    """Small, on the CPU: for a first look and for tests."""

    name, modules = "kvferry.reference", ("kvferry.reference",)
    ranks_flags = (("--tp",),)
    alone = MappingProxyType({})
    on_cpu = True

    @property
    def socket(self) -> str:
        if given := self.values("--daemon"):
            what, remedy = "kvferry run starts the daemons, and says where they are", "leave --daemon out"
            raise Malformed("bad_engine", what, field="--daemon", value=" ".join(given), remedy=remedy)
        return ""

    def connected(self, socket: str, folder: str) -> Connected:
        sockets = (socket.replace(RANK, str(rank)) for rank in range(self.ranks))
        return Connected((*self.words, *(word for path in sockets for word in ("--daemon", path))))


ENGINES: tuple[type[Engine], ...] = (Vllm, Sglang, Reference)


def known(words: Sequence[str], environment: Mapping[str, str], read: Callable[[str], str]) -> Engine:
    """The engine that this command starts. Raises KvferryError (`unknown_engine`), or what its arguments lack."""
    for engine in ENGINES:
        if start := engine.begins(words):
            return engine(words, start, environment, read)
    raise Malformed(
        "unknown_engine", "the command behind -- starts no engine that kvferry run knows", field="command",
        value=shown(words), remedy="start `vllm serve MODEL` or `python -m sglang.launch_server`, if need be behind"
        " env or numactl; within a script write kvferry run -- before it; other engines: docs/engines.md",
    )  # fmt: skip


def shown(words: Iterable[str]) -> str:
    """A command for logs and errors, as a shell takes it: values of flags and variables that are named like secrets are
    left out."""
    told, hidden = list[str](), False
    for word in words:
        named = NAMED.match(word)
        if hidden and not word.startswith("-"):  # there may be several
            told.append("***")
            continue
        if named and SECRET.search(named[1]):
            told.append(f"{named[1]}=***")
        else:
            told.append(shlex.quote(word))
        hidden = word.startswith("-") and not named and SECRET.search(word) is not None
    return " ".join(told)


def _dashed(flag: str) -> str:
    """vLLM takes both spellings."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _without(words: Iterable[str], flag: str) -> list[str]:
    """Without this flag and its value."""
    kept, value_follows = [], False
    for word in words:
        named, equals, _ = word.partition("=")
        if value_follows:
            value_follows = False
        elif _dashed(named) == flag:
            value_follows = not equals
        else:
            kept.append(word)
    return kept


def _filed(text: str) -> dict[str, str]:
    """Flags with their plain values of a YAML file of options; empty for a value of several lines."""
    found = filter(None, map(SCALAR.match, text.splitlines()))
    return {f"--{match[1].replace('_', '-')}": match[2].strip("\"'") for match in found}


def _ours(config: dict[str, Any]) -> dict[str, Any]:
    """The part of vLLM's configuration that is about kvferry's connector. Raises KvferryError."""
    name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    if name in (None, "KvferryConnector") or (name == "NixlConnector" and module == "kvferry.vllm"):
        config.setdefault("kv_connector", "KvferryConnector")
        return config
    if name == "MultiConnector":
        for each in _extra(config).get("connectors", ()):
            if isinstance(each, dict) and each.get("kv_connector") is not None:
                try:
                    return _ours(each)
                except KvferryError:
                    continue
    raise Malformed(
        "other_connector", "--kv-transfer-config names another connector than kvferry's", field="kv_connector",
        value=name, remedy="leave --kv-transfer-config out, or name KvferryConnector, alone or within MultiConnector",
    )  # fmt: skip


def _extra(config: Mapping[str, Any]) -> dict[str, Any]:
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise _bad(json.dumps(extra), "kv_connector_extra_config is no JSON object", 'write {"socket": "..."}')
    return extra


def _bad(value: str, why: str, remedy: str) -> KvferryError:
    return Malformed("bad_engine", why, field=Vllm.FLAG, value=value, remedy=remedy)
