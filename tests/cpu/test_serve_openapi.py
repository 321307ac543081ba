"""/openapi.json tells of every route and field, and what is made up from it is answered well."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from offline_makers import tiny_llama
from serving import Inside, inside
from stepahead.llm.reader import Reader
from stepahead.serve.app import serve_app
from stepahead.serve.embeddings import EMBEDDINGS_NOT_YET, EmbeddingFields
from stepahead.serve.fields import NOT_YET, SAMPLING, SPELLINGS, TEXT_NOT_YET
from stepahead.serve.front import Front
from stepahead.serve.openapi import BODIES
from stepahead.serve.options import ServeConfig
from stepahead.serve.refusal import Refusal
from stepahead.serve.requests import (
    AbortFields,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
    read_chat_request,
    read_completion_request,
)
from stepahead.text.texts import ToyTexts

FIELDS: dict[str, set[str]] = {
    "/v1/chat/completions": {*ChatFields.__struct_fields__, *SAMPLING, *SPELLINGS, *NOT_YET},
    "/v1/completions": {*CompletionFields.__struct_fields__, *SAMPLING, *SPELLINGS, *TEXT_NOT_YET},
    "/v1/embeddings": {*EmbeddingFields.__struct_fields__, *EMBEDDINGS_NOT_YET},
    "/tokenize": {*TokenizeFields.__struct_fields__, *NOT_YET},
    "/detokenize": {*DetokenizeFields.__struct_fields__},
    "/abort": {*AbortFields.__struct_fields__},
}
HELD = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
EXAMPLES = 12  # of each route, good and bad


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    folder = str(tiny_llama(tmp_path_factory.mktemp("model")))
    options = {"executor": "inline", "max_rows": 4, "max_model_len": 64, "threads": 1}
    with inside(ServeConfig(max_waiting=2), model=folder, debug=True, **options) as found:
        yield found
        found.rest()


@pytest.fixture(scope="module")
def document(server: Inside) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
    return found


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    ref = content["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = document["components"]["schemas"][ref.rpartition("/")[2]]
    return schema


def test_every_route_is_in_the_document_and_no_other() -> None:
    front = Front(ToyTexts(90), 4, None)
    app = serve_app(front, ServeConfig(api_key="k"), "toy", Reader(front.texts, 90, ()))
    front.close()
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            keys: list[dict[str, str]] = [{}, {"authorization": "Bearer k"}]
            return [await client.get("/openapi.json", headers=key) for key in keys]

    refused, answered = asyncio.run(ask())
    assert refused.status_code == 401
    found = answered.json()
    told = {(path, method) for path, ways in found["paths"].items() for method in ways}
    assert told == routes
    assert found["security"] == [{"key": []}]
    for ways in found["paths"].values():
        for operation in ways.values():
            assert operation["summary"]
            assert {"200", "400", "401", "404", "429", "503"} <= operation["responses"].keys()


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_every_field_is_in_the_document_and_no_other(document: dict[str, Any], path: str) -> None:
    schema = body_of(document, path)
    assert schema["properties"].keys() == FIELDS[path]
    assert schema["additionalProperties"] is False
    assert set(FIELDS) == set(BODIES)
    for name, (neutral, words) in BODIES[path].refused.items():
        assert schema["properties"][name] == {"enum": [*neutral, None], "description": words}


@pytest.mark.parametrize(
    ("path", "read", "rest"),
    [
        ("/v1/completions", read_completion_request, {"prompt": "a"}),
        ("/v1/chat/completions", read_chat_request, {"messages": [{"role": "user"}]}),
    ],
)
def test_the_limits_of_a_number_are_those_it_is_read_with(
    document: dict[str, Any], path: str, read: Any, rest: dict[str, Any]
) -> None:
    alone = {"min_tokens": 0, "logprobs": None, "top_logprobs": None}
    held = 0
    for name, schema in body_of(document, path)["properties"].items():
        (number, *_) = schema.get("anyOf", [schema])
        if "maximum" not in number or name in alone:
            continue
        high, low = number["maximum"], number.get("minimum", number.get("exclusiveMinimum"))
        step = 1 if number["type"] == "integer" else 1e-6
        inside_low = low if "minimum" in number else low + step
        for value, good in ((high, 1), (inside_low, 1), (high + step, 0), (inside_low - step, 0)):
            body = json.dumps(rest | {name: value}).encode()
            if good:
                read(body)
            else:
                with pytest.raises(Refusal) as caught:
                    read(body)
                assert caught.value.param == name
        held += 1
    assert held >= 9


@pytest.fixture(scope="module")
def operations(server: Inside) -> dict[str, Any]:
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def play(server: Inside, operation: Any, mode: GenerationMode) -> Counter[int]:
    """What so many made-up requests are answered with; each answer as the document says."""
    checks = [CHECKS.get_one(name) for name in HELD]
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call(base_url=server.url, timeout=60)
        seen[answer.status_code] += 1
        case.validate_response(answer, checks=checks)

    ask()
    return seen


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_what_the_document_allows_and_forbids_is_answered_as_it_says(
    server: Inside, operations: dict[str, Any], path: str
) -> None:
    operation = operations[f"POST {path}"]
    good = play(server, operation, GenerationMode.POSITIVE)
    bad = play(server, operation, GenerationMode.NEGATIVE)
    print(path, dict(good), dict(bad))
    assert good[200] > 0
    assert set(bad) <= {400, 404}
    server.rest()


def test_what_has_no_body_is_answered_as_the_document_says(
    server: Inside, operations: dict[str, Any]
) -> None:
    for label, operation in operations.items():
        if label.partition(" ")[2] not in FIELDS:
            seen = play(server, operation, GenerationMode.POSITIVE)
            assert set(seen) <= {200, 400, 404}, label
    server.rest()
