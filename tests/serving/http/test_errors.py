from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Query
from mlsys_core.errors import DeviceError, InvalidInputError, ServingError
from mlsys_core.loop import QueueFullError as CoreQueueFullError
from mlsys_serving.http import ErrorFormat, ErrorInfo, HttpError, Router
from mlsys_serving.http.describe import MAX_MESSAGE_CHARS, describe
from mlsys_serving.http.errors import stream_event, to_json
from pydantic import BaseModel, Field

Check = Callable[[httpx.Response, int, str], dict[str, Any]]


class QueueFullError(ServingError):
    http_status = 429
    error_code = "queue_full"
    retry_after_s = 2.4


class NoModelError(InvalidInputError):
    http_status = 404
    param = "model"


RAISED: dict[str, Exception] = {
    "http": HTTPException(418, "short and stout", headers={"x-pot": "tea"}),
    "http-dict": HTTPException(403, {"message": "not yours", "code": "not_owner", "param": "model", "other": 1}),
    "http-bare": HTTPException(500, {"secret": "inside"}),
    "input": InvalidInputError("top_k is 1 or more, got 0"),
    "serving": ServingError("the engine stopped"),
    "queue": QueueFullError("64 requests wait already"),
    "later": CoreQueueFullError("8 requests wait already", retry_after_s=0.2),
    "model": NoModelError("no model 'x'"),
    "device": DeviceError("/dev/secret is busy"),
    "bug": KeyError("secret"),
    "group": ExceptionGroup("tasks", [InvalidInputError("one of the tasks")]),
    "long": InvalidInputError("x" * 5000),
    "surrogate": InvalidInputError("got '\ud800'"),
    "odd": type("OddError", (ServingError,), {"http_status": "no number"})("odd"),
}


class Body(BaseModel):
    name: str
    top_k: int = Field(default=1, ge=1)
    tags: list[str] = []


@pytest.fixture
def router() -> Router:
    router = Router()

    @router.get("/raise/{kind}")
    async def throw(kind: str) -> None:
        raise RAISED[kind]

    @router.post("/typed")
    async def typed(body: Body, limit: int = Query(default=1, le=10)) -> Body:
        return body

    return router


@pytest.mark.parametrize(
    ("kind", "status", "code", "message"),
    [
        ("http", 418, "im_a_teapot", "short and stout"),
        ("http-dict", 403, "not_owner", "not yours"),
        ("http-bare", 500, "internal_error", "the server failed"),
        ("input", 400, "invalid_value", "top_k is 1 or more, got 0"),
        ("serving", 500, "internal_error", "the engine stopped"),
        ("queue", 429, "queue_full", "64 requests wait already"),
        ("later", 503, "unavailable", "8 requests wait already"),
        ("model", 404, "not_found", "no model 'x'"),
        ("device", 500, "internal_error", "the server failed"),
        ("bug", 500, "internal_error", "the server failed"),
        ("group", 400, "invalid_value", "one of the tasks"),
        ("surrogate", 400, "invalid_value", "got '\ud800'"),
        ("odd", 500, "internal_error", "odd"),
    ],
)
async def test_each_exception_has_its_status_and_the_one_shape(
    kind: str, status: int, code: str, message: str, router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(router)) as client:
        response = await client.get(f"/raise/{kind}")
    error = check_error(response, status, code)
    assert error["message"].startswith(message)
    assert "secret" not in response.text


async def test_attributes_of_an_error_reach_the_client(
    router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(router)) as client:
        assert (await client.get("/raise/queue")).headers["retry-after"] == "3"
        assert (await client.get("/raise/later")).headers["retry-after"] == "1"
        assert (await client.get("/raise/http")).headers["x-pot"] == "tea"
        assert check_error(await client.get("/raise/model"), 404, "not_found")["param"] == "model"
        long = check_error(await client.get("/raise/long"), 400, "invalid_value")["message"]
    assert len(long) == MAX_MESSAGE_CHARS
    assert long.endswith("xxx...")


async def test_an_unexpected_error_is_logged_with_its_traceback_and_its_request_id(
    router: Router, make_app: Any, client_of: Any, log: Any
) -> None:
    async with client_of(make_app(router)) as client:
        response = await client.get("/raise/bug")
        await client.get("/raise/input")  # the client's fault: no traceback
    [event] = log.events("request failed")
    assert event["request_id"] == response.headers["x-request-id"]
    assert "KeyError: 'secret'" in event["exception"]
    assert event["exception"].startswith("Traceback")


async def test_unknown_paths_and_methods(router: Router, make_app: Any, client_of: Any, check_error: Check) -> None:
    async with client_of(make_app(router)) as client:
        check_error(await client.get("/nowhere"), 404, "not_found")
        check_error(await client.get("/typed/"), 404, "not_found")  # no redirect
        response = await client.delete("/typed")
    check_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(("option", "expected"), [(422, 422), (400, 400)])
async def test_a_body_that_does_not_fit_names_the_field_and_the_reason(
    option: int, expected: int, router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(router, validation_status=option)) as client:
        response = await client.post("/typed?limit=99", json={"name": "n", "top_k": 0, "tags": ["a", 1]})
        missing = await client.post("/typed")
    error = check_error(response, expected, "invalid_value")
    assert error["param"] == "limit"
    assert error["message"].startswith("query limit: Input should be less than or equal to 10; ")
    assert "top_k: Input should be greater than or equal to 1" in error["message"]
    assert "tags.1: Input should be a valid string" in error["message"]
    assert check_error(missing, expected, "invalid_value")["message"] == "body: Field required"


async def test_huge_input_is_not_echoed(router: Router, make_app: Any, client_of: Any, check_error: Check) -> None:
    huge = "z" * 100_000
    async with client_of(make_app(router)) as client:
        for body in (
            {"name": {huge: huge}},
            {"name": [huge]},
            {huge: 1},
            {"name": "n", "tags": list(range(500))},
        ):
            response = await client.post("/typed", json=body)
            check_error(response, 422, "invalid_value")
            assert len(response.content) < 2000
        response = await client.post("/typed", json={"name": "n", "tags": list(range(500))})
    assert response.json()["error"]["message"].endswith("; and 495 more")


async def test_json_sent_as_something_else_says_so(
    router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(router)) as client:
        response = await client.post("/typed", content=b'{"name": "n"}', headers={"content-type": "text/csv"})
    assert "content-type: application/json" in check_error(response, 422, "invalid_value")["message"]


@pytest.mark.parametrize("strict", [True, False])
async def test_malformed_bodies_on_strict_and_plain_routers(
    strict: bool, make_app: Any, client_of: Any, check_error: Check
) -> None:
    router: APIRouter = Router() if strict else APIRouter()

    @router.post("/any")
    async def anything(body: dict[str, Any]) -> dict[str, Any]:
        return body

    async with client_of(make_app(router)) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/any", content=b'{"a": ', headers=headers)
        position = "column 6" if strict else "character 6"
        assert position in check_error(response, 400, "malformed_json")["message"]
        check_error(await client.post("/any", content=b'{"a": "\xff"}', headers=headers), 400, "invalid_encoding")


async def test_routes_of_the_app_itself_are_strict_too(make_app: Any, client_of: Any, check_error: Check) -> None:
    app: FastAPI = make_app()

    @app.post("/any")
    async def anything(body: dict[str, Any]) -> dict[str, Any]:
        return body

    async with client_of(app) as client:
        response = await client.post("/any", content=b'{"a": NaN}', headers={"content-type": "application/json"})
    check_error(response, 400, "malformed_json")


async def test_another_format_for_all_errors(router: Router, make_app: Any, client_of: Any) -> None:
    class TritonError(BaseModel):
        error: str

    triton = ErrorFormat(body=lambda info: {"error": f"{info.path}: {info.message}"}, model=TritonError)
    app: FastAPI = make_app(router, app={"error_format": triton}, api_keys=frozenset({"key"}), open_paths=("/raise/*",))
    async with client_of(app) as client:
        assert (await client.get("/raise/input")).json() == {"error": "/raise/input: top_k is 1 or more, got 0"}
        assert (await client.post("/typed")).json()["error"].startswith("/typed: an API key is needed")
    responses = app.openapi()["paths"]["/typed"]["post"]["responses"]
    assert responses["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/TritonError"}


async def test_the_shape_is_in_the_openapi_document(router: Router, make_app: Any, client_of: Any) -> None:
    app: FastAPI = make_app(router, title="front", version="1.2.3")
    async with client_of(app) as client:
        assert app.openapi_schema is None  # no start waits for it
        document = (await client.get("/openapi.json")).json()
        assert app.openapi_schema == document == (await client.get("/openapi.json")).json()
        assert "/openapi.json" not in document["paths"]
    assert document["info"] == {"title": "front", "version": "1.2.3"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for group in ("4XX", "5XX"):
                schema = operation["responses"][group]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}, path
            assert "422" not in operation["responses"]
    assert set(document["components"]["schemas"]["ErrorDetail"]["properties"]) == {
        "type",
        "code",
        "message",
        "param",
        "request_id",
    }


def test_a_fault_outside_the_supervisor_keeps_the_shape(make_app: Any) -> None:
    def broken_id() -> str:
        raise RuntimeError("secret")

    import asyncio

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(app={"new_request_id": broken_id}), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/health/live")

    response = asyncio.run(ask())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_an_http_exception_below_400_has_no_body(make_app: Any, client_of: Any) -> None:
    router = Router()

    @router.get("/cached")
    async def cached() -> None:
        raise HTTPException(304, headers={"etag": "x"})

    async with client_of(make_app(router)) as client:
        response = await client.get("/cached")
    assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", "x")


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/event-stream; charset=utf-8", b'data: {"error":"x"}\n\n'),
        ("application/x-ndjson", b'{"error":"x"}\n'),
        ("application/octet-stream", None),
        ("", None),
    ],
)
def test_the_last_event_of_a_stream_depends_on_its_type(content_type: str, expected: bytes | None) -> None:
    assert stream_event({"error": "x"}, content_type) == expected


def test_errors_are_written_in_ascii_whatever_they_hold() -> None:
    info = ErrorInfo(status=400, type="t", code="c", message="\ud800é")
    assert to_json(ErrorFormat().body(info)).isascii()


def test_http_error_is_a_serving_error_with_its_fields() -> None:
    error = HttpError("gone", http_status=410, error_code="gone_for_good", param="id", headers={"a": "b"})
    info = describe(error)
    assert isinstance(error, ServingError)
    assert (info.status, info.code, info.param, info.headers) == (410, "gone_for_good", "id", (("a", "b"),))
    assert info.type == "invalid_request_error"
