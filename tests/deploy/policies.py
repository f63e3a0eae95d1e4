"""Policies that a deployment must keep. Each policy yields what is wrong, and names the ways in which its points can be
lost."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rendered import (
    PLACED,
    SCHEDULED,
    Cluster,
    Engine,
    Resource,
    argument,
    container_port,
    matches,
    port_of,
    set_variable,
    variable,
)
from test_schemas import BEFORE_DRA, VERSIONS, check

import kvferry
from kvferry.errors import KvferryError
from kvferry.proxy import options as proxy_options
from kvferryd.config import OPTIONS, PREFIX, Config
from kvferryd.config.types import is_wildcard
from kvferryd.peers import allow


def _options(engine: str) -> Any:
    """The plug-in's options without the plug-in, which imports the engine."""
    file = Path(kvferry.__file__).parent / engine / "options.py"
    spec = importlib.util.spec_from_file_location(f"kvferry_{engine}_options", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"kvferry_{engine}_options"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Options


Options, SglangOptions = _options("vllm"), _options("sglang")
Check = Callable[[Cluster], Iterator[str]]
Loss = Callable[[Cluster], object]
FILES = {"token_file", "tls_cert", "tls_key", "tls_ca", "peer_secret_file"}
"""Settings whose values are of the container's file system."""
MARGIN_S = 10
POD_IP, POD_NAME, POD_NAMESPACE = "<status.podIP>", "<metadata.name>", "<metadata.namespace>"


@dataclass(frozen=True)
class Policy:
    """lose: by name, how each of its points is removed. only: where it applies at all. but: and where it does not."""

    check: Check
    lose: dict[str, Loss]
    only: str = ""
    but: str = ""

    @property
    def name(self) -> str:
        return self.check.__name__

    def applies(self, has: frozenset[str]) -> bool:
        return (not self.only or self.only in has) and self.but not in has


class Policies(list[Policy]):
    """Called as a decorator it takes a check in."""

    def __call__(self, *, only: str = "", but: str = "-", **lose: Loss) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            self.append(Policy(check, lose, only, but))
            return check

        return add

    def faults(self, cluster: Cluster) -> list[str]:
        """Faults of two engines, whose resources every version of Kubernetes takes."""
        assert len(cluster.engines) == 2
        for resource in cluster.resources:
            check(resource, [*VERSIONS, *BEFORE_DRA])
        return [fault for each in self for fault in each.check(cluster)]


POLICIES = policy = Policies()


def daemons(cluster: Cluster) -> Iterator[tuple[Engine, Resource]]:
    for engine in cluster.engines:
        for daemon in engine.daemons:
            yield engine, daemon


def on_daemon(change: Callable[[Resource], object]) -> Loss:
    return lambda cluster: change(next(daemons(cluster))[1])


def on_engine(change: Callable[[Engine], object]) -> Loss:
    return lambda cluster: change(cluster.engines[0])


def variables(name: str, value: str | None) -> Loss:
    return on_daemon(lambda daemon: set_variable(daemon, name, value))


def on_kind(kind: str, change: Callable[[Resource], object]) -> Loss:
    return lambda cluster: change(cluster.of(kind)[0])


def without(text: str, of: Callable[[Cluster], Resource] | None = None) -> Loss:
    """A container loses the arguments that have this text: the engine, or another."""
    return _arguments(lambda one: None if text in one else one, of)


def instead(pattern: str, text: str, of: Callable[[Cluster], Resource] | None = None) -> Loss:
    return _arguments(lambda one: re.sub(pattern, text, one), of)


def _arguments(change: Callable[[str], str | None], of: Callable[[Cluster], Resource] | None) -> Loss:
    def lose(cluster: Cluster) -> None:
        container = cluster.engines[0].engine if of is None else of(cluster)
        container["args"] = [new for one in container["args"] if (new := change(one)) is not None]

    return lose


def unmounted(name: str) -> Loss:
    """The daemon's container loses a volume."""
    return on_daemon(
        lambda daemon: daemon.update(volumeMounts=[one for one in daemon["volumeMounts"] if one["name"] != name])
    )


def volume_of(engine: Engine, name: str) -> Resource:
    return next(one for one in engine.pod["volumes"] if one["name"] == name)


def put(*path: Any, value: Any) -> Callable[[Resource], object]:
    def change(resource: Any) -> None:
        for step in path[:-1]:
            resource = resource[step]
        resource[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Resource], object]:
    def change(resource: Any) -> None:
        for step in path[:-1]:
            resource = resource[step]
        del resource[path[-1]]

    return change


# ---- the pod ----


def _into_containers(cluster: Cluster) -> None:
    pod = cluster.engines[0].pod
    pod["containers"].append(pod["initContainers"].pop())


@policy(no_restart=on_daemon(drop("restartPolicy")), beside_the_engine=_into_containers)
def the_daemon_is_a_native_sidecar(cluster: Cluster) -> Iterator[str]:
    """Up before the engine, ended after it."""
    for engine in cluster.engines:
        if len(engine.daemons) < 1:
            yield f"{engine.name} has no daemon"
        for daemon in engine.daemons:
            if daemon not in engine.pod.get("initContainers", []) or daemon.get("restartPolicy") != "Always":
                yield f"{engine.name}: {daemon['name']} is no init container that is restarted always"


@policy(alone=on_daemon(put("args", value=["serve"])), image_default=on_daemon(drop("args")))
def the_daemon_has_a_keeper(cluster: Cluster) -> Iterator[str]:
    """The kubelet lets a container that has died twice wait for ten seconds, and GPU memory would go with it."""
    for engine, daemon in daemons(cluster):
        if daemon.get("args") != ["keep"]:
            yield f"{engine.name}: {daemon['name']} does not run `kvferry keep`"


@policy(
    user=on_engine(lambda engine: engine.pod["securityContext"].pop("runAsUser")),
    group=on_engine(lambda engine: engine.pod["securityContext"].pop("fsGroup")),
    another_user=on_engine(lambda engine: engine.engine["securityContext"].update(runAsUser=1234)),
)
def one_user_owns_the_socket(cluster: Cluster) -> Iterator[str]:
    """The engine's socket has mode 0600."""
    for engine in cluster.engines:
        context = engine.pod["securityContext"]
        if "runAsUser" not in context or "fsGroup" not in context:
            yield f"{engine.name} does not fix user and group"
        for container in [*engine.daemons, engine.engine]:
            if container.get("securityContext", {}).get("runAsUser", context.get("runAsUser")) != context.get(
                "runAsUser"
            ):
                yield f"{engine.name}: {container['name']} runs as another user"


@policy(
    but="sglang",
    socket=variables("KVFERRY_ENGINE_SOCKET", "/run/elsewhere/engine.sock"),
    daemons_mount=unmounted("kvferry"),
    engines_mount=on_engine(lambda engine: engine.engine["volumeMounts"].pop(0)),
    engines_option=instead(r"engine[^/]*\.sock", "other.sock"),
)
def engine_and_daemon_meet_at_the_socket(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        extra = Options.parse(engine.kv_transfer_config["kv_connector_extra_config"])
        world = int(engine.argument("tensor-parallel-size", "1"))
        yield from _meet(engine, lambda rank, extra=extra, world=world: extra.socket_of(rank, world, rank, 0))


def _meet(engine: Engine, socket_of: Callable[[int], str]) -> Iterator[str]:
    """Faults that keep ranks and their daemons apart, if rank N asks at `socket_of(N)`."""
    for local_rank, daemon in enumerate(engine.daemons):
        socket = variable(daemon, "KVFERRY_ENGINE_SOCKET")
        try:
            wanted = socket_of(local_rank)
        except KvferryError as error:
            yield f"{engine.name}: {error}"
            continue
        if socket != wanted:
            yield f"{engine.name}: rank {local_rank} asks at {wanted}, its daemon listens on {socket}"
        folder = str(PurePosixPath(socket).parent)
        ours, theirs = engine.volume(daemon, folder), engine.volume(engine.engine, folder)
        if ours is None or ours != theirs or ours.get("emptyDir", {}).get("medium") != "Memory":
            yield f"{engine.name}: {folder} is not one volume in memory of both containers"


@policy(
    not_shared=on_engine(lambda engine: engine.pod.pop("shareProcessNamespace")),
    host_pid=on_engine(lambda engine: engine.pod.update(hostPID=True)),
    host_ipc=on_engine(lambda engine: engine.pod.update(hostIPC=True)),
    host_network=on_engine(lambda engine: engine.pod.update(hostNetwork=True)),
)
def the_containers_share_processes_and_nothing_of_the_host(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        if not engine.pod.get("shareProcessNamespace"):
            yield f"{engine.name}: engine and daemon have PID namespaces of their own"
        for key in ("hostPID", "hostIPC", "hostNetwork"):
            if engine.pod.get(key):
                yield f"{engine.name}: {key} is not needed"


@policy(
    capabilities=on_daemon(drop("securityContext", "capabilities", "drop")),
    escalation=on_daemon(drop("securityContext", "allowPrivilegeEscalation")),
    writable=on_daemon(drop("securityContext", "readOnlyRootFilesystem")),
    seccomp=on_engine(lambda engine: engine.pod["securityContext"].pop("seccompProfile")),
    token=on_engine(lambda engine: engine.pod.pop("automountServiceAccountToken")),
    no_tmp=on_daemon(lambda daemon: daemon["volumeMounts"].remove({"name": "daemon-tmp", "mountPath": "/tmp"})),
    engine_capabilities=on_engine(lambda engine: engine.engine.pop("securityContext")),
)
def nobody_has_more_rights_than_needed(cluster: Cluster) -> Iterator[str]:
    for name, template in cluster.pods:
        pod = template["spec"]
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name} gets a token of the API server"
        if pod["securityContext"].get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name} has no seccomp profile"
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container.get("securityContext", {})
            if context.get("allowPrivilegeEscalation") is not False:
                yield f"{name}: {container['name']} may gain rights"
            if context.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{name}: {container['name']} keeps capabilities"
            if set(context.get("capabilities", {}).get("add", [])) - {"IPC_LOCK"}:
                yield f"{name}: {container['name']} has more capabilities than IPC_LOCK"
    for engine, daemon in daemons(cluster):
        if not daemon["securityContext"].get("readOnlyRootFilesystem"):
            yield f"{engine.name}: the daemon may write to its image"
        if engine.volume(daemon, "/tmp") is None:
            yield f"{engine.name}: the daemon has no /tmp to write to"


@policy(
    but="rdma", root=on_engine(lambda engine: engine.pod["securityContext"].update(runAsUser=0, runAsNonRoot=False))
)
def nobody_is_root(cluster: Cluster) -> Iterator[str]:
    for name, template in cluster.pods:
        context = template["spec"]["securityContext"]
        if not context.get("runAsNonRoot") or not context.get("runAsUser"):
            yield f"{name} runs as root"


# ---- where it goes, what it needs from there ----


def _template(cluster: Cluster) -> Resource:
    return cluster.engines[0].spec["template"]


@policy(
    only="gpu",
    none=on_engine(lambda engine: engine.pod.pop("tolerations")),
    another=on_engine(lambda engine: engine.pod.update(tolerations=[{"key": "another", "operator": "Exists"}])),
    one_value=on_engine(lambda engine: engine.pod.update(tolerations=[{"key": "nvidia.com/gpu", "value": "a100"}])),
)
def engines_tolerate_the_usual_taint_of_gpus(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        if {"key": "nvidia.com/gpu", "operator": "Exists"} not in engine.pod.get("tolerations", []):
            yield f"{engine.name}: no node whose GPUs are tainted takes it"


@policy(
    only="placed",
    annotations=lambda cluster: _template(cluster)["metadata"].pop("annotations"),
    node_selector=on_engine(lambda engine: engine.pod["nodeSelector"].pop("example.org/pool")),
    tolerations=on_engine(lambda engine: engine.pod["tolerations"].pop(0)),
    affinity=on_engine(lambda engine: engine.pod["affinity"].pop("nodeAffinity")),
    priority=on_engine(lambda engine: engine.pod.pop("priorityClassName")),
    proxys_annotations=lambda cluster: _proxy(cluster)["metadata"].pop("annotations"),
    proxys_nodes=lambda cluster: _proxy(cluster)["spec"].pop("nodeSelector"),
    proxys_priority=lambda cluster: _proxy(cluster)["spec"].pop("priorityClassName"),
)
def pods_go_where_the_values_say(cluster: Cluster) -> Iterator[str]:
    for name, template in cluster.pods:
        pod = template["spec"]
        for what, asked in SCHEDULED.items():
            has = template["metadata"].get(what) if what == "annotations" else pod.get(what)
            if isinstance(asked, dict):
                kept = asked.items() <= (has or {}).items()
            else:
                kept = all(one in (has or []) for one in asked) if isinstance(asked, list) else has == asked
            if not kept:
                yield f"{name} has lost {what}"


@policy(
    only="placed",
    engines=on_engine(lambda engine: engine.pod.pop("imagePullSecrets")),
    proxy=lambda cluster: _proxy(cluster)["spec"].pop("imagePullSecrets"),
)
def images_come_from_a_registry_that_asks_who_pulls(cluster: Cluster) -> Iterator[str]:
    for name, template in cluster.pods:
        if template["spec"].get("imagePullSecrets") != PLACED["imagePullSecrets"]:
            yield f"{name}: its images cannot be pulled"


def _models(change: Callable[[Resource], object]) -> Loss:
    return on_engine(lambda engine: change(volume_of(engine, "models")))


@policy(
    only="placed",
    another=_models(put("persistentVolumeClaim", "claimName", value="another")),
    downloaded=_models(lambda volume: [volume.pop("persistentVolumeClaim"), volume.update(emptyDir={})]),
    elsewhere=on_engine(lambda engine: set_variable(engine.engine, "HF_HOME", "/tmp")),
    written=on_engine(
        lambda engine: next(one for one in engine.engine["volumeMounts"] if one["name"] == "models").pop("readOnly")
    ),
    looked_up=on_engine(lambda engine: set_variable(engine.engine, "HF_HUB_OFFLINE", None)),
    no_token=on_engine(lambda engine: set_variable(engine.engine, "HF_TOKEN", None)),
    token_in_the_open=on_engine(lambda engine: _open_token(engine.engine)),
)
def models_come_from_a_claim_and_gated_ones_by_a_token(cluster: Cluster) -> Iterator[str]:
    """A claim with the model is mounted read-only, and then nothing is looked up or written."""
    for engine in cluster.engines:
        volume = engine.volume(engine.engine, variable(engine.engine, "HF_HOME"))
        claim = (volume or {}).get("persistentVolumeClaim", {})
        if claim.get("claimName") != PLACED["models"]["claim"]:
            yield f"{engine.name}: the model does not come from the claim"
        mounts = [one for one in engine.engine["volumeMounts"] if one["mountPath"] == "/models"]
        if not claim.get("readOnly") or not mounts[0].get("readOnly") or not variable(engine.engine, "HF_HUB_OFFLINE"):
            yield f"{engine.name}: something may be written beside the model"
        tokens = [
            one.get("valueFrom", {}).get("secretKeyRef") for one in engine.engine["env"] if one["name"] == "HF_TOKEN"
        ]
        if tokens != [{"name": PLACED["models"]["hfTokenSecret"], "key": "token"}]:
            yield f"{engine.name}: no token out of a Secret for a gated model"


def _open_token(container: Resource) -> None:
    token = next(one for one in container["env"] if one["name"] == "HF_TOKEN")
    del token["valueFrom"]
    token["value"] = "hf_secret"


# ---- the GPU, the NIC ----


@policy(
    only="dra",
    daemon=on_daemon(lambda daemon: daemon["resources"].pop("claims")),
    engine=on_engine(lambda engine: engine.engine["resources"].pop("claims")),
    pod=on_engine(lambda engine: engine.pod.pop("resourceClaims")),
    template=lambda cluster: cluster.remove("ResourceClaimTemplate"),
    too_few=on_kind(
        "ResourceClaimTemplate", put("spec", "spec", "devices", "requests", 0, "exactly", "count", value=0)
    ),
    two_claims=on_engine(lambda engine: engine.pod["resourceClaims"].append({"name": "second"})),
    device=variables("KVFERRY_DEVICE", "cpu"),
)
def one_claim_is_held_by_both_containers(cluster: Cluster) -> Iterator[str]:
    templates = {one["metadata"]["name"]: one for one in cluster.of("ResourceClaimTemplate")}
    for engine in cluster.engines:
        claims = engine.pod.get("resourceClaims", [])
        if len(claims) != 1 or claims[0].get("resourceClaimTemplateName") not in templates:
            yield f"{engine.name} has not one claim of a template that exists"
            continue
        template = templates[claims[0]["resourceClaimTemplateName"]]
        count = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"]
        if count != len(engine.daemons):
            yield f"{engine.name}: {count} GPUs for {len(engine.daemons)} ranks"
        for container in [*engine.daemons, engine.engine]:
            if container.get("resources", {}).get("claims") != [{"name": claims[0]["name"]}]:
                yield f"{engine.name}: {container['name']} does not hold the claim"
    yield from _devices(cluster)


def _devices(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        for rank, daemon in enumerate(engine.daemons):
            if variable(daemon, "KVFERRY_DEVICE") != f"cuda:{rank}":
                yield f"{engine.name}: rank {rank}'s daemon is not beside its GPU"


@policy(
    only="runtime-class",
    runtime=on_engine(lambda engine: engine.pod.pop("runtimeClassName")),
    daemon=variables("NVIDIA_VISIBLE_DEVICES", None),
    engine=on_engine(lambda engine: set_variable(engine.engine, "NVIDIA_VISIBLE_DEVICES", "1")),
    neighbours=on_engine(lambda engine: engine.pod.pop("affinity")),
    nodes=on_engine(lambda engine: engine.pod.pop("nodeSelector")),
    device_plugin=on_engine(lambda engine: engine.engine.update(resources={"limits": {"nvidia.com/gpu": "1"}})),
)
def both_containers_name_one_gpu_of_a_node_of_theirs(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        pod = engine.pod
        if not pod.get("runtimeClassName") or "kvferry.io/gpu" not in pod.get("nodeSelector", {}):
            yield f"{engine.name}: no runtime, or any node"
        rules = (
            pod.get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
        )
        if not any(matches(rule["labelSelector"]["matchLabels"], engine.labels) for rule in rules):
            yield f"{engine.name}: two pods may take one GPU"
        shown = {variable(one, "NVIDIA_VISIBLE_DEVICES") for one in [*engine.daemons, engine.engine]}
        if len(shown) != 1 or not all(shown):
            yield f"{engine.name}: the containers see different GPUs"
        if "nvidia.com/gpu" in engine.engine.get("resources", {}).get("limits", {}):
            yield f"{engine.name}: the device plugin would choose another GPU"
    yield from _devices(cluster)


@policy(
    only="rdma",
    ipc_lock=on_daemon(drop("securityContext", "capabilities", "add")),
    not_root=on_engine(lambda engine: engine.pod["securityContext"].update(runAsUser=10001)),
    engine_too=on_engine(lambda engine: engine.engine["securityContext"]["capabilities"].update(add=["IPC_LOCK"])),
)
def memory_may_be_locked(cluster: Cluster) -> Iterator[str]:
    """A capability that is added reaches processes of root only."""
    for engine, daemon in daemons(cluster):
        if daemon["securityContext"]["capabilities"].get("add") != ["IPC_LOCK"]:
            yield f"{engine.name}: the daemon may not lock memory"
        if engine.pod["securityContext"].get("runAsUser") != 0:
            yield f"{engine.name}: IPC_LOCK has no effect for a user that is not root"
        if "add" in engine.engine["securityContext"]["capabilities"]:
            yield f"{engine.name}: the engine needs no capability"


@policy(
    only="rdma",
    resource=on_daemon(drop("resources", "limits", "rdma/ib")),
    required=variables("KVFERRY_REQUIRE_RDMA", None),
    tcp=variables("KVFERRY_UCX", "TLS=rc,tcp,cuda_copy TCP_PORT_RANGE=17411-17474"),
    any_transport=variables("KVFERRY_UCX", "TCP_PORT_RANGE=17411-17474"),
)
def bytes_go_by_rdma_or_not_at_all(cluster: Cluster) -> Iterator[str]:
    for engine, daemon in daemons(cluster):
        if not any(name.startswith("rdma/") for name in daemon["resources"]["limits"]):
            yield f"{engine.name}: the daemon has no NIC"
        if variable(daemon, "KVFERRY_REQUIRE_RDMA") != "true":
            yield f"{engine.name}: ready without RDMA"
        if "tcp" in _ucx(daemon).get("TLS", "tcp").split(","):
            yield f"{engine.name}: UCX may take TCP"


def _ucx(daemon: Resource) -> Any:
    return Config(ucx=variable(daemon, "KVFERRY_UCX") or {}).ucx


# ---- ranks ----


@policy(
    only="one-node",
    roster=variables("KVFERRY_ROSTER", None),
    ports=lambda cluster: set_variable(cluster.engines[0].daemons[1], "KVFERRY_PEER", "*:7411"),
    rest=lambda cluster: set_variable(cluster.engines[0].daemons[1], "KVFERRY_REST", "*:7410"),
    gpu=lambda cluster: set_variable(cluster.engines[0].daemons[1], "KVFERRY_DEVICE", "cuda:0"),
    daemon=on_engine(lambda engine: engine.pod["initContainers"].remove(engine.daemons[1])),
)
def ranks_of_a_pod_have_ports_of_their_own(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        if len(engine.daemons) != int(engine.argument("tensor-parallel-size")):
            yield f"{engine.name}: not one daemon for each rank"
        for setting in ("REST", "PEER", "ENGINE_SOCKET", "DEVICE", "ADVERTISE"):
            if len({variable(one, f"KVFERRY_{setting}") for one in engine.daemons}) != len(engine.daemons):
                yield f"{engine.name}: two daemons have one {setting.lower()}"
        first = variable(engine.daemons[0], "KVFERRY_ADVERTISE")
        if {variable(one, "KVFERRY_ROSTER") for one in engine.daemons} != {first}:
            yield f"{engine.name}: the ranks do not meet at rank 0"


@policy(
    only="two-nodes",
    roster=variables("KVFERRY_ROSTER", None),
    itself=variables("KVFERRY_ROSTER", "127.0.0.1:7411"),
    order=on_engine(lambda engine: engine.spec.update(podManagementPolicy="OrderedReady")),
    one_pod=on_engine(lambda engine: engine.spec.update(replicas=1)),
    headless=lambda cluster: [one["spec"].pop("clusterIP", None) for one in cluster.of("Service")],
    names_too_late=lambda cluster: [one["spec"].pop("publishNotReadyAddresses", None) for one in cluster.of("Service")],
    forbidden=variables("KVFERRY_ALLOW_PEERS", "10.0.0.0/8"),
    engine_id=instead('"engine_id": ?"[^"]*", ?', ""),
    front_at_any_rank=lambda cluster: [
        one["spec"]["selector"].pop("statefulset.kubernetes.io/pod-name", None) for one in cluster.of("Service")
    ],
)
def ranks_of_two_nodes_meet_at_the_name_of_pod_0(cluster: Cluster) -> Iterator[str]:
    for engine, daemon in daemons(cluster):
        service = cluster.service(engine.spec["serviceName"])
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"{engine.name}: its pods have no names"
        elif not service["spec"].get("publishNotReadyAddresses"):
            yield f"{engine.name}: names come with readiness, which waits for names"
        if engine.spec["podManagementPolicy"] != "Parallel":
            yield f"{engine.name}: rank 1 starts when rank 0 is ready, which waits for rank 1"
        if engine.spec["replicas"] != int(engine.argument("nnodes")):
            yield f"{engine.name}: not one pod for each node"
        peer = port_of(variable(daemon, "KVFERRY_PEER"))
        roster = f"{engine.name}-0.{engine.spec['serviceName']}.{POD_NAMESPACE}.svc:{peer}"
        if variable(daemon, "KVFERRY_ROSTER") != roster:
            yield f"{engine.name}: the ranks do not meet at {roster}"
        yield from _dialled(daemon, roster)
        if not engine.kv_transfer_config.get("engine_id"):
            yield f"{engine.name}: every rank would have an engine_id of its own"
        if not engine.argument("master-addr").startswith(f"{engine.name}-0.{engine.spec['serviceName']}"):
            yield f"{engine.name}: vLLM's ranks do not meet at pod 0"
        clients = [one for one in cluster.of("Service") if one["spec"].get("clusterIP") != "None"]
        ours = [one for one in clients if one["metadata"]["name"] == engine.name]
        if any(one["spec"]["selector"].get("statefulset.kubernetes.io/pod-name") != f"{engine.name}-0" for one in ours):
            yield f"{engine.name}: clients may be sent to a rank without an API server"


def _dialled(daemon: Resource, address: str) -> Iterator[str]:
    """Whether a daemon with these settings would dial such an address, by its own rule, whichever family pods have."""
    named = address.replace(POD_NAME, "some-pod-0").replace(POD_NAMESPACE, "kvferry")
    told = variable(daemon, "KVFERRY_ALLOW_PEERS").replace(POD_NAMESPACE, "kvferry")
    allowed = Config(allow_peers=told).allow_peers
    for pod in ("10.1.2.3", "fd00::5"):
        try:
            allow.check(Config(advertise=named.replace(POD_IP, pod)).advertise, allowed)
        except (KvferryError, ValueError) as error:
            yield f"{daemon['name']}: {error}"


@policy(
    missing=variables("KVFERRY_ADVERTISE", None),
    loopback=variables("KVFERRY_ADVERTISE", "127.0.0.1:7411"),
    listens_for_itself=variables("KVFERRY_PEER", "127.0.0.1:7411"),
    forbidden=variables("KVFERRY_ALLOW_PEERS", "127.0.0.0/8"),
    no_field=on_daemon(lambda daemon: daemon.update(env=[one for one in daemon["env"] if "valueFrom" not in one])),
    used_before_defined=on_daemon(lambda daemon: daemon["env"].reverse()),
    port=variables("KVFERRY_ADVERTISE", "[$(POD_IP)]:7499"),
    no_brackets=variables("KVFERRY_ADVERTISE", "$(POD_IP):7411"),
    no_ipv6=variables("KVFERRY_ALLOW_PEERS", "10.0.0.0/8"),
)
def the_pod_advertises_where_it_is_reached(cluster: Cluster) -> Iterator[str]:
    for engine, daemon in daemons(cluster):
        peer, advertised = variable(daemon, "KVFERRY_PEER"), variable(daemon, "KVFERRY_ADVERTISE")
        if not is_wildcard(peer):
            yield f"{engine.name}: peers are heard on {peer} only"
        named = f"{POD_NAME}.{engine.spec['serviceName']}.{POD_NAMESPACE}.svc"
        if advertised not in (f"[{POD_IP}]:{port_of(peer)}", f"{named}:{port_of(peer)}"):
            yield f"{engine.name}: {advertised} is not where it is reached"
        else:
            yield from _dialled(daemon, advertised)


# ---- life and death ----


def _probe(name: str, path: str) -> Loss:
    return on_daemon(put(name, "httpGet", "path", value=path))


@policy(
    deadlock=_probe("startupProbe", "/readyz"),
    killed_for_not_being_ready=_probe("livenessProbe", "/readyz"),
    ready_when_alive=_probe("readinessProbe", "/healthz"),
    no_startup=on_daemon(drop("startupProbe")),
    no_liveness=on_daemon(drop("livenessProbe")),
    no_readiness=on_daemon(drop("readinessProbe")),
    loopback=variables("KVFERRY_REST", "127.0.0.1:7410"),
    one_family=variables("KVFERRY_REST", "0.0.0.0:7410"),
    port=on_daemon(put("startupProbe", "httpGet", "port", value="peer")),
)
def probes_ask_for_life_first_and_readiness_later(cluster: Cluster) -> Iterator[str]:
    """A startup probe on /readyz waits for the engine, which waits for the startup probe."""
    for engine, daemon in daemons(cluster):
        rest = variable(daemon, "KVFERRY_REST")
        if not rest.startswith("*:"):
            yield f"{engine.name}: a kubelet cannot ask {rest}"
        for probe, path in {
            "startupProbe": "/healthz",
            "livenessProbe": "/healthz",
            "readinessProbe": "/readyz",
        }.items():
            asked = daemon.get(probe, {}).get("httpGet", {})
            if asked.get("path") != path or container_port(daemon, asked.get("port", "")) != port_of(rest):
                yield f"{engine.name}: {daemon['name']}'s {probe} does not ask {path}"


@policy(
    but="sglang",
    no_drain=on_daemon(drop("lifecycle")),
    default_grace=on_engine(lambda engine: engine.pod.pop("terminationGracePeriodSeconds")),
    short_grace=on_engine(lambda engine: engine.pod.update(terminationGracePeriodSeconds=120)),
    default_drain=variables("KVFERRY_DRAIN_TIMEOUT_S", None),
    engine_takes_longer=instead("--shutdown-timeout=.*", "--shutdown-timeout=300"),
    engine_leaves_at_once=on_engine(lambda engine: engine.engine.pop("lifecycle")),
    engine_drops_what_it_has=without("shutdown"),
)
def the_grace_period_covers_every_step(cluster: Cluster) -> Iterator[str]:
    """Both preStop hooks start at once; the daemon gets SIGTERM when its own has ended and the engine is gone."""
    for engine in cluster.engines:
        if not float(engine.argument("shutdown-timeout", "0")):
            yield f"{engine.name}: the engine drops the requests that it has"
        yield from _time_to_end(engine, float(engine.argument("shutdown-timeout", "0")))


def _time_to_end(engine: Engine, answers_s: float) -> Iterator[str]:
    engine_s = _seconds(engine.engine, r"sleep,(\d+)") + answers_s
    if not _seconds(engine.engine, r"sleep,(\d+)"):
        yield f"{engine.name}: the engine ends while Services still send requests"
    for daemon in engine.daemons:
        wait_s = _seconds(daemon, r"kvferry drain --wait (\d+)")
        if not wait_s:
            yield f"{engine.name}: {daemon['name']} does not drain"
        hook_s = _seconds(daemon, r"sleep (\d+)") + wait_s
        exit_s = float(variable(daemon, "KVFERRY_DRAIN_TIMEOUT_S") or 300)
        needed_s = max(hook_s, engine_s) + exit_s + MARGIN_S
        if engine.pod.get("terminationGracePeriodSeconds", 30) < needed_s:
            yield f"{engine.name}: the steps take {needed_s:g} s at most, the grace period is shorter"


def _seconds(container: Resource, pattern: str) -> float:
    command = ",".join(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []))
    found = re.search(pattern, command)
    return float(found[1]) if found else 0.0


@policy(
    none=lambda cluster: cluster.remove("PodDisruptionBudget"),
    another=on_kind("PodDisruptionBudget", put("spec", "selector", "matchLabels", value={"app": "another"})),
    all_at_once=on_kind("PodDisruptionBudget", put("spec", "maxUnavailable", value="100%")),
    blocks_nodes=on_kind("PodDisruptionBudget", drop("spec", "unhealthyPodEvictionPolicy")),
)
def nodes_are_drained_one_pod_at_a_time(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        budgets = [
            one["spec"]
            for one in cluster.of("PodDisruptionBudget")
            if matches(one["spec"]["selector"]["matchLabels"], engine.labels)
        ]
        if len(budgets) != 1 or budgets[0].get("maxUnavailable") != 1:
            yield f"{engine.name} has not one budget of one pod"
        elif budgets[0].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{engine.name}: a pod that is not ready keeps its node from being drained"


# ---- the network ----


def _rule(number: int, change: Callable[[Resource], object]) -> Loss:
    def lose(cluster: Cluster) -> None:
        policies = [one for one in cluster.of("NetworkPolicy") if "ranks" not in one["metadata"]["name"]]
        change(policies[0]["spec"]["ingress"][number])

    return lose


@policy(
    none=lambda cluster: cluster.remove("NetworkPolicy"),
    grpc=_rule(0, lambda rule: rule["ports"].pop(0)),
    ucx=_rule(0, lambda rule: rule["ports"].__delitem__(slice(1, None))),
    part_of_ucx=_rule(0, lambda rule: next(one for one in rule["ports"] if "endPort" in one).update(endPort=17420)),
    any_port=variables("KVFERRY_UCX", ""),
    from_anywhere=_rule(0, lambda rule: rule.pop("from")),
    every_port=_rule(1, lambda rule: rule.pop("ports")),
    clients=_rule(1, lambda rule: rule["ports"].pop(0)),
    routers=_rule(1, lambda rule: rule["ports"].__delitem__(slice(1, None))),
    other_pods=lambda cluster: [
        one["spec"]["podSelector"].update(matchLabels={"app": "another"}) for one in cluster.of("NetworkPolicy")
    ],
)
def only_daemons_reach_daemons(cluster: Cluster) -> Iterator[str]:
    """gRPC and the ports that UCX opens; the range is in the daemon's settings, or UCX takes any."""
    for engine, daemon in daemons(cluster):
        rules = [
            rule
            for one in cluster.of("NetworkPolicy")
            if matches(one["spec"]["podSelector"]["matchLabels"], engine.labels)
            for rule in one["spec"]["ingress"]
        ]
        if not all(rule.get("from") for rule in rules):
            yield f"{engine.name}: a rule admits everybody"
        first, _, last = _ucx(daemon).get("TCP_PORT_RANGE", "1024-65535").partition("-")
        peer = port_of(variable(daemon, "KVFERRY_PEER"))
        other = next(one for one in cluster.engines if one.name != engine.name)
        between = [rule for rule in rules if _admits(rule, other.labels) and "ports" in rule]
        for wanted in ((peer, peer), (int(first), int(last))):
            if not any(_opens(rule, *wanted) for rule in between):
                yield f"{engine.name}: other daemons do not reach {wanted[0]} to {wanted[1]}"
        front = [rule for rule in rules if _admits(rule, {"kvferry.io/front": "true"})]
        for port in (8000, port_of(variable(daemon, "KVFERRY_REST"))):
            if not any("ports" in rule and _opens(rule, port, port) for rule in front):
                yield f"{engine.name}: routers do not reach {port}"
        for rule in front:
            if "ports" not in rule or _opens(rule, peer, peer):
                yield f"{engine.name}: routers reach what is for daemons only"


def _admits(rule: Resource, labels: dict[str, str]) -> bool:
    return any(
        "namespaceSelector" not in one and matches(one["podSelector"]["matchLabels"], labels)
        for one in rule.get("from", [])
    )


def _opens(rule: Resource, first: int, last: int) -> bool:
    return any(one["port"] <= first and last <= one.get("endPort", one["port"]) for one in rule["ports"])


@policy(
    only="two-nodes",
    closed=lambda cluster: cluster.resources.remove(
        next(one for one in cluster.of("NetworkPolicy") if "ranks" in one["metadata"]["name"])
    ),
)
def ranks_reach_each_other_on_every_port(cluster: Cluster) -> Iterator[str]:
    """NCCL chooses its ports."""
    for engine in cluster.engines:
        if not any(
            "ports" not in rule and _admits(rule, engine.labels)
            for one in cluster.of("NetworkPolicy")
            if matches(one["spec"]["podSelector"]["matchLabels"], engine.labels)
            for rule in one["spec"]["ingress"]
        ):
            yield f"{engine.name}: its ranks do not reach each other"


def _lost_secret(name: str) -> Loss:
    return on_engine(lambda engine: engine.pod["volumes"].remove(volume_of(engine, name)))


@policy(
    no_token=variables("KVFERRY_TOKEN_FILE", None),
    not_mounted=unmounted("token"),
    no_secret=_lost_secret("token"),
    unreadable=on_engine(lambda engine: volume_of(engine, "token")["secret"].update(defaultMode=0o400)),
)
def rest_asks_for_a_token(cluster: Cluster) -> Iterator[str]:
    """A REST service on every address without one would let anyone order writes."""
    for engine, daemon in daemons(cluster):
        file = variable(daemon, "KVFERRY_TOKEN_FILE")
        volume = engine.volume(daemon, file) if file else None
        if volume is None or "secret" not in volume:
            yield f"{engine.name}: no token in a Secret"
        elif not volume["secret"].get("defaultMode", 0o644) & 0o040:
            yield f"{engine.name}: the group of the volumes may not read the token"


@policy(by_default=variables("KVFERRY_ORDER_TABLES", None), allowed=variables("KVFERRY_ORDER_TABLES", "true"))
def only_the_engine_names_blocks(cluster: Cluster) -> Iterator[str]:
    for engine, daemon in daemons(cluster):
        if variable(daemon, "KVFERRY_ORDER_TABLES") != "false":
            yield f"{engine.name}: an order may name the blocks that {daemon['name']} writes"


@policy(
    but="tls",
    no_secret=variables("KVFERRY_PEER_SECRET_FILE", None),
    elsewhere=variables("KVFERRY_PEER_SECRET_FILE", "/etc/kvferry/secret"),
    not_mounted=_lost_secret("peers"),
    not_in_a_secret=on_engine(lambda engine: volume_of(engine, "peers").pop("secret")),
)
def daemons_without_certificates_share_a_secret(cluster: Cluster) -> Iterator[str]:
    """A daemon listens on no address of a pod's network without a proof of who calls. All share one secret."""
    secrets = set()
    for engine, daemon in daemons(cluster):
        file = variable(daemon, "KVFERRY_PEER_SECRET_FILE")
        volume = engine.volume(daemon, file) if file else None
        if volume is None or not volume.get("secret", {}).get("defaultMode", 0) & 0o040:
            yield f"{engine.name}: {daemon['name']} has no secret that its group may read"
        else:
            secrets.add((volume["secret"]["secretName"], PurePosixPath(file).name))
    if len(secrets) > 1:
        yield f"not one secret for all: {sorted(secrets)}"


@policy(
    only="tls",
    settings=variables("KVFERRY_TLS_CA", None),
    not_mounted=_lost_secret("tls"),
    no_certificate=lambda cluster: cluster.remove("Certificate"),
    no_issuer=lambda cluster: cluster.remove("Issuer"),
    servers_only=lambda cluster: _leaf(cluster)["spec"].update(usages=["server auth"]),
    other_names=lambda cluster: _leaf(cluster)["spec"].update(dnsNames=["kvferry.svc"]),
    two_labels=lambda cluster: _leaf(cluster)["spec"].update(dnsNames=["*.kvferry.svc"]),
    by_address=variables("KVFERRY_ADVERTISE", "$(POD_IP):7411"),
)
def certificates_are_for_the_names_that_are_dialled(cluster: Cluster) -> Iterator[str]:
    """No certificate can have the address of a pod to come, and a wildcard stands for one label."""
    issuers = {one["metadata"]["name"] for one in cluster.of("Issuer")}
    secrets = {one["spec"]["secretName"]: one["spec"] for one in cluster.of("Certificate")}
    for spec in secrets.values():
        if spec["issuerRef"]["name"] not in issuers:
            yield f"nobody issues {spec['secretName']}"
    for engine, daemon in daemons(cluster):
        for setting, file in {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}.items():
            path = variable(daemon, f"KVFERRY_TLS_{setting.upper()}")
            volume = engine.volume(daemon, path) if path else None
            secret = volume["secret"]["secretName"] if volume and "secret" in volume else ""
            if PurePosixPath(path).name != file or secret not in secrets:
                yield f"{engine.name}: tls_{setting} is not {file} of a certificate"
                continue
            spec = secrets[secret]
            if not {"server auth", "client auth"} <= set(spec.get("usages", [])):
                yield f"{engine.name}: a daemon dials and is dialled"
            for address in filter(None, (variable(daemon, "KVFERRY_ADVERTISE"), variable(daemon, "KVFERRY_ROSTER"))):
                host = address.rpartition(":")[0].replace(POD_NAME, "pod-0").replace(POD_NAMESPACE, "kvferry")
                if not any(_covers(name, host) for name in spec.get("dnsNames", [])):
                    yield f"{engine.name}: no name of the certificate is {host}"


def _of(role: str, cluster: Cluster) -> Engine:
    return next(one for one in cluster.engines if role in one.name)


@policy(
    only="tls",
    none=lambda cluster: set_variable(_of("decode", cluster).daemons[0], "KVFERRY_KNOWN_PEERS", None),
    by_address=lambda cluster: set_variable(
        _of("decode", cluster).daemons[0], "KVFERRY_KNOWN_PEERS", "prefill-peers:7411"
    ),
    one_more=lambda cluster: _of("prefill", cluster).spec.update(replicas=2),
)
def every_prefill_engine_is_met_by_a_name_of_the_certificate(cluster: Cluster) -> Iterator[str]:
    """Rank 0's name is enough for an engine of several pods."""
    prefill = _of("prefill", cluster)
    pods = 1 if variable(prefill.daemons[0], "KVFERRY_ROSTER") else prefill.spec["replicas"]
    at = f"{prefill.spec['serviceName']}.{POD_NAMESPACE}.svc:7411"
    for daemon in _of("decode", cluster).daemons:
        known = variable(daemon, "KVFERRY_KNOWN_PEERS").split(",")
        for name in (f"{prefill.name}-{pod}.{at}" for pod in range(pods)):
            if name not in known:
                yield f"{name} is not met ahead"


def _leaf(cluster: Cluster) -> Resource:
    return next(one for one in cluster.of("Certificate") if not one["spec"].get("isCA"))


def _covers(name: str, host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:])
    return False


def _without_rules(text: str) -> Loss:
    """NetworkPolicies lose the rules that name this."""

    def lose(cluster: Cluster) -> None:
        for one in cluster.of("NetworkPolicy"):
            one["spec"]["ingress"] = [rule for rule in one["spec"]["ingress"] if text not in str(rule)]

    return lose


@policy(
    only="monitoring",
    none=lambda cluster: cluster.remove("PodMonitor"),
    port=on_kind("PodMonitor", put("spec", "podMetricsEndpoints", 0, "port", value="metrics")),
    no_token=on_kind("PodMonitor", drop("spec", "podMetricsEndpoints", 0, "authorization")),
    other_pods=on_kind("PodMonitor", put("spec", "selector", "matchLabels", value={"app": "another"})),
    shut_out=_without_rules("monitoring"),
)
def prometheus_reads_every_daemon(cluster: Cluster) -> Iterator[str]:
    for engine, daemon in daemons(cluster):
        monitors = [
            one["spec"]
            for one in cluster.of("PodMonitor")
            if matches(one["spec"]["selector"]["matchLabels"], engine.labels)
        ]
        rest = port_of(variable(daemon, "KVFERRY_REST"))
        endpoints = [
            end
            for spec in monitors
            for end in spec["podMetricsEndpoints"]
            if container_port(daemon, end["port"]) == rest
        ]
        if not endpoints or endpoints[0].get("path") != "/metrics":
            yield f"{engine.name}: nobody reads {daemon['name']}'s metrics"
        elif not endpoints[0].get("authorization", {}).get("credentials", {}).get("key"):
            yield f"{engine.name}: Prometheus has no token"
        if not _prometheus_reaches(cluster, rest):
            yield f"{engine.name}: Prometheus does not reach {rest}"


def _prometheus_reaches(cluster: Cluster, port: int) -> bool:
    return any(
        "namespaceSelector" in one and _opens(rule, port, port)
        for policy in cluster.of("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        if "ports" in rule
        for one in rule.get("from", [])
    )


def _metrics(cluster: Cluster) -> Resource | None:
    return next((one for one in cluster.of("Service") if one["metadata"]["name"].endswith("metrics")), None)


def on_metrics(change: Callable[[Resource], object]) -> Loss:
    def lose(cluster: Cluster) -> None:
        service = _metrics(cluster)
        assert service is not None
        change(service)

    return lose


@policy(
    only="metrics-service",
    none=lambda cluster: cluster.resources.remove(_metrics(cluster)),
    one_address=on_metrics(drop("spec", "clusterIP")),
    ready_ones=on_metrics(drop("spec", "publishNotReadyAddresses")),
    other_pods=on_metrics(put("spec", "selector", value={"app": "another"})),
    daemons=on_metrics(lambda service: service["spec"]["ports"].pop()),
    engines=on_metrics(lambda service: service["spec"]["ports"].pop(0)),
    shut_out=_without_rules("monitoring"),
)
def a_service_shows_prometheus_every_daemon_and_engine(cluster: Cluster) -> Iterator[str]:
    """There is an endpoint for each pod: behind one address a scrape would be of any of them. No operator is needed."""
    service = _metrics(cluster)
    if service is None:
        yield "there is no Service of metrics"
        return
    spec = service["spec"]
    if spec.get("clusterIP") != "None" or not spec.get("publishNotReadyAddresses"):
        yield "not every pod has an endpoint"
    if cluster.of("PodMonitor"):
        yield "a PodMonitor needs the operator"
    served = [
        *((each.name, each.labels, each.engine, 8000) for each in cluster.engines),
        *((each.name, each.labels, one, port_of(variable(one, "KVFERRY_REST"))) for each, one in daemons(cluster)),
        *(
            (name, template["metadata"]["labels"], *of_daemon)
            for name, template in cluster.pods
            for of_daemon in _of_daemons(template["spec"])
        ),
    ]
    for name, labels, container, port in served:
        if not matches(spec["selector"], labels):
            yield f"{name} is not in the Service of metrics"
        shown = [one for one in spec["ports"] if container_port(container, one["targetPort"]) == port]
        if [one["port"] for one in shown] != [port]:
            yield f"{name}: nobody reads the metrics of {container['name']} at {port}"
        if not _prometheus_reaches(cluster, port):
            yield f"{name}: Prometheus does not reach {port}"


def _of_daemons(pod: Resource) -> Iterator[tuple[Resource, int]]:
    """(container, port) of each REST API of a daemon, in whichever container it runs."""
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        for port in container.get("ports", ()):
            if port["name"].partition("-")[0] == "rest":
                yield container, port["containerPort"]


@policy(
    misspelt=lambda cluster: next(daemons(cluster))[1]["env"].append({"name": "KVFERRY_ADVERTIZE", "value": "a:1"}),
    bad_value=variables("KVFERRY_DEVICE", "gpu"),
    bad_number=variables("KVFERRY_DRAIN_TIMEOUT_S", "soon"),
)
def every_setting_is_one_that_the_daemon_reads(cluster: Cluster) -> Iterator[str]:
    for engine, daemon in daemons(cluster):
        for one in daemon["env"]:
            setting = one["name"].removeprefix(PREFIX).lower()
            if not one["name"].startswith(PREFIX) or setting in FILES:
                continue
            value = variable(daemon, one["name"]).replace(POD_IP, "10.1.2.3").replace(POD_NAME, "p-0")
            if setting not in OPTIONS:
                yield f"{engine.name}: {one['name']} is no setting"
                continue
            try:
                Config(**{setting: value.replace(POD_NAMESPACE, "kvferry")}) if value else None
            except ValueError as wrong:
                yield f"{engine.name}: {one['name']} = {value} {wrong}"


@policy(
    target=lambda cluster: [port.update(targetPort="nowhere") for port in cluster.of("Service")[0]["spec"]["ports"]],
    selector=on_kind("Service", put("spec", "selector", value={"app": "another"})),
)
def services_lead_to_containers(cluster: Cluster) -> Iterator[str]:
    for service in cluster.of("Service"):
        name, selector = service["metadata"]["name"], dict(service["spec"]["selector"])
        selector.pop("statefulset.kubernetes.io/pod-name", None)
        pods = [pod for _, pod in cluster.pods if matches(selector, pod["metadata"]["labels"])]
        if len(pods) != (2 if service is _metrics(cluster) else 1):
            yield f"{name} leads to {len(pods)} kinds of pod"
        for pod in pods:
            containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
            for port in service["spec"]["ports"]:
                if not any(container_port(one, port["targetPort"]) for one in containers):
                    yield f"{name}: no container has the port {port['targetPort']}"


# ---- fronts and engines ----


@policy(
    but="sglang",
    module=instead("kvferry.vllm", ""),
    option=instead('"socket"', '"sockets"'),
    unchecked=without("middleware"),
    nameless=on_engine(lambda engine: set_variable(engine.engine, "USER", None)),
)
def the_engine_loads_the_connector(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        config = engine.kv_transfer_config
        if (config["kv_connector"], config["kv_connector_module_path"]) != ("KvferryConnector", "kvferry.vllm"):
            yield f"{engine.name}: another connector"
        if config["kv_role"] != "kv_both":
            yield f"{engine.name}: who publishes is each request's affair"
        try:
            Options.parse(config["kv_connector_extra_config"])
        except KvferryError as error:
            yield f"{engine.name}: {error}"
        if engine.argument("middleware") != "kvferry.asgi.CheckTransferParams":
            yield f"{engine.name}: malformed kv_transfer_params are answered 500"
        if not variable(engine.engine, "USER") or not variable(engine.engine, "HOME"):
            yield f"{engine.name}: a user without a name or a home"


@policy(only="ipv6", default=without("--host"), one_family=instead("::", "0.0.0.0"))
def the_engine_listens_on_ipv6(cluster: Cluster) -> Iterator[str]:
    """vLLM listens on IPv4 unless it is told an address of IPv6; `::` is both."""
    for engine in cluster.engines:
        if engine.argument("host") != "::":
            yield f"{engine.name}: no client reaches it over IPv6"


def _proxy(cluster: Cluster) -> Resource:
    return cluster.of("Deployment")[0]["spec"]["template"]


def _front(cluster: Cluster) -> Resource:
    """The proxy's container."""
    return _proxy(cluster)["spec"]["containers"][0]


@policy(
    only="proxy",
    none=lambda cluster: cluster.remove("Deployment"),
    label=lambda cluster: _proxy(cluster)["metadata"]["labels"].pop("kvferry.io/front"),
    decode=lambda cluster: _front(cluster)["args"].pop(),
    daemons=instead(",daemon.*", "", _front),
    token=without("token", _front),
    another_pod=instead(r"-0\.", "-9.", _front),
    loopback=instead(r"\*:8000", "127.0.0.1:8000", _front),
    one_family=instead(r"\*:8000", "0.0.0.0:8000", _front),
)
def the_proxy_knows_every_engine_and_daemon(cluster: Cluster) -> Iterator[str]:
    if not cluster.of("Deployment"):
        yield "there is no proxy"
        return
    template = _proxy(cluster)
    container = template["spec"]["containers"][0]
    if template["metadata"]["labels"].get("kvferry.io/front") != "true":
        yield "the NetworkPolicy shuts the proxy out"
    if not argument(container, "listen").startswith("*:"):
        yield "the proxy is not heard by everybody"
    if not argument(container, "daemon-token-file"):
        yield "the daemons refuse a proxy without a token"
    for role in ("prefill", "decode"):
        told = [proxy_options.endpoint(argument(container, role))] if argument(container, role) else []
        engine = _of(role, cluster)
        at = engine.spec["serviceName"]
        nodes = range(engine.spec["replicas"])
        rest = [port_of(variable(one, "KVFERRY_REST")) for one in engine.daemons]
        daemon_urls = tuple(f"http://{engine.name}-{node}.{at}:{port}" for node in nodes for port in rest)
        if [(one.url, one.daemons) for one in told] != [(f"http://{engine.name}-0.{at}:8000", daemon_urls)]:
            yield f"the proxy does not know the {role} engine and its daemons"


def _router(change: Callable[[Engine], object]) -> Loss:
    return lambda cluster: change(_of("decode", cluster))


@policy(
    only="llm-d",
    none=_router(lambda engine: engine.pod["initContainers"].remove(engine.router)),
    no_sidecar=_router(lambda engine: engine.router.pop("restartPolicy")),
    connector=_router(lambda engine: engine.router["args"].remove("--connector=nixlv2")),
    another_port=_router(lambda engine: engine.engine.update(args=["--port=8000", *engine.engine["args"][1:]])),
    role=_router(lambda engine: engine.labels.pop("llm-d.ai/role")),
    shut_out=_router(lambda engine: engine.labels.pop("kvferry.io/front")),
    gateway=_without_rules("llm-d"),
)
def llm_ds_sidecar_stands_before_decode(cluster: Cluster) -> Iterator[str]:
    for engine in cluster.engines:
        role = "decode" if "decode" in engine.name else "prefill"
        if engine.labels.get("llm-d.ai/role") != role:
            yield f"{engine.name}: llm-d's scheduler does not know its role"
        if role == "prefill":
            continue
        router = next((one for one in engine.pod["initContainers"] if one["name"] == "routing-proxy"), None)
        if router is None or router.get("restartPolicy") != "Always":
            yield f"{engine.name}: no routing sidecar"
            continue
        if argument(router, "connector") != "nixlv2":
            yield f"{engine.name}: the sidecar does not speak kv_transfer_params"
        if argument(router, "vllm-port") != engine.argument("port") or argument(router, "port") == engine.argument(
            "port"
        ):
            yield f"{engine.name}: the sidecar does not stand before the engine"
        if container_port(router, "front") != int(argument(router, "port")):
            yield f"{engine.name}: clients do not reach the sidecar"
        if engine.labels.get("kvferry.io/front") != "true":
            yield f"{engine.name}: the sidecar does not reach the prefill engine"
    rules = [rule for one in cluster.of("NetworkPolicy") for rule in one["spec"]["ingress"]]
    if not any("llm-d" in str(rule) and _opens(rule, 8000, 8000) for rule in rules if "ports" in rule):
        yield "llm-d's gateway does not reach the engines"


def _argument(name: str, value: str | None) -> Loss:
    """The prefill engine's. None removes it."""

    def lose(cluster: Cluster) -> None:
        container, flag = _of("prefill", cluster).engine, f"--{name}"
        container["args"] = [one for one in container["args"] if one.partition("=")[0] != flag]
        if value is not None:
            container["args"].append(f"{flag}={value}")

    return lose


@policy(
    only="sglang",
    socket=variables("KVFERRY_ENGINE_SOCKET", "/run/elsewhere/engine.sock"),
    engines_socket=on_engine(lambda engine: set_variable(engine.engine, "KVFERRY_SGLANG_SOCKET", "/run/other.sock")),
    misspelt=on_engine(
        lambda engine: engine.engine["env"].append({"name": "KVFERRY_SGLANG_SOCKETS", "value": "/run/kvferry/a.sock"})
    ),
    backend=_argument("disaggregation-transfer-backend", "nixl"),
    role=_argument("disaggregation-mode", "decode"),
    too_few_daemons=_argument("tp-size", "4"),
    loopback=_argument("host", None),
    unmeasured=_argument("enable-metrics", None),
    probed_by_tokens=on_engine(
        lambda engine: set_variable(engine.engine, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", None)
    ),
    nameless=on_engine(lambda engine: set_variable(engine.engine, "USER", None)),
    no_drain=on_daemon(drop("lifecycle")),
    short_grace=on_engine(lambda engine: engine.pod.update(terminationGracePeriodSeconds=120)),
    leaves_at_once=on_engine(lambda engine: engine.engine.pop("lifecycle")),
)
def sglang_finds_its_daemons(cluster: Cluster) -> Iterator[str]:
    """SGLang listens on loopback unless it is told, and its probe computes a token."""
    for engine in cluster.engines:
        named = {one["name"]: variable(engine.engine, one["name"]) for one in engine.engine["env"]}
        ranks = int(engine.argument("tp-size", "1"))
        try:
            options = SglangOptions.read(named)
        except KvferryError as error:
            yield f"{engine.name}: {error}"
            continue
        yield from _meet(engine, lambda rank, options=options, ranks=ranks: options.socket_of(rank, ranks))
        yield from _time_to_end(engine, 60)
        if len(engine.daemons) != ranks:
            yield f"{engine.name}: not one daemon for each rank"
        role = "decode" if "decode" in engine.name else "prefill"
        if engine.argument("disaggregation-mode") != role:
            yield f"{engine.name} does not {role}"
        if engine.argument("disaggregation-transfer-backend") != "kvferry":
            yield f"{engine.name}: another backend"
        if engine.argument("host") != "0.0.0.0":
            yield f"{engine.name} is heard by itself only"
        if "--enable-metrics" not in engine.engine["args"]:
            yield f"{engine.name} has no metrics"
        if named.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") != "false":
            yield f"{engine.name}: a probe waits behind requests"
        if not named.get("USER") or not named.get("HOME"):
            yield f"{engine.name}: a user without a name or a home"


@policy(
    only="sglang",
    port=_argument("disaggregation-bootstrap-port", "9000"),
    closed=_rule(0, lambda rule: rule.update(ports=[one for one in rule["ports"] if one["port"] != 8998])),
    router=lambda cluster: _front(cluster)["args"].remove("8998"),
    none=lambda cluster: cluster.remove("Deployment"),
    decode=lambda cluster: _front(cluster)["args"].pop(),
    mixed=lambda cluster: _front(cluster)["args"].remove("--pd-disaggregation"),
    retries=lambda cluster: _front(cluster)["args"].remove("--disable-retries"),
    label=lambda cluster: _proxy(cluster)["metadata"]["labels"].pop("kvferry.io/front"),
)
def sglangs_router_brings_decode_to_prefills_bootstrap_address(cluster: Cluster) -> Iterator[str]:
    if not cluster.of("Deployment"):
        yield "there is no router"
        return
    template = _proxy(cluster)
    args = template["spec"]["containers"][0]["args"]
    if template["metadata"]["labels"].get("kvferry.io/front") != "true":
        yield "the NetworkPolicy shuts the router out"
    prefill, decode = _of("prefill", cluster), _of("decode", cluster)
    port = container_port(prefill.engine, "bootstrap")
    if prefill.argument("disaggregation-bootstrap-port") != str(port):
        yield f"prefill does not answer at port {port}"
    first, second = (f"http://{one.name}-0.{one.spec['serviceName']}:8000" for one in (prefill, decode))
    told = ["--prefill", first, str(port), "--decode", second]
    if args[-5:] != told or "--pd-disaggregation" not in args:
        yield "the router does not know both engines"
    if "--disable-retries" not in args:
        yield "a room that is sent twice is refused"
    rules = [rule for one in cluster.of("NetworkPolicy") for rule in one["spec"]["ingress"]]
    if not any(_admits(rule, decode.labels) and _opens(rule, port, port) for rule in rules if port):
        yield "decode does not reach prefill's bootstrap address"
