"""The overlays and the chart, rendered, and questions that a policy asks of them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS, CHART = DEPLOY / "kustomize" / "overlays", DEPLOY / "helm" / "kvferry"
NAMESPACE = "kvferry"
TIMEOUT_S = 60
Resource = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A thing to deploy. has: what it has beside a prefill and a decode engine, one rank each.

    overlay: empty where only the chart makes it.
    """

    name: str
    has: frozenset[str]
    values: Mapping[str, Any] = field(hash=False)
    """The chart's values for the same thing."""
    overlay: str
    components: tuple[str, ...] = ()
    """Components beside the overlay's own."""

    def __str__(self) -> str:
        return self.name


def _variant(overlay: str, has: str, **values: Any) -> Variant:
    return Variant(overlay, frozenset(has.split()), values, overlay)


def _chart_alone(name: str, has: str, **values: Any) -> Variant:
    return Variant(name, frozenset(has.split()), values, "")


OPERATOR = {"monitoring": {"kind": "podMonitor"}}
RDMA = {"rdma": {"enabled": True}, "tls": {"enabled": True}}
UNWATCHED = {"monitoring": {"kind": "none"}}
SCHEDULED = {
    "annotations": {"example.org/team": "serving"},
    "nodeSelector": {"example.org/pool": "llm"},
    "tolerations": [{"key": "example.org/llm", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "preference": {"matchExpressions": [{"key": "example.org/fast", "operator": "Exists"}]}}
    ]}},
    "priorityClassName": "serving",
}  # fmt: skip
"""Settings that a cluster may ask of pods: of the engines' in the variants `placed`, and of the proxy's."""
PLACED = {
    "pods": {"engine": SCHEDULED, "proxy": SCHEDULED},
    "imagePullSecrets": [{"name": "registry"}],
    "models": {"claim": "models", "readOnly": True, "hfTokenSecret": "hf"},
}
VARIANTS = [
    _variant("gpu", "gpu dra monitoring proxy", **OPERATOR),
    _variant("gpu-rdma", "gpu dra rdma tls monitoring proxy", **RDMA, **OPERATOR),
    _variant("gpu-runtime-class", "gpu runtime-class monitoring proxy", gpu={"mode": "runtimeClass"}, **OPERATOR),
    _variant("gpu-tp2-one-node", "gpu dra proxy one-node", ranksPerPod=2, **UNWATCHED),
    _variant("gpu-tp2-two-nodes", "gpu dra rdma tls proxy two-nodes", nodes=2, **RDMA, **UNWATCHED),
    _variant("llm-d", "gpu dra rdma tls monitoring llm-d", front={"kind": "llm-d"}, **RDMA, **OPERATOR),
    _variant("cpu", "cpu metrics-service proxy", gpu={"mode": "none"}),
    replace(_variant("gpu", "gpu dra monitoring proxy ipv6", ipv6=True, **OPERATOR), name="ipv6", components=("ipv6",)),
    _chart_alone("placed", "gpu dra metrics-service proxy placed", **PLACED),
    _chart_alone(
        "placed-runtime-class", "gpu runtime-class metrics-service proxy placed", gpu={"mode": "runtimeClass"}, **PLACED
    ),
    _chart_alone("sglang", "gpu dra metrics-service sglang", engine={"kind": "sglang"}),
    _chart_alone("sglang-tp2", "gpu dra metrics-service sglang", engine={"kind": "sglang"}, ranksPerPod=2),
    _chart_alone("metrics-of-two-ranks", "gpu dra one-node metrics-service proxy", ranksPerPod=2),
]


def kustomize(overlay: str, components: Sequence[str] = ()) -> list[Resource]:
    return json.loads(_kustomize(overlay, *components))


def kustomize_command() -> list[str]:
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    return command


@functools.cache
def _kustomize(overlay: str, *components: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        above = {
            "resources": [os.path.relpath(OVERLAYS / overlay, folder)],
            "components": [os.path.relpath(OVERLAYS.parent / "components" / one, folder) for one in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(above))
        done = subprocess.run([*kustomize_command(), folder], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.dumps(list(yaml.safe_load_all(done.stdout)))


def helm(values: Mapping[str, Any]) -> list[Resource]:
    return json.loads(_helm(json.dumps(values, sort_keys=True))[0])


def notes(values: Mapping[str, Any]) -> str:
    """Helm prints them when the chart is installed."""
    return _helm(json.dumps(values, sort_keys=True))[1]


@functools.cache
def _helm(values: str) -> tuple[str, str]:
    """Run the helm command if there is one, else Helm's own engine in the package helm-python-sdk."""
    if shutil.which("helm"):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(values)
            file.flush()
            flags = ["--namespace", NAMESPACE, "--values", file.name, "--dry-run=client", "--output=json"]
            command = ["helm", "install", "pair", str(CHART), *flags]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            assert done.returncode == 0, done.stderr
            release = json.loads(done.stdout)
            texts, said = [release["manifest"]], release["info"]["notes"]
    else:
        engine = pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is installed")
        with engine.Chart.load(str(CHART)) as chart:
            made = chart.render(json.loads(values), name="pair", namespace=NAMESPACE)
        said = made.pop("kvferry/templates/NOTES.txt")
        texts = list(made.values())
    return json.dumps([part for text in texts for part in yaml.safe_load_all(text) if part]), said


@dataclass
class Cluster:
    """The manifests that would be applied."""

    resources: list[Resource]

    def of(self, kind: str) -> list[Resource]:
        return [one for one in self.resources if one["kind"] == kind]

    def remove(self, kind: str) -> None:
        self.resources = [one for one in self.resources if one["kind"] != kind]

    @property
    def engines(self) -> list[Engine]:
        """The StatefulSets."""
        return [Engine(one) for one in self.of("StatefulSet")]

    def service(self, name: str) -> Resource | None:
        return next((one for one in self.of("Service") if one["metadata"]["name"] == name), None)

    @property
    def pods(self) -> Iterator[tuple[str, Resource]]:
        """(name, pod template) of everything that makes pods."""
        for kind in ("StatefulSet", "DaemonSet", "Deployment"):
            for one in self.of(kind):
                yield one["metadata"]["name"], one["spec"]["template"]


@dataclass
class Engine:
    """A StatefulSet: an engine's container and the daemons of its ranks."""

    resource: Resource

    @property
    def name(self) -> str:
        return self.resource["metadata"]["name"]

    @property
    def spec(self) -> Resource:
        return self.resource["spec"]

    @property
    def pod(self) -> Resource:
        return self.spec["template"]["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.spec["template"]["metadata"]["labels"]

    @property
    def daemons(self) -> list[Resource]:
        everything = [*self.pod.get("initContainers", []), *self.pod["containers"]]
        return [one for one in everything if one["name"].startswith("kvferry")]

    @property
    def engine(self) -> Resource:
        return next(one for one in self.pod["containers"] if one["name"] == "engine")

    @property
    def router(self) -> Resource:
        return next(one for one in self.pod["initContainers"] if one["name"] == "routing-proxy")

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        return json.loads(self.argument("kv-transfer-config"))

    def argument(self, name: str, default: str = "") -> str:
        return argument(self.engine, name, default)

    def volume(self, container: Resource, path: str) -> Resource | None:
        """The volume at or above a path of a container."""
        mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", [])}
        above = [path, *map(str, Path(path).parents)]
        name = next((mounts[one] for one in above if one in mounts), None)
        return next((one for one in self.pod.get("volumes", []) if one["name"] == name), None)


def argument(container: Resource, name: str, default: str = "") -> str:
    prefix = f"--{name}="
    return next((one.removeprefix(prefix) for one in container["args"] if one.startswith(prefix)), default)


def variable(container: Resource, name: str) -> str:
    """A variable's value, with the variables in it as the kubelet would expand them; empty where it is not set.

    Like the kubelet it leaves alone what is defined later or not at all. Fields are shown as <FIELD>,
    what a Secret has as <secret>.
    """
    known: dict[str, str] = {}
    for one in container.get("env", []):
        if "valueFrom" in one:
            source = one["valueFrom"]
            known[one["name"]] = f"<{source['fieldRef']['fieldPath']}>" if "fieldRef" in source else "<secret>"
        else:
            known[one["name"]] = re.sub(r"\$\((\w+)\)", lambda m: known.get(m[1], m[0]), one.get("value") or "")
    return known.get(name, "")


def set_variable(container: Resource, name: str, value: str | None) -> None:
    """None removes it."""
    for one in container["env"]:
        if one["name"] == name and value is not None:
            one["value"] = value
            return
    container["env"] = [one for one in container["env"] if one["name"] != name]
    if value is not None:
        container["env"].append({"name": name, "value": value})


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def container_port(container: Resource, port: str | int) -> int | None:
    """The number of a port given by name or number, if the container has it."""
    numbers = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
    return numbers.get(port) if isinstance(port, str) else port if port in numbers.values() else None


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()
