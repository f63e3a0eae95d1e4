"""A pod of daemons on each node, by chart and overlay: policies, each of which fails when a point is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from policies import Loss, Policies, drop, on_engine, put
from rendered import Cluster, Engine, Resource, argument, helm, kustomize, set_variable, variable

from kvferry.sglang.options import PREFIX
from kvferry.sockets import GPU_UUID
from kvferryd.config import OPTIONS
from kvferryd.host.plan import FOLDER
from kvferryd.run.daemons import APART

NODE = {"gpu": {"mode": "node"}}
RENDERED: dict[str, Callable[[], list[Resource]]] = {
    "vllm": lambda: helm(NODE),
    "two-ranks": lambda: helm({**NODE, "ranksPerPod": 2}),
    "sglang": lambda: helm({**NODE, "engine": {"kind": "sglang"}}),
    "elsewhere": lambda: helm({**NODE, "node": {"folder": "/var/run/kv", "gpus": 4}, "front": {"kind": "llm-d"}}),
    "overlay": lambda: kustomize("gpu-node"),
}
GPUS = "nvidia.com/gpu"
policy = Policies()


def pod_of(cluster: Cluster) -> Resource:
    (node,) = cluster.of("DaemonSet")
    return node["spec"]["template"]["spec"]


def daemons_of(cluster: Cluster) -> Resource:
    (container,) = pod_of(cluster)["containers"]
    return container


def on_pod(change: Callable[[Resource], object]) -> Loss:
    return lambda cluster: change(pod_of(cluster))


def on_daemons(change: Callable[[Resource], object]) -> Loss:
    return lambda cluster: change(daemons_of(cluster))


def mount_of(container: Resource) -> Resource:
    return next(one for one in container["volumeMounts"] if one["name"] == "kvferry")


def folder_of(pod: Resource) -> Any:
    return next(one for one in pod["volumes"] if one["name"] == "kvferry").get("hostPath")


def socket_of(engine: Engine) -> str:
    if engine.engine["command"][0] == "vllm":
        return str(engine.kv_transfer_config["kv_connector_extra_config"]["socket"])
    return variable(engine.engine, f"{PREFIX}SOCKET")


def _socket(engine: Engine) -> None:
    args = engine.engine["args"]
    args[:] = [one.replace(GPU_UUID, "engine") for one in args]


@policy(
    folder_of_daemons=on_daemons(put("args", value=["host", "--folder=/elsewhere"])),
    another_folder=on_engine(lambda engine: folder_of(engine.pod).update(path="/another")),
    of_the_pod=on_engine(lambda engine: engine.pod["volumes"][0].update(hostPath=None, emptyDir={})),
    socket=on_engine(_socket),
    writable=on_engine(lambda engine: mount_of(engine.engine).pop("readOnly")),
    unwritable=on_daemons(lambda daemons: mount_of(daemons).update(readOnly=True)),
)
def engines_find_the_daemon_of_their_gpu_in_a_folder_of_the_node(cluster: Cluster) -> Iterator[str]:
    folder, daemons = folder_of(pod_of(cluster)), daemons_of(cluster)
    if not folder or folder["type"] != "DirectoryOrCreate":
        yield "daemons have no folder of the node"
    if argument(daemons, "folder", FOLDER) != mount_of(daemons)["mountPath"] or mount_of(daemons).get("readOnly"):
        yield "daemons do not listen in the folder"
    for engine in cluster.engines:
        mount = mount_of(engine.engine)
        if folder_of(engine.pod) != folder:
            yield f"{engine.name}: another folder than that of the daemons"
        if socket_of(engine) != f"{mount['mountPath']}/{GPU_UUID}.sock":
            yield f"{engine.name}: it does not look for the daemon of its GPU"
        if not mount.get("readOnly"):
            yield f"{engine.name}: it may put a socket of its own in the place of another engine's"


def _root(pod: Resource) -> Resource:
    return next(one for one in pod["initContainers"] if one["name"] == "folder")


@policy(
    another_user=on_engine(lambda engine: engine.pod["securityContext"].update(runAsUser=10002)),
    not_given=on_pod(lambda pod: _root(pod).update(command=["sh", "-c", "chmod 0700 /run/kvferry"])),
    open_to_all=on_pod(lambda pod: _root(pod).update(command=["sh", "-c", "chown 10001:10001 /run/kvferry"])),
    no_folder=on_pod(lambda pod: pod.pop("initContainers")),
)
def one_user_owns_folder_and_sockets(cluster: Cluster) -> Iterator[str]:
    user = pod_of(cluster)["securityContext"]["runAsUser"]
    for engine in cluster.engines:
        if engine.pod["securityContext"]["runAsUser"] != user:
            yield f"{engine.name}: a socket has mode 0600, and the engine's user is another"
    path = mount_of(daemons_of(cluster))["mountPath"]
    commands = " ".join(one["command"][-1] for one in pod_of(cluster).get("initContainers", []))
    if not commands.endswith(f"chmod 0700 {path} && chown {user}:{user} {path}"):
        yield "the folder is root's, or open to others"


@policy(
    counted=on_daemons(lambda daemons: daemons["resources"]["limits"].update({GPUS: 1})),
    not_seen=on_daemons(lambda daemons: set_variable(daemons, "NVIDIA_VISIBLE_DEVICES", "0")),
    runtime=on_pod(drop("runtimeClassName")),
    none_given=on_engine(lambda engine: engine.engine["resources"]["limits"].pop(GPUS)),
    too_few=on_engine(lambda engine: engine.engine["resources"]["limits"].update({GPUS: 3})),
    past_the_plugin=on_engine(lambda engine: set_variable(engine.engine, "NVIDIA_VISIBLE_DEVICES", "all")),
)
def engines_get_gpus_from_the_device_plugin_and_daemons_see_all(cluster: Cluster) -> Iterator[str]:
    daemons = daemons_of(cluster)
    if GPUS in {**daemons["resources"].get("limits", {}), **daemons["resources"].get("requests", {})}:
        yield "daemons take GPUs from engines"
    if variable(daemons, "NVIDIA_VISIBLE_DEVICES") != "all" or "runtimeClassName" not in pod_of(cluster):
        yield "daemons do not see every GPU of the node"
    for engine in cluster.engines:
        flag = "tensor-parallel-size" if engine.engine["command"][0] == "vllm" else "tp-size"
        if engine.engine["resources"].get("limits", {}).get(GPUS) != int(engine.argument(flag, "1")):
            yield f"{engine.name}: not a GPU for each rank"
        if variable(engine.engine, "NVIDIA_VISIBLE_DEVICES") or "resourceClaims" in engine.pod:
            yield f"{engine.name}: it gets GPUs past the device plugin"


HOSTS = ("hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace")


@policy(
    **{f"{key}_of_daemons": on_pod(put(key, value=True)) for key in HOSTS},
    **{f"{key}_of_engines": on_engine(lambda engine, key=key: engine.pod.update({key: True})) for key in HOSTS},
)
def no_namespace_is_shared(cluster: Cluster) -> Iterator[str]:
    for name, template in cluster.pods:
        yield from (f"{name}: {key} is not needed" for key in HOSTS if template["spec"].get(key))


@policy(
    capabilities=on_daemons(drop("securityContext", "capabilities")),
    escalation=on_daemons(drop("securityContext", "allowPrivilegeEscalation")),
    writable=on_daemons(drop("securityContext", "readOnlyRootFilesystem")),
    privileged=on_daemons(lambda daemons: daemons["securityContext"].update(privileged=True)),
    root=on_pod(lambda pod: pod["securityContext"].update(runAsUser=0)),
    more_than_chown=on_pod(lambda pod: _root(pod)["securityContext"]["capabilities"]["add"].append("SYS_ADMIN")),
    token=on_pod(drop("automountServiceAccountToken")),
    seccomp=on_pod(drop("securityContext", "seccompProfile")),
    engine=on_engine(lambda engine: engine.engine.pop("securityContext")),
)
def nobody_has_more_rights_than_needed(cluster: Cluster) -> Iterator[str]:
    for name, template in cluster.pods:
        pod = template["spec"]
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name} gets a token of the API server"
        if pod["securityContext"].get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name} has no seccomp profile"
        if not pod["securityContext"].get("runAsUser"):
            yield f"{name} runs as root"
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container.get("securityContext", {})
            capabilities = context.get("capabilities", {})
            allowed = ["CHOWN"] if container["name"] == "folder" else []
            if capabilities.get("drop") != ["ALL"] or capabilities.get("add", []) != allowed:
                yield f"{name}: {container['name']} has other capabilities than {allowed}"
            if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
                yield f"{name}: {container['name']} may gain rights"
    for container in [*pod_of(cluster).get("initContainers", []), daemons_of(cluster)]:
        if not container["securityContext"].get("readOnlyRootFilesystem"):
            yield f"{container['name']} may write to its image"


def _rules(cluster: Cluster) -> list[Resource]:
    (network,) = cluster.of("NetworkPolicy")
    return network["spec"]["ingress"]


def _ports(rule: Resource) -> list[Any]:
    return [(one["port"], one.get("endPort")) for one in rule["ports"]]


@policy(
    port=on_daemons(lambda daemons: daemons["ports"].pop()),
    rest=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_REST", "*:9000")),
    peer=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_PEER", "127.0.0.1:7411")),
    closed=lambda cluster: _rules(cluster)[0]["ports"].pop(1),
    front=lambda cluster: _rules(cluster)[1]["ports"].pop(),
    ucx=lambda cluster: _rules(cluster)[0]["ports"].pop(-1),
    not_ours=lambda cluster: cluster.of("DaemonSet")[0]["spec"]["template"]["metadata"]["labels"].pop(
        "app.kubernetes.io/part-of"
    ),
    open_to_all=lambda cluster: _rules(cluster)[0].pop("from"),
)
def each_daemon_is_reached_by_daemons_and_routers_alone(cluster: Cluster) -> Iterator[str]:
    daemons = daemons_of(cluster)
    ours = cluster.of("NetworkPolicy")[0]["spec"]["podSelector"]["matchLabels"]
    labels = cluster.of("DaemonSet")[0]["spec"]["template"]["metadata"]["labels"]
    if not ours.items() <= labels.items():
        yield "no NetworkPolicy keeps others from the daemons"
    among, front = _rules(cluster)[0], _rules(cluster)[1]
    if [one["podSelector"]["matchLabels"] for one in among.get("from", [])] != [ours]:
        yield "others than daemons reach daemons"
    has = {one["name"]: one["containerPort"] for one in daemons["ports"]}
    for kind, rule in (("rest", front), ("peer", among)):
        host, _, first = variable(daemons, f"KVFERRY_{kind.upper()}").rpartition(":")
        wanted = {int(first) + APART * number for number in range(len(has) // 2)}
        if host != "*" or wanted != {port for name, port in has.items() if name.startswith(kind)}:
            yield f"{kind} is not where the ports are"
        if not {(port, None) for port in wanted} <= {*_ports(rule)}:
            yield f"{kind} of some daemons is closed"
    first, last = variable(daemons, "KVFERRY_UCX").removeprefix("TCP_PORT_RANGE=").split("-")
    if (int(first), int(last)) not in _ports(among):
        yield "UCX's ports are closed"


@policy(
    secret=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_PEER_SECRET_FILE", None)),
    token=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_TOKEN_FILE", None)),
    not_mounted=on_daemons(lambda daemons: daemons["volumeMounts"].pop(1)),
    open_file=on_pod(lambda pod: pod["volumes"][1]["secret"].update(defaultMode=0o444)),
    tables=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_ORDER_TABLES", None)),
    address=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_ADVERTISE", "[$(POD_NAME)]:7411")),
    misspelt=on_daemons(lambda daemons: set_variable(daemons, "KVFERRY_ARENA", "1")),
)
def daemons_prove_themselves_and_ask_for_proof(cluster: Cluster) -> Iterator[str]:
    daemons, pod = daemons_of(cluster), pod_of(cluster)
    files = {one["mountPath"]: one["name"] for one in daemons["volumeMounts"]}
    secrets = {one["name"]: one["secret"] for one in pod["volumes"] if "secret" in one}
    for name in ("KVFERRY_PEER_SECRET_FILE", "KVFERRY_TOKEN_FILE"):
        volume = files.get(variable(daemons, name).rpartition("/")[0], "")
        if secrets.get(volume, {}).get("defaultMode") not in (0o440, 440):
            yield f"{name} is no file of a secret, open to its group alone"
    if variable(daemons, "KVFERRY_ORDER_TABLES") != "false":
        yield "routers may name the blocks that are written"
    if variable(daemons, "KVFERRY_ADVERTISE") != "[<status.podIP>]:7411":
        yield "daemons are not reached where they say"
    for one in daemons["env"]:
        setting = one["name"].removeprefix("KVFERRY_").lower()
        if one["name"].startswith("KVFERRY_") and setting not in OPTIONS:
            yield f"nothing reads {one['name']}"
    if {"device", "engine_socket"} & {one["name"].removeprefix("KVFERRY_").lower() for one in daemons["env"]}:
        yield "device and engine_socket follow from the GPU"


@policy(
    rolling=lambda cluster: cluster.of("DaemonSet")[0]["spec"].update(updateStrategy={"type": "RollingUpdate"}),
    killed=on_pod(put("terminationGracePeriodSeconds", value=30)),
    taint=on_pod(drop("tolerations")),
    another_probe=on_daemons(put("livenessProbe", "httpGet", "path", value="/readyz")),
    ready=on_daemons(put("readinessProbe", value={"httpGet": {"path": "/readyz", "port": "rest"}})),
)
def living_engines_keep_their_daemons(cluster: Cluster) -> Iterator[str]:
    pod, daemons = pod_of(cluster), daemons_of(cluster)
    if cluster.of("DaemonSet")[0]["spec"].get("updateStrategy") != {"type": "OnDelete"}:
        yield "a new version would take the GPU memory of living engines away"
    if pod["terminationGracePeriodSeconds"] < float(variable(daemons, "KVFERRY_DRAIN_TIMEOUT_S")) + 20:
        yield "daemons are killed before they have drained"
    if {"key": GPUS, "operator": "Exists"} not in pod.get("tolerations", []):
        yield "no node whose GPUs are tainted has daemons"
    if {daemons[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} != {"/healthz"}:
        yield "a daemon without an engine is started again and again"
    probe = "kvferry status --ready --host /run/kvferry"
    if daemons["readinessProbe"].get("exec", {}).get("command") != probe.split():
        yield "a node without engines is not ready"


def _proxy(cluster: Cluster) -> list[str]:
    (deployment,) = cluster.of("Deployment") or [None]
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"] if deployment else []


@policy(
    daemon=lambda cluster: _proxy(cluster).append("--decode=http://a:8000,daemon=http://a:7410"),
    service=lambda cluster: cluster.service("pair-prefill-peers")["spec"]["ports"].append(
        {"name": "rest", "port": 7410}
    ),
    sidecar=on_engine(lambda engine: engine.pod.update(initContainers=[{"name": "kvferry"}])),
)
def nothing_looks_for_daemons_in_engines_pods(cluster: Cluster) -> Iterator[str]:
    if any("daemon=" in one for one in _proxy(cluster)):
        yield "the proxy asks for daemons where engines are"
    for engine in cluster.engines:
        if engine.daemons:
            yield f"{engine.name} has a daemon of its own"
        for service in (cluster.service(engine.name), cluster.service(engine.spec["serviceName"])):
            if any(one["port"] >= 7410 and one["port"] < 7500 for one in service["spec"]["ports"]):
                yield f"a Service of {engine.name} leads to ports that no container has"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tls": {"enabled": True}}, "no names for certificates"),
        ({"rdma": {"enabled": True}}, "without RDMA"),
        ({"nodes": 2}, "on one node"),
    ],
)
def test_what_a_node_cannot_have_is_refused_in_words(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        helm({**NODE, **more})
