"""deploy/compose.yaml: a valid compose file whose parts fit each other."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.proxy.options import parse
from kvferryd.run.plan import Plan, plan, split

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "compose.yaml"
PROFILES = {"gpu": ("prefill", "decode"), "cpu": ("prefill-on-cpu", "decode-on-cpu")}
STOP_S = 60 + 10
"""The engine's own stop, and the time that a daemon may take beyond its drain."""
Compose = dict[str, Any]


def read() -> Compose:
    return dict(yaml.safe_load(FILE.read_text()))


def words(service: Compose) -> list[str]:
    return [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]


def planned(service: Compose) -> Plan:
    run, *arguments = words(service)
    assert run == "run"
    own, command = split(arguments)
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(own[::2], own[1::2], strict=True)}
    environment = {name: str(value) for name, value in service["environment"].items()}
    gpus = 1 if "CUDA_VISIBLE_DEVICES" in environment else 0
    return plan(given, command, environment, folder="/tmp/f", gpus=lambda: gpus, read=str, engine_stop_s=60)


def ports(of: Plan) -> dict[str, int]:
    config = of.daemons[0].config
    found = {name: int(getattr(config, name).rpartition(":")[2]) for name in ("rest", "peer")}
    return found | {"engine": int(of.engine[of.engine.index("--port") + 1])}


def faults(compose: Compose) -> Iterator[str]:
    """A sentence for each thing that does not fit."""
    services = compose["services"]
    for profile, names in PROFILES.items():
        sides = [services[name] for name in names]
        for name, side in zip(names, sides, strict=True):
            if side["profiles"] != [profile]:
                yield f"{name} is not of the profile {profile} alone"
            if {side.get(shared) for shared in ("network_mode", "pid", "ipc")} != {"service:proxy"}:
                yield f"{name} does not share network, process ids and IPC with the proxy"
            drain_s = planned(side).daemons[0].config.drain_timeout_s
            if int(side["stop_grace_period"].removesuffix("s")) < 2 * drain_s + STOP_S:
                yield f"{name} may be killed while it drains"
            if ("deploy" in side) != (profile == "gpu"):
                yield f"{name} asks for GPUs, or lacks them"
            if profile == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in side["environment"]:
                yield f"{name} takes nearly all memory for its cache, and leaves none for the other"
            if side["ulimits"]["memlock"] != -1 or side["ulimits"]["nofile"] < 65536:
                yield f"{name} may lock too little memory, or open too few files"
        mine, other = (ports(planned(side)) for side in sides)
        if {*mine.values()} & {*other.values()}:
            yield f"two of the profile {profile} have the same port"
        flags = parse(words(services["proxy"])[1:])
        if [flags.prefill[0].url, flags.decode[0].url] != [
            f"http://127.0.0.1:{each['engine']}" for each in (mine, other)
        ]:
            yield f"the proxy does not lead to the engines of the profile {profile}"
        jobs = yaml.safe_load((DEPLOY / "observability/prometheus.yaml").read_text())["scrape_configs"]
        scraped = {target for job in jobs for static in job["static_configs"] for target in static["targets"]}
        if scraped != {f"127.0.0.1:{each[port]}" for each in (mine, other) for port in ("rest", "engine")}:
            yield f"Prometheus does not look at the profile {profile}"
    if "shm_size" not in services["proxy"]:
        yield "an engine needs more shared memory than Docker's own 64 MiB, and has that of the proxy"
    published = {entry.rpartition(":")[2] for entry in services["proxy"]["ports"]}
    if not {"8000", "7410", "7510", "9090", "3000"} <= published:
        yield "an address that the head of the file names is not published"
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith(".") and not (DEPLOY / source).exists():
                yield f"{name} mounts {source}, which is not there"
            if not source.startswith(".") and source not in compose["volumes"]:
                yield f"{name} mounts the volume {source}, which is not declared"
    if any(not entry.startswith("127.0.0.1:") for entry in services["proxy"]["ports"]):
        yield "a port is open to other hosts"


def test_it_is_a_compose_file() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: make setup")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_its_parts_fit() -> None:
    assert list(faults(read())) == []


def _take(path: str, value: object) -> Callable[[Compose], None]:
    def change(compose: Compose) -> None:
        *names, last = path.split("/")
        at = compose["services"]
        for name in names:
            at = at[name]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_take("decode/pid", None), "decode does not share network, process ids and IPC"),
        (_take("decode/profiles", []), "decode is not of the profile gpu alone"),
        (_take("prefill/stop_grace_period", "60s"), "prefill may be killed while it drains"),
        (_take("prefill-on-cpu/deploy", {}), "prefill-on-cpu asks for GPUs"),
        (lambda compose: compose["services"]["proxy"].pop("shm_size"), "an engine needs more shared memory"),
        (_take("decode-on-cpu/environment", {}), "decode-on-cpu takes nearly all memory"),
        (_take("prefill/ulimits", {"memlock": 65536, "nofile": 1024}), "prefill may lock too little memory"),
        (_take("decode/command", ["run", "--rest", "0.0.0.0:7510", "--", "vllm", "serve", "m", "--port", "8200"]),
         "two of the profile gpu have the same port"),
        (_take("proxy/command", ["proxy", "--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8300"]),
         "the proxy does not lead to the engines"),
        (_take("decode/command", ["run", "--rest", "[::]:7520", "--peer", "[::1]:7511", "--", "vllm", "serve", "m",
                                  "--port", "8200"]), "Prometheus does not look at the profile gpu"),
        (_take("proxy/ports", ["127.0.0.1:8000:8000"]), "an address that the head of the file names is not published"),
        (_take("proxy/ports", ["8000:8000"]), "a port is open to other hosts"),
        (_take("grafana/volumes", ["./nowhere:/x"]), "grafana mounts ./nowhere"),
        (_take("prometheus/volumes", ["lost:/x"]), "prometheus mounts the volume lost"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_noticed(change: Callable[[Compose], None], fault: str) -> None:
    compose = copy.deepcopy(read())
    change(compose)
    assert any(fault in each for each in faults(compose)), list(faults(compose))


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    folder = DEPLOY / "observability" / "grafana"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://127.0.0.1:9090", True)
    (provider,) = yaml.safe_load((folder / "dashboards/kvferry.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in read()["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/kvferry.json" in mounted and "/etc/grafana/provisioning" in mounted
