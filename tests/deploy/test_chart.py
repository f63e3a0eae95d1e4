"""Tests of the chart alone: numbers that the overlays have fixed, and words for values that make no sense."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from policies import the_grace_period_covers_every_step, the_proxy_knows_every_engine_and_daemon
from rendered import CHART, NAMESPACE, SCHEDULED, VARIANTS, Cluster, helm, notes, port_of, variable

from kvferryd.commands.cli import _parser

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
OTHERS: dict[str, Any] = {
    "engine.args": ["--seed=7"],
    "engine.env": [{"name": "TEAM", "value": "serving"}],
    "engine.kind": "sglang",
    "front.kind": "none",
    "gpu.mode": "none",
    "imagePullSecrets": [{"name": "registry"}],
    "monitoring.kind": "none",
    "podNetwork": "10.1.0.0/16",
    "sharedMemory": "16Gi",
    "daemonEnv": {"KVFERRY_ARENA_MB": "1024"},
    "resources.engine": {"limits": {"cpu": "7"}},
    **{f"pods.{pod}.{name}": value for pod in ("engine", "proxy") for name, value in SCHEDULED.items()},
}
"""Values of each kind that are not the default, where a number, a flag or a name is not enough."""
BASES = [
    *(each.values for each in VARIANTS),
    {"gpu": {"mode": "node"}}, {"gpu": {"mode": "container"}}, {"front": {"kind": "llm-d"}},
    {"models": {"claim": "models"}},
]  # fmt: skip


def leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def other(path: tuple[str, ...], value: Any) -> Any:
    if (name := ".".join(path)) in OTHERS:
        return OTHERS[name]
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value or 'a'}-b"


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: merged(values.get(name, {}), each) for name, each in more.items() if isinstance(each, dict)}
    return {**values, **more, **nested}


LEAVES = [pytest.param(path, value, id=".".join(path)) for path, value in leaves(VALUES)]


@pytest.mark.parametrize(("path", "value"), LEAVES)
def test_each_value_changes_what_is_deployed(path: tuple[str, ...], value: Any) -> None:
    """In one of the things to deploy, at least: a value that nothing reads would be believed."""
    changed = functools.reduce(lambda inside, name: {name: inside}, reversed(path), other(path, value))
    assert isinstance(changed, dict)

    def differs(base: Mapping[str, Any]) -> bool:
        with contextlib.suppress(Exception):  # the two make no sense together, as another test has it
            return helm(merged(base, changed)) != helm(base)
        return False

    assert any(map(differs, BASES)), f"nothing reads {'.'.join(path)}"


def test_a_value_that_nothing_reads_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"nothing reads pods\.engine\.colour"):
        test_each_value_changes_what_is_deployed(("pods", "engine", "colour"), "red")


def test_the_proxy_names_every_replica() -> None:
    cluster = Cluster(helm({"prefill": {"replicas": 2}}))
    args = cluster.of("Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [one.partition(",")[0] for one in args if one.startswith("--prefill")] == [
        "--prefill=http://pair-prefill-0.pair-prefill-peers:8000",
        "--prefill=http://pair-prefill-1.pair-prefill-peers:8000",
    ]


def test_eight_ranks_on_each_of_two_nodes() -> None:
    cluster = Cluster(helm({"ranksPerPod": 8, "nodes": 2}))
    for engine in cluster.engines:
        assert engine.argument("tensor-parallel-size") == "16"
        assert [port_of(variable(one, "KVFERRY_PEER")) for one in engine.daemons] == list(range(7411, 7491, 10))
        assert len({variable(one, "KVFERRY_ROSTER") for one in engine.daemons}) == 1
    assert list(the_proxy_knows_every_engine_and_daemon(cluster)) == []


def _missing(line: str, cluster: Cluster) -> list[str]:
    """Things that a command of the notes names, and the chart does not deploy. Raises where it is no command."""
    resources = {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in cluster.resources}
    containers = {f"{each.name}-0": [one["name"] for one in (*each.daemons, each.engine)] for each in cluster.engines}
    containers |= {
        f"daemonset/{name}": [one["name"] for one in pod["spec"]["containers"]] for name, pod in cluster.pods
    }
    named = [f"service/{name}" for name in re.findall(r"[\w-]+-peers", line)] + re.findall(r"\bservice/\S+", line)
    missing = [each for each in named if each not in resources]
    if executed := re.search(r" exec (\S+) -c (\S+) -- kvferry (.*)", line):
        pod, container, command = executed.groups()
        missing += [pod] if pod not in containers else [container] if container not in containers[pod] else []
        _parser().parse_args(shlex.split(command))
    return missing


@pytest.mark.parametrize("values", BASES, ids=str)
def test_the_notes_tell_three_commands_of_what_was_deployed(values: dict[str, Any]) -> None:
    cluster, said = Cluster(helm(values)), notes(values)
    commands = re.findall(r"^    (\S.*)$", said.replace("\\\n", " "), re.MULTILINE)
    kubectl = [line for line in commands if line.startswith(f"kubectl -n {NAMESPACE} ")]
    assert len(kubectl) == 3 and sum(" exec " in line for line in kubectl) == 1
    assert [line for line in commands if line not in kubectl and not line.startswith("curl ")] == []
    assert [missing for line in kubectl for missing in _missing(line, cluster)] == []


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("kubectl port-forward service/pair-front 8000", "service/pair-front"),
        ("kubectl exec pair-encode-0 -c kvferry -- kvferry transfers", "pair-encode-0"),
        ("kubectl exec pair-decode-0 -c daemon -- kvferry transfers", "daemon"),
        ("kubectl exec daemonset/pair-node -c kvferry -- kvferry transfers", "daemonset/pair-node"),
        ("kubectl get endpointslices -l 'name in (pair-encode-peers)'", "service/pair-encode-peers"),
    ],
)
def test_a_note_of_what_is_not_deployed_is_noticed(line: str, missing: str) -> None:
    assert _missing(line, Cluster(helm({}))) == [missing]


@pytest.mark.parametrize("step", ["leave", "engine", "drain", "drainAtExit"])
def test_the_grace_period_follows_its_steps(step: str) -> None:
    assert list(the_grace_period_covers_every_step(Cluster(helm({"shutdown": {step: 500}})))) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpu": {"mode": "mig"}}, "gpu.mode is dra, runtimeClass, node, container or none"),
        ({"front": {"kind": "nginx"}}, "front.kind is proxy, llm-d or none"),
        ({"engine": {"kind": "trtllm"}}, "engine.kind is vllm or sglang"),
        ({"engine": {"kind": "sglang"}, "front": {"kind": "llm-d"}}, "front.kind llm-d is for vLLM"),
        ({"engine": {"kind": "sglang"}, "nodes": 2}, "engine.kind sglang has one node"),
        ({"engine": {"kind": "sglang"}, "ipv6": True}, "over IPv4 alone"),
        ({"monitoring": {"kind": "grafana"}}, "monitoring.kind is service, podMonitor or none"),
        ({"models": {"readOnly": True}}, "models.readOnly needs models.claim"),
        ({"nodes": 2, "decode": {"replicas": 2}}, "one engine of each role"),
    ],
)
def test_values_that_make_no_sense_are_refused_in_words(values: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        helm(values)
