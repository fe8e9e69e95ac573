from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import Readiness, Router, runtime_of
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.routing import Mount


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def router(clock: ManualClock) -> Router:
    inner = Router(prefix="/models")

    @inner.post("/{name}/infer")
    async def infer(name: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
        clock.time_s += 0.25
        return body

    outer = Router(prefix="/v2")
    outer.include_router(inner)
    return outer


async def test_one_line_per_request_with_the_template_and_without_content(
    router: Router, clock: ManualClock, make_app: Any, client_of: Any, log: Any
) -> None:
    async with client_of(make_app(router, app={"clock": clock})) as client:
        response = await client.post(
            "/v2/models/private/infer?token=private", json={"a": "private"}, headers={"x-request-id": "r1"}
        )
        await client.get("/private")
    assert log.text.count("\n") == 2
    first, second = log.events("request")
    timestamp = first.pop("timestamp")
    assert timestamp.endswith("Z")
    assert first == {
        "event": "request",
        "level": "info",
        "method": "POST",
        "route": "/v2/models/{name}/infer",
        "status": 200,
        "duration_ms": 250.0,
        "request_id": "r1",
        "bytes": len(response.content),
        "complete": True,
    }
    assert (second["route"], second["status"]) == ("<unmatched>", 404)
    assert "private" not in log.text


async def test_metrics_count_by_route_template_method_and_status(
    router: Router, clock: ManualClock, make_app: Any, client_of: Any
) -> None:
    app = make_app(router, app={"clock": clock})
    value = runtime_of(app).metrics.registry.get_sample_value
    async with client_of(app) as client:
        for name in ("a", "b"):
            await client.post(f"/v2/models/{name}/infer", json={})
        await client.get("/v2/models/a/infer")
        await client.request("BREW", "/v2/models/a/infer")
        for path in ("/x", "/y", "/z/w"):
            await client.get(path)
    route = "/v2/models/{name}/infer"
    ok = {"route": route, "method": "POST", "status": "200"}
    assert value("mlsys_http_requests_total", ok) == 2
    assert value("mlsys_http_requests_total", {"route": route, "method": "GET", "status": "405"}) == 1
    assert value("mlsys_http_requests_total", {"route": route, "method": "OTHER", "status": "405"}) == 1
    assert value("mlsys_http_requests_total", {"route": "<unmatched>", "method": "GET", "status": "404"}) == 3
    posts = {"route": route, "method": "POST"}
    assert value("mlsys_http_request_duration_seconds_sum", posts) == 0.5
    assert value("mlsys_http_request_duration_seconds_bucket", posts | {"le": "0.25"}) == 2
    assert value("mlsys_http_request_duration_seconds_bucket", posts | {"le": "0.1"}) == 0


async def test_requests_in_flight_are_counted_while_they_run(make_app: Any, client_of: Any) -> None:
    router, entered, leave = Router(), asyncio.Event(), asyncio.Event()

    @router.get("/wait")
    async def wait() -> None:
        entered.set()
        await leave.wait()

    app = make_app(router)
    value = runtime_of(app).metrics.registry.get_sample_value
    async with client_of(app) as client:
        request = asyncio.create_task(client.get("/wait"))
        await entered.wait()
        assert value("mlsys_http_requests_in_flight") == 1
        assert runtime_of(app).lifecycle.num_running == 1
        leave.set()
        await request
    assert value("mlsys_http_requests_in_flight") == 0
    assert runtime_of(app).lifecycle.num_running == 0


async def test_a_mounted_app_shows_its_prefix(make_app: Any, client_of: Any, log: Any) -> None:
    inner = FastAPI()

    @inner.get("/things/{name}")
    async def thing(name: str) -> str:
        return name

    app = make_app()
    app.router.routes.append(Mount("/sub", inner))
    async with client_of(app) as client:
        assert (await client.get("/sub/things/x")).status_code == 200
    assert log.events("request")[0]["route"] == "/sub/things/{name}"


async def test_the_metrics_page_shows_this_app_and_what_subsystems_registered(make_app: Any, client_of: Any) -> None:
    registry = CollectorRegistry()
    Gauge("orca_free_blocks", "Blocks free", registry=registry).set(7)
    first, second = make_app(app={"registry": registry}), make_app()
    Counter("late", "Registered after the app was made", registry=runtime_of(first).metrics.registry).inc()
    async with client_of(first) as client:
        await client.get("/health/live")
        page = await client.get("/metrics")
        open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "orca_free_blocks 7.0" in page.text
    assert "late_total 1.0" in page.text
    assert 'mlsys_http_requests_total{method="GET",route="/health/live",status="200"} 1.0' in page.text
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")
    async with client_of(second) as client:
        page = await client.get("/metrics")
    assert "orca_free_blocks" not in page.text
    assert "/health/live" not in page.text


@asynccontextmanager
async def _started(app: FastAPI) -> AsyncIterator[None]:
    async with app.router.lifespan_context(app):
        yield


async def test_ready_follows_the_lifespan_the_checks_and_the_drain(make_app: Any, client_of: Any) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        steps.append(runtime_of(app).readiness.state.value)
        yield {"engine": "started"}
        steps.append("left")

    loading: list[str | None] = ["still loading"]
    readiness = Readiness()
    readiness.add_check("model", lambda: loading[0])

    async def workers() -> str | None:
        return None

    readiness.add_check("workers", workers)
    app = make_app(app={"lifespan": lifespan, "readiness": readiness})
    async with client_of(app) as client:
        response = await client.get("/health/ready")
        assert (response.status_code, response.json()["status"]) == (503, "starting")
        assert (await client.get("/health/live")).json() == {"status": "live"}
        async with _started(app):
            response = await client.get("/health/ready")
            assert response.status_code == 503
            assert response.json() == {"status": "ready", "checks": {"model": "still loading", "workers": "ok"}}
            loading[0] = None
            assert (await client.get("/health/ready")).status_code == 200
            assert (await client.head("/health/ready")).status_code == 200
            readiness.set_draining()
            readiness.set_ready()  # too late: a drain has no way back
            response = await client.get("/health/ready")
            assert (response.status_code, response.json()["status"]) == (503, "draining")
        assert (await client.get("/health/live")).status_code == 200
    assert steps == ["starting", "left"]


async def test_a_check_that_raises_or_hangs_has_failed_and_tells_no_secrets() -> None:
    readiness = Readiness(check_timeout_s=0.02)

    def broken() -> str | None:
        raise KeyError("secret")

    async def hanging() -> str | None:
        await asyncio.Event().wait()
        return None

    readiness.add_check("broken", broken)
    readiness.add_check("hanging", hanging)
    readiness.set_ready()
    report = await readiness.report()
    assert report.checks == {"broken": "raised KeyError", "hanging": "no answer in 0.02 s"}
    assert not report.is_ready


def test_two_checks_cannot_have_one_name() -> None:
    readiness = Readiness()
    readiness.add_check("model", lambda: None)
    with pytest.raises(InvalidInputError, match="'model' already"):
        readiness.add_check("model", lambda: None)


def test_runtime_of_refuses_other_apps() -> None:
    with pytest.raises(InvalidInputError, match="create_app"):
        runtime_of(FastAPI())
