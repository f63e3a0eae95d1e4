"""Rendered manifests are what Kubernetes takes, by the schemas of its versions; unknown fields are faults."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
from rendered import VARIANTS, Variant, helm, kustomize

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

VERSIONS = ["1.34", "1.35", "1.37"]
"""resource.k8s.io/v1, which the claims are of, begins with 1.34."""
BEFORE_DRA = ["1.29", "1.32"]
"""Native sidecars are on by default from 1.29."""

NAME = {"type": "string", "minLength": 1}
NAMES = {"type": "object", "additionalProperties": {"type": "string"}}
HOURS = {"type": "string", "pattern": "^[0-9]+h$"}


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "additionalProperties": False, "properties": properties, "required": required.split(),
    }  # fmt: skip


ENDPOINT = closed(
    "port", port=NAME, path=NAME, interval={"type": "string", "pattern": "^[0-9]+s$"},
    authorization=closed("credentials", credentials=closed("name key", name=NAME, key=NAME)),
)  # fmt: skip
USAGES = {"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}
CUSTOM = {
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        "selector podMetricsEndpoints",
        selector=closed(matchLabels=NAMES),
        podMetricsEndpoints={"type": "array", "minItems": 1, "items": ENDPOINT},
    ),
    ("cert-manager.io/v1", "Issuer"): closed(selfSigned=closed(), ca=closed("secretName", secretName=NAME)),
    ("cert-manager.io/v1", "Certificate"): closed(
        "secretName issuerRef",
        secretName=NAME, commonName=NAME, isCA={"type": "boolean"}, duration=HOURS, renewBefore=HOURS,
        dnsNames={"type": "array", "items": NAME}, usages={"type": "array", "items": USAGES},
        privateKey=closed(
            algorithm={"enum": ["ECDSA"]}, size={"enum": [256]}, rotationPolicy={"enum": ["Always", "Never"]}
        ),
        issuerRef=closed("kind name", kind={"enum": ["Issuer"]}, name=NAME),
    ),
}  # fmt: skip
"""For resources that others define, the fields that are used here, written from their reference."""


def rendered(renderer: str, variant: Variant) -> list[dict[str, Any]]:
    return kustomize(variant.overlay, variant.components) if renderer == "kustomize" else helm(variant.values)


@pytest.mark.parametrize(
    ("renderer", "variant"),
    [
        pytest.param(renderer, variant, id=f"{renderer}-{variant}")
        for renderer in ("kustomize", "helm")
        for variant in VARIANTS
        if renderer == "helm" or variant.overlay
    ],
)
def test_every_resource_is_valid(renderer: str, variant: Variant) -> None:
    for resource in rendered(renderer, variant):
        check(resource, [*VERSIONS, *([] if "dra" in variant.has else BEFORE_DRA)])


def check(resource: dict[str, Any], versions: list[str]) -> None:
    custom = CUSTOM.get((resource["apiVersion"], resource["kind"]))
    if custom is not None:
        assert set(resource) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(resource["spec"], custom)
        return
    for version in versions:
        validate(json.dumps(resource), version)


@functools.cache
def validate(resource: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(resource), version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_a_fault() -> None:
    stateful_set = next(one for one in kustomize("cpu") if one["kind"] == "StatefulSet")
    stateful_set["spec"]["template"]["spec"]["initContainers"][0]["restartpolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartpolicy"):
        check(stateful_set, VERSIONS[:1])


def test_a_claim_is_refused_by_a_version_without_dra() -> None:
    claim = next(one for one in kustomize("gpu") if one["kind"] == "ResourceClaimTemplate")
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check(claim, ["1.29"])
