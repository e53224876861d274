"""The JSON of a verdict keeps to its published schema, which leaves no key out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator, ValidationError

from harness.report.json_report import JSON_SCHEMA_VERSION, no_judgement, schema, to_json
from tests.reporting import Reported, reported, texts, with_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    return reported(tmp_path_factory.mktemp("recordings"))


def closed(node: Any) -> Any:
    """The schema with no room for keys it does not name."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    inner = {key: closed(value) for key, value in node.items()}
    return (
        inner | {"additionalProperties": False}
        if isinstance(node.get("properties"), dict) and "type" in node
        else inner
    )


def read_back(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return found


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["properties"]["schema_version"]["const"] == JSON_SCHEMA_VERSION


@given(texts)
def test_output_keeps_to_the_schema_and_has_no_other_key(made: Reported, text: str) -> None:
    validator = Draft202012Validator(closed(schema()))
    for one in (made, with_text(made, text)):
        validator.validate(read_back(to_json(*one)))


def test_so_does_what_could_not_be_judged() -> None:
    found = read_back(no_judgement("COULD NOT JUDGE", "\ud800", 2))
    Draft202012Validator(closed(schema())).validate(found)
    assert found["verdict"]["reasons"] == ["\ud800"]


@pytest.mark.parametrize("path", [("verdict", "status"), ("candidate", "build", "dtype"), ("worst", 0, "kl20")])
def test_the_schema_can_refuse(made: Reported, path: tuple[Any, ...]) -> None:
    found = read_back(to_json(*made))
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = [1]
    with pytest.raises(ValidationError):
        Draft202012Validator(schema()).validate(found)
    del place[path[-1]]
    with pytest.raises(ValidationError):
        Draft202012Validator(schema()).validate(found)
