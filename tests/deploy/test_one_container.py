"""An engine and its daemons in one container: policies, each of which fails when a point is lost."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from policies import Loss, Policies, on_engine, put
from rendered import Cluster, Engine, Resource, helm, set_variable, variable

from kvferry.errors import KvferryError
from kvferryd.run.children import BEYOND_DRAIN_S
from kvferryd.run.plan import Plan, plan, split

ONE: dict[str, Any] = {"gpu": {"mode": "container"}}
RENDERED: dict[str, Callable[[], list[Resource]]] = {
    "vllm": lambda: helm(ONE),
    "two-ranks": lambda: helm({**ONE, "ranksPerPod": 2}),
    "tls": lambda: helm({**ONE, "tls": {"enabled": True}}),
    "sglang": lambda: helm({**ONE, "engine": {"kind": "sglang"}, "ranksPerPod": 2}),
    "llm-d": lambda: helm({**ONE, "front": {"kind": "llm-d"}}),
}
GPUS = "nvidia.com/gpu"
FILES = ("KVFERRY_TOKEN_FILE", "KVFERRY_PEER_SECRET_FILE", "KVFERRY_TLS_CERT", "KVFERRY_TLS_KEY", "KVFERRY_TLS_CA")
policy = Policies()


def on_container(change: Callable[[Resource], object]) -> Loss:
    return on_engine(lambda engine: change(engine.engine))


def planned(engine: Engine) -> Plan:
    """The processes that the container's command would start. Raises KvferryError."""
    container = engine.engine
    environment = {one["name"]: variable(container, one["name"]) for one in container["env"]}
    environment = {name: value.replace("<status.podIP>", "10.0.0.7") for name, value in environment.items()}
    environment |= {name: _file() for name in FILES if environment.get(name)}
    for name in ("metadata.name", "metadata.namespace"):
        environment = {key: value.replace(f"<{name}>", "pod") for key, value in environment.items()}
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["kvferry", "run"], "another command"
    own, command = split(words[2:])
    (stop,) = own
    return plan({}, command, environment, folder="/tmp/f", gpus=lambda: 8, read=str,
                engine_stop_s=float(stop.removeprefix("--engine-stop-s=")))  # fmt: skip


@functools.cache
def _file() -> str:
    """A secret's, or a certificate's: it can be read."""
    path = Path(tempfile.mkdtemp()) / "secret"
    path.write_text("s" * 64)
    return str(path)


@policy(
    by_hand=on_container(put("command", value=["vllm", "serve", "m"])),
    plan=on_container(lambda container: container["args"].append("--data-parallel-size=2")),
    port=on_container(lambda container: container["ports"].pop()),
    rest=on_container(lambda container: set_variable(container, "KVFERRY_REST", "*:9000")),
    too_few=on_container(lambda container: container["resources"]["limits"].update({GPUS: 2})),
    none=on_container(lambda container: container["resources"].pop("limits")),
    no_folder=on_container(lambda container: container["volumeMounts"].pop(0)),
    of_the_node=on_engine(lambda engine: engine.pod["volumes"][0].update(emptyDir=None, hostPath={"path": "/x"})),
)
def the_command_starts_a_daemon_for_each_gpu_of_the_device_plugin(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        try:
            daemons = planned(engine).daemons
        except (AssertionError, KvferryError) as error:
            yield f"{engine.name}: {error}"
            continue
        if engine.engine["resources"].get("limits", {}).get(GPUS) != len(daemons):
            yield f"{engine.name}: not a GPU for each of {len(daemons)} ranks"
        wanted = {int(each.rpartition(":")[2]) for one in daemons for each in (one.config.rest, one.config.peer)}
        has = {one["containerPort"] for one in engine.engine["ports"] if one["name"].startswith(("rest", "peer"))}
        if wanted != has:
            yield f"{engine.name}: daemons at {sorted(wanted)}, ports {sorted(has)}"
        for one in daemons:
            volume = engine.volume(engine.engine, str(one.config.engine_socket))
            if not volume or not volume.get("emptyDir"):
                yield f"{engine.name}: {one.config.engine_socket} is in no folder of the pod alone"


@policy(
    short=on_engine(lambda engine: engine.pod.update(terminationGracePeriodSeconds=180)),
    longer=on_container(lambda container: set_variable(container, "KVFERRY_DRAIN_TIMEOUT_S", "300")),
    engine=on_container(lambda container: container["command"].__setitem__(2, "--engine-stop-s=600")),
    at_once=on_container(lambda container: container.pop("lifecycle")),
)
def the_grace_period_covers_both_drains_and_the_engine(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        made = planned(engine)
        leave_s = float(engine.engine.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0, 0])[1])
        drain_s = made.daemons[0].config.drain_timeout_s
        needed_s = leave_s + drain_s + made.engine_stop_s + drain_s + BEYOND_DRAIN_S
        if not leave_s or engine.pod["terminationGracePeriodSeconds"] < needed_s:
            yield f"{engine.name}: {needed_s:g} s may be needed, and Services leave it after {leave_s:g} s"


@policy(
    token=on_container(lambda container: set_variable(container, "KVFERRY_TOKEN_FILE", None)),
    secret=on_container(lambda container: set_variable(container, "KVFERRY_PEER_SECRET_FILE", None)),
    not_mounted=on_container(lambda container: container["volumeMounts"].pop(-1)),
    open_file=on_engine(lambda engine: engine.pod["volumes"][2]["secret"].update(defaultMode=0o444)),
    tables=on_container(lambda container: set_variable(container, "KVFERRY_ORDER_TABLES", None)),
    address=on_container(lambda container: set_variable(container, "KVFERRY_ADVERTISE", "$(NOBODY):7411")),
)
def daemons_prove_themselves_and_ask_for_proof(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        container = engine.engine
        try:
            config = planned(engine).daemons[0].config
        except KvferryError as error:
            yield f"{engine.name}: {error}"
            continue
        if not config.token_file or not (config.tls or config.peer_secret_file) or config.order_tables:
            yield f"{engine.name}: who calls need not prove it"
        for name in FILES:
            if path := variable(container, name):
                volume = engine.volume(container, path)
                if not volume or volume.get("secret", {}).get("defaultMode") not in (0o440, 440):
                    yield f"{engine.name}: {name} is no file of a secret, open to its group alone"


SHARED = ("hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace")


@policy(
    **{key: on_engine(lambda engine, key=key: engine.pod.update({key: True})) for key in SHARED},
    sidecar=on_engine(lambda engine: engine.pod.update(initContainers=[{"name": "kvferry"}])),
    root=on_engine(lambda engine: engine.pod["securityContext"].update(runAsUser=0)),
    capabilities=on_container(lambda container: container["securityContext"].pop("capabilities")),
    escalation=on_container(lambda container: container["securityContext"].pop("allowPrivilegeEscalation")),
    claim=on_engine(lambda engine: engine.pod.update(resourceClaims=[])),
    past_the_plugin=on_container(lambda container: set_variable(container, "NVIDIA_VISIBLE_DEVICES", "all")),
)
def one_container_needs_nothing_of_others(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        yield from (f"{engine.name}: {key} is not needed" for key in SHARED if engine.pod.get(key))
        if engine.daemons:
            yield f"{engine.name} has a daemon beside those of its command"
        if not engine.pod["securityContext"]["runAsUser"]:
            yield f"{engine.name} runs as root"
        context = engine.engine["securityContext"]
        if context.get("capabilities") != {"drop": ["ALL"]} or context.get("allowPrivilegeEscalation") is not False:
            yield f"{engine.name} has more rights than it needs"
        if "resourceClaims" in engine.pod or variable(engine.engine, "NVIDIA_VISIBLE_DEVICES"):
            yield f"{engine.name} gets GPUs past the device plugin"


@pytest.mark.parametrize(("more", "said"), [({"rdma": {"enabled": True}}, "without RDMA"), ({"nodes": 2}, "one node")])
def test_what_one_container_cannot_have_is_refused_in_words(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        helm({**ONE, **more})
