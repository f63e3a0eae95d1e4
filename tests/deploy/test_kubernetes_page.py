"""docs/kubernetes.md's own examples, rendered: what is written there is what runs."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from policies import every_prefill_engine_is_met_by_a_name_of_the_certificate
from rendered import OVERLAYS, TIMEOUT_S, Cluster, Resource, helm, kustomize_command, variable

from kvferryd.config import Config
from kvferryd.peers import allow

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
KUSTOMIZATIONS = [
    yaml.safe_load(found)
    for found in re.findall(r"^```yaml\n(# kustomization\.yaml\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
]
IMAGES = {
    "kvferry": "REGISTRY/kvferry:cuda13",
    "engine": "REGISTRY/vllm-kvferry:v0.32.0",
    "proxy": "REGISTRY/kvferry:cpu",
}


def images(resources: list[Resource]) -> dict[str, str]:
    """By container."""
    pods = [pod["spec"] for _, pod in Cluster(resources).pods]
    return {one["name"]: one["image"] for pod in pods for one in [*pod.get("initContainers", []), *pod["containers"]]}


def kustomized(example: dict[str, Any], folder: Path) -> list[Resource]:
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(example))
    done = subprocess.run([*kustomize_command(), str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def here(resource: str, folder: Path) -> str:
    """The overlay that a remote resource names."""
    found = re.fullmatch(r"github\.com/kvferry/kvferry/deploy/kustomize/overlays/(\S+)\?ref=main", resource)
    assert found, resource
    return os.path.relpath(OVERLAYS / found[1], folder)


def test_an_overlay_of_ones_own_names_every_image(tmp_path: Path) -> None:
    example, _ = KUSTOMIZATIONS
    example["resources"] = [here(one, tmp_path) for one in example["resources"]]
    assert images(kustomized(example, tmp_path)) == IMAGES


@pytest.mark.parametrize("overlay", ["gpu", "gpu-tp2-one-node"])
def test_pods_of_another_namespace_dial_each_other_by_name(overlay: str, tmp_path: Path) -> None:
    above = {"namespace": "llm", "resources": [os.path.relpath(OVERLAYS / overlay, tmp_path)]}
    for engine in Cluster(kustomized(above, tmp_path)).engines:
        for daemon in engine.daemons:
            allowed = variable(daemon, "KVFERRY_ALLOW_PEERS").replace("<metadata.namespace>", "llm")
            allow.check(
                f"{engine.name}-0.{engine.spec['serviceName']}.llm.svc:7411", Config(allow_peers=allowed).allow_peers
            )


def test_two_prefill_engines_with_certificates_are_both_met(tmp_path: Path) -> None:
    _, example = KUSTOMIZATIONS
    example["resources"] = [os.path.relpath(OVERLAYS / "gpu-rdma", tmp_path)]
    cluster = Cluster(kustomized(example, tmp_path))
    assert [one.spec["replicas"] for one in cluster.engines] == [1, 2]
    assert list(every_prefill_engine_is_met_by_a_name_of_the_certificate(cluster)) == []


def test_the_charts_line_names_every_image() -> None:
    (line,) = re.findall(r"^    (helm install pair deploy/helm/kvferry (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    words = shlex.split(line.replace("\\\n", " "))
    values: dict[str, Any] = {}
    for flag, word in itertools.pairwise(words):
        if flag == "--set":
            path, _, value = word.partition("=")
            *above, name = path.split(".")
            at = values
            for one in above:
                at = at.setdefault(one, {})
            at[name] = value
    assert images(helm(values)) == IMAGES


def test_images_keep_their_health_check_with_every_tool() -> None:
    """The OCI format, which podman and buildah write by default, has none."""
    (section,) = re.findall(r"^## 1\. Images\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    said = textwrap.dedent(section)
    assert re.search(r"`podman build --format docker` and `buildah build --format docker`", said)


@pytest.mark.parametrize("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_no_name_of_an_overlays_image_is_that_of_another(overlay: str) -> None:
    """An overlay above it renames by name: two images of one name would become one."""
    listed = yaml.safe_load((OVERLAYS / overlay / "kustomization.yaml").read_text())["images"]
    assert len({one["newName"] for one in listed}) == len(listed)
