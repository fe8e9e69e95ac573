"""The factory of HTTP fronts: it takes routers and returns a FastAPI app that is ready to be served.

The app has routes of its own, for orchestrators and Prometheus: ``/health/live``, ``/health/ready``, ``/metrics``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from mlsys_core.loop.clock import WallClock
from mlsys_core.loop.protocols import Clock
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlsys_serving.extensions import Lifespan, Served
from mlsys_serving.http.bodies import BodyBudget, BodyLimitMiddleware
from mlsys_serving.http.config import HttpConfig
from mlsys_serving.http.describe import ErrorAnswers
from mlsys_serving.http.errors import ErrorFormat
from mlsys_serving.http.lifecycle import DrainHook, Lifecycle, Readiness
from mlsys_serving.http.middleware.gate import AdmissionMiddleware, BrowserGuard
from mlsys_serving.http.middleware.supervisor import Blamed, SupervisorMiddleware
from mlsys_serving.http.middleware.trace import TraceMiddleware, Tracing
from mlsys_serving.http.record import HttpMetrics, ObserveMiddleware, RequestContextMiddleware, log_failure, make_logger
from mlsys_serving.http.runtime import HttpRuntime, JsonRoute, health_router, random_ids
from mlsys_serving.http.streaming import LARGE, RequestThreads


def create_app(
    config: HttpConfig,
    *,
    routers: Sequence[APIRouter] = (),
    lifespan: Lifespan | None = None,
    on_drain: Sequence[DrainHook] = (),
    served: Served | None = None,
    error_format: ErrorFormat | None = None,
    readiness: Readiness | None = None,
    registry: CollectorRegistry | None = None,
    clock: Clock | None = None,
    logger: structlog.typing.FilteringBoundLogger | None = None,
    new_request_id: Callable[[], str] | None = None,
) -> FastAPI:
    """Return an app with ``routers`` and all services that a model server needs around them (``docs/http.md``).

    Args:
        config: limits, keys, names.
        routers: the front's routes; make them with :class:`Router`.
        lifespan: an asynchronous context manager function, entered before the first request (start the engine) and
            left after the last; the yielded values are in ``request.state``. The app is ready once it is entered.
        on_drain: called when a drain begins, before running requests are waited for.
        served: the system behind the app, and the extensions that other distributions add; None: there are none.
        error_format: the shape of errors; default OpenAI's.
        readiness: to add checks to; default a new one.
        registry: of metrics, for ``/metrics``; subsystems register their collectors in it. Default a new one.
        clock: of deadlines and durations; give it the serving loop's. Default ``WallClock``.
        logger: default one that writes ``config.log_format`` to stderr.
        new_request_id: makes ids of requests that bring none; default 32 random hexadecimal digits.

    Returns:
        The app; ``runtime_of(app)`` has the parts.

    Example:
        >>> from mlsys_serving.http import runtime_of
        >>> app = create_app(HttpConfig(title="echo"))
        >>> runtime_of(app).readiness.state.value
        'starting'
    """
    error_format = error_format or ErrorFormat()
    logger = logger or make_logger(config.log_format, level=config.log_level)
    readiness = readiness or Readiness()
    threads = RequestThreads("mlsys-front")
    clock = clock or WallClock()
    registry = CollectorRegistry() if registry is None else registry
    added = [] if served is None else served.extend(config, threads, readiness, registry, logger, clock)
    config = (
        config
        if not added
        else replace(
            config,
            open_paths=(*config.open_paths, *(path for each in added for path in each.open_paths)),
            uploads={**config.uploads, **{path: nbytes for each in added for path, nbytes in each.uploads.items()}},
        )
    )
    runtime = HttpRuntime(
        config=config,
        readiness=readiness,
        lifecycle=Lifecycle(
            readiness,
            on_drain=[*(hook for each in added for hook in each.on_drain), *on_drain],
            on_hook_error=lambda error: log_failure(logger, "drain hook failed", error),
        ),
        metrics=HttpMetrics(registry),
        answers=ErrorAnswers(
            error_format,
            by_path={prefix: own for each in added for prefix, own in each.error_formats.items()},
            validation_status=config.validation_status,
        ),
        logger=logger,
        clock=clock,
        guard=BrowserGuard(config.cors_origins, config.allowed_hosts),
        threads=threads,
        bodies=BodyBudget(config.bodies_nbytes, on_idle=threads.trim),
        tracing=None if config.traces is None else Tracing(config.traces, service=config.title),
    )

    async def on_error(request: Request, error: Exception) -> Response:
        return runtime.answers.response(runtime.answers.info(error, request.scope))

    app = FastAPI(
        title=config.title,
        version=config.version,
        lifespan=_lifespan(runtime, [lifespan, *(each.lifespan for each in added)]),
        middleware=[
            *_middleware(runtime, new_request_id or random_ids(), (served or Served(system="none")).extensions.blamed),
            *(middleware for each in added for middleware in each.middleware),
        ],
        # The supervisor answers all that is no HTTPException; the last line is for a fault outside of it.
        exception_handlers={HTTPException: on_error, RequestValidationError: on_error, Exception: on_error},
        responses={
            "4XX": {"model": error_format.model, "description": "The request cannot be served as it is"},
            "5XX": {"model": error_format.model, "description": "The server could not serve the request"},
        },
        redirect_slashes=False,  # an unknown path is a 404 in the documented shape, not a redirect
    )
    app.middleware_stack = app.build_middleware_stack()  # now, as an extension's may fail to be made
    _describe_in_thread(app, threads)
    app.router.route_class = JsonRoute
    app.state.mlsys_http = runtime
    for router in (*routers, *(own for each in added for own in each.routers), health_router(readiness, registry)):
        app.include_router(router)
    app.router.routes[:0] = [route for each in added for route in each.routes]
    return app


def _describe_in_thread(app: FastAPI, threads: RequestThreads) -> None:
    """Have the first request for the OpenAPI document make it in a thread: it takes .2 s, which no start waits for."""
    ((place, given),) = (
        (place, route)
        for place, route in enumerate(app.routes)
        if isinstance(route, Route) and route.path == app.openapi_url
    )

    async def document(request: Request) -> Response:
        await threads.run(app.openapi, size=LARGE)  # which keeps it
        answer: Response = await given.endpoint(request)
        return answer

    app.router.routes[place] = Route(given.path, document, name=given.name, include_in_schema=False)


def _middleware(runtime: HttpRuntime, new_request_id: Callable[[], str], blamed: Blamed) -> list[Middleware]:
    """Return the middlewares from the outside in."""
    config, answers, logger, clock = runtime.config, runtime.answers, runtime.logger, runtime.clock
    stack = [Middleware(RequestContextMiddleware, clock=clock, new_request_id=new_request_id)]
    if runtime.tracing is not None:  # outside of the log, whose lines name the trace
        stack.append(Middleware(TraceMiddleware, tracing=runtime.tracing, open_paths=config.open_paths))
    stack.append(Middleware(ObserveMiddleware, metrics=runtime.metrics, logger=logger, clock=clock))
    if config.cors_origins:
        # Outside of the keys: a browser's preflight request carries none, and refusals must be readable too.
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    stack += [
        Middleware(
            AdmissionMiddleware,
            guard=runtime.guard,
            uploads=config.uploads,
            lifecycle=runtime.lifecycle,
            api_keys=config.api_keys,
            open_paths=config.open_paths,
            answers=answers,
        ),
        Middleware(
            SupervisorMiddleware,
            config=config,
            lifecycle=runtime.lifecycle,
            answers=answers,
            logger=logger,
            blamed=blamed,
        ),
        Middleware(
            BodyLimitMiddleware, max_body_nbytes=config.max_body_nbytes, budget=runtime.bodies, uploads=config.uploads
        ),
    ]
    return stack


def _lifespan(
    runtime: HttpRuntime, inner: Sequence[Lifespan | None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any]]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            if runtime.tracing is not None:
                await stack.enter_async_context(runtime.tracing.open())
            stack.callback(runtime.threads.close)
            state: dict[str, Any] = {}
            try:
                for each in inner:  # the engine's first, then those of extensions, which end before it
                    if each is not None:
                        entered = await stack.enter_async_context(each(app))
                        state.update(entered or {})
            except Exception as error:
                runtime.lifecycle.startup_error = error  # ``serve`` raises it; the server library only logs it
                raise
            runtime.readiness.set_ready()
            yield state

    return lifespan
