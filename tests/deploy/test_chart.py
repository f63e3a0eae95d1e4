"""Tests of the chart alone: numbers that the overlays have fixed, and words for values that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
from policies import the_grace_period_covers_every_step, the_proxy_knows_every_engine_and_daemon
from rendered import Cluster, helm, port_of, variable


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
