"""Every overlay and the chart keep every policy, and each policy notices when one of its points is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_node
import test_one_container
from policies import POLICIES, Policy
from rendered import PLACED, VARIANTS, Cluster, Variant, helm, kustomize

RENDERERS: dict[str, Callable[[Variant], list[dict[str, Any]]]] = {
    "kustomize": lambda variant: kustomize(variant.overlay, variant.components),
    "helm": lambda variant: helm(variant.values),
}
BOTH = [(renderer, variant) for renderer in RENDERERS for variant in VARIANTS if renderer == "helm" or variant.overlay]
KEPT = [pytest.param(renderer, variant, id=f"{renderer}-{variant}") for renderer, variant in BOTH]
LOST = [
    pytest.param(renderer, variant, policy, lost, id=f"{policy.name}-{lost}-{renderer}")
    for renderer in RENDERERS
    for policy in POLICIES
    for variant in [one for by, one in BOTH if by == renderer and policy.applies(one.has)][:1]
    for lost in policy.lose
]
MODES = {"node": test_node, "container": test_one_container}
"""Modes in which no container beside an engine is a daemon's own."""
EVERYWHERE = [policy for policy in POLICIES if policy.only in ("placed", "metrics-service")]
"""Policies of values that each mode has."""


@pytest.mark.parametrize(("renderer", "variant"), KEPT)
def test_every_policy_is_kept(renderer: str, variant: Variant) -> None:
    cluster = Cluster(RENDERERS[renderer](variant))
    assert len(cluster.engines) == 2
    found = [fault for policy in POLICIES if policy.applies(variant.has) for fault in policy.check(cluster)]
    assert found == []


@pytest.mark.parametrize(("renderer", "variant", "policy", "lost"), LOST)
def test_a_policy_notices_what_is_removed(renderer: str, variant: Variant, policy: Policy, lost: str) -> None:
    cluster = Cluster(RENDERERS[renderer](variant))
    assert list(policy.check(cluster)) == []
    policy.lose[lost](cluster)
    assert list(policy.check(cluster)) != [], f"{policy.name} does not notice {lost}"


@pytest.mark.parametrize(("mode", "variant"), [(mode, each) for mode in MODES for each in MODES[mode].RENDERED])
def test_every_policy_of_a_mode_is_kept(mode: str, variant: str) -> None:
    assert MODES[mode].policy.faults(Cluster(MODES[mode].RENDERED[variant]())) == []


@pytest.mark.parametrize(
    ("mode", "policy", "lost"),
    [
        pytest.param(mode, policy, lost, id=f"{mode}-{policy.name}-{lost}")
        for mode in MODES
        for policy in MODES[mode].policy
        for lost in policy.lose
    ],
)
def test_a_policy_of_a_mode_notices_what_is_removed(mode: str, policy: Policy, lost: str) -> None:
    cluster = Cluster(MODES[mode].RENDERED["vllm"]())
    policy.lose[lost](cluster)
    assert list(policy.check(cluster)) != [], f"{policy.name} does not notice {lost}"


@pytest.mark.parametrize("policy", EVERYWHERE, ids=lambda policy: policy.name)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_keeps_what_is_asked_of_every_pod_and_notices_what_is_removed(mode: str, policy: Policy) -> None:
    for lost in (None, *policy.lose.values()):
        cluster = Cluster(helm({"gpu": {"mode": mode}, "ranksPerPod": 2, **PLACED}))
        if lost is not None:
            lost(cluster)
        assert (list(policy.check(cluster)) == []) is (lost is None)


def test_every_policy_applies_somewhere_and_can_fail() -> None:
    assert all(policy.lose for policy in POLICIES)
    assert all(any(policy.applies(variant.has) for variant in VARIANTS) for policy in POLICIES)
