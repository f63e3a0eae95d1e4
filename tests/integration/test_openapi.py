"""/openapi.json: a valid document, from which a client can be made and understood."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from test_rest import asked

EXAMPLES: dict[str, Any] = json.loads(resources.files("kvferryd.api.rest").joinpath("examples.json").read_text())
TOKEN = {"authorization": "Bearer t"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a daemon that asks for a token."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text("t")
    answer: dict[str, Any] = asked(lambda client: client.get("/openapi.json", headers=TOKEN), token_file=file).json()
    return answer


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def contents(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Contents of its body and its answers, by media type."""
    for each in (operation.get("requestBody", {}), *operation["responses"].values()):
        yield from each.get("content", {}).values()


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    validate(document)


def test_every_operation_has_a_name_of_its_own_that_is_a_method_name(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(names) == len(set(names))
    assert not [name for name in names if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)]
    assert {name for name, _ in operations(document)} == EXAMPLES.keys()


def test_every_body_and_every_answer_has_an_example_that_fits_its_schema(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        for content in contents(operation):
            values = [each["value"] for each in content.get("examples", {}).values()] or [content["example"]]
            schema = content.get("schema", {}) | {"components": document["components"]}
            for value in values:
                faults = [fault.message for fault in Draft202012Validator(schema).iter_errors(value)]
                assert not faults, (name, faults)


def test_examples_have_no_field_that_their_schema_does_not_know(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def unknown(value: Any, schema: dict[str, Any]) -> Iterator[str]:
        schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        kinds = [schemas[kind["$ref"].rpartition("/")[2]] for kind in schema.get("anyOf", []) if "$ref" in kind]
        schema = kinds[0] if kinds and value is not None else schema
        if isinstance(value, list) and "items" in schema:
            for each in value:
                yield from unknown(each, schema["items"])
        elif isinstance(value, dict) and "properties" in schema:
            yield from value.keys() - schema["properties"].keys()
            for name in value.keys() & schema["properties"].keys():
                yield from unknown(value[name], schema["properties"][name])

    for name, operation in operations(document):
        for content in contents(operation):
            for example in content.get("examples", {}).values():
                assert not list(unknown(example["value"], content.get("schema", {}))), name


def test_every_error_is_a_problem(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "RefusalBody" in document["components"]["schemas"]
    order = document["paths"]["/v1/transfers"]["post"]["responses"].keys()
    assert {"200", "202", "401", "403", "404", "409", "413", "415", "422", "429", "503", "default"} <= order
    for name, operation in operations(document):
        assert operation["tags"], name
        assert operation["description"], name
        for status, response in operation["responses"].items():
            if status >= "400" and (name, status) != ("GET /readyz", "503"):  # "default" is greater, too
                assert list(response["content"]) == ["application/problem+json"], (name, status)


def test_each_number_that_a_caller_gives_is_bounded_on_both_sides(document: dict[str, Any]) -> None:
    """Python's integers and floats reach further than what they become; only `wait` is cut to what it may be."""
    met = []

    def unbounded(where: str, schema: dict[str, Any]) -> Iterator[str]:
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if schema.get("type") in ("integer", "number"):
            met.append(where)
            if not (
                schema.keys() & {"minimum", "exclusiveMinimum"} and schema.keys() & {"maximum", "exclusiveMaximum"}
            ):
                yield where
        for name, each in schema.get("properties", {}).items():
            yield from unbounded(f"{where}.{name}", each)
        for each in (*schema.get("anyOf", ()), *schema.get("prefixItems", ())):
            yield from unbounded(where, each)

    found = {
        fault
        for name, operation in operations(document)
        for where, schema in [
            *((f"{name} {each['name']}", each["schema"]) for each in operation.get("parameters", ())),
            *((name, each["schema"]) for each in operation.get("requestBody", {}).get("content", {}).values()),
        ]
        for fault in unbounded(where, schema)
    }
    assert found == {"GET /v1/transfers wait", "GET /v1/transfers/{transfer_id} wait"}
    assert {"POST /v1/transfers.source.lease", "POST /v1/transfers.destination.token_range"} <= {*met}


def test_it_asks_for_what_the_daemon_asks_for(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"].keys() == {"token", "certificate"}
    assert document["security"] == [{"token": []}]
    for name, operation in operations(document):
        probe = name in ("GET /healthz", "GET /readyz")
        assert operation.get("security") == ([] if probe else None), name
        assert ("401" in operation["responses"]) is not probe, name
    open_to_all = asked(lambda client: client.get("/openapi.json")).json()
    assert open_to_all["security"] == []
    assert "401" not in open_to_all["paths"]["/v1/info"]["get"]["responses"]


def test_a_client_without_the_token_gets_the_401_that_is_documented(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    answer = asked(lambda client: client.get("/v1/info"), token_file=tmp_path / "token")
    told = document["paths"]["/v1/info"]["get"]["responses"]["401"]["content"]["application/problem+json"]["example"]
    assert (answer.status_code, answer.json()["code"]) == (told["status"], told["code"])
