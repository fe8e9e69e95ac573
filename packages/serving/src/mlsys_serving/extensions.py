"""Server extensions: what other distributions add to a running server, found through their specs.

``serve`` commands take the options of the registered extensions among their own (:class:`Extensions`), and
:func:`~mlsys_serving.http.create_app` asks each extension for its routes and hooks once its service is made.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.lazy import resolve
from mlsys_core.plugins.registry import Registry, failing_as, one_line
from mlsys_core.plugins.specs import ServerExtensionSpec, noun

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from fastapi import APIRouter, FastAPI
    from mlsys_core.loop.protocols import Clock
    from prometheus_client import CollectorRegistry
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send
    from structlog.typing import FilteringBoundLogger

    from mlsys_serving.http.config import HttpConfig
    from mlsys_serving.http.errors import ErrorFormat
    from mlsys_serving.http.lifecycle import DrainHook, Readiness
    from mlsys_serving.http.streaming import RequestThreads
    from mlsys_serving.watch import Watch

Lifespan: TypeAlias = "Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any] | None]]"


@dataclass(frozen=True, slots=True)
class Panel:
    """Live figures of an extension, shown on the server's page."""

    title: str
    figures: Callable[[], Mapping[str, float | str]]  # asked about once a second while somebody looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server that is being made, as its extensions see it."""

    system: str  # "orca", "batchmaker", "dvabatch", "windtunnel", or a third party's
    config: HttpConfig
    threads: RequestThreads  # for work that would hold up the event loop
    readiness: Readiness  # to add checks to
    registry: CollectorRegistry  # of metrics
    logger: FilteringBoundLogger
    clock: Clock  # of deadlines
    engine: Any = None  # the system's public service: mlsys_orca.api.service.ModelService; None: it has models alone
    models: Any = None  # mlsys_serving.models.ModelRepository; None: the system serves no named models
    watch: Watch | None = None  # how the system's batches are watched; None: it has none
    options: Any = None  # an object of the spec's options class; None: the spec has none
    panels: Callable[[], Sequence[Panel]] = tuple  # those of all extensions, once all are made


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The additions of one extension to one server."""

    routers: Sequence[APIRouter] = ()  # make them with mlsys_serving.http.Router
    routes: Sequence[BaseRoute] = ()  # plain ASGI, matched before all others: for hot paths
    lifespan: Lifespan | None = None  # entered when the engine runs, left before it ends
    on_drain: Sequence[DrainHook] = ()  # called when a drain begins, before those of the engine
    middleware: Sequence[Middleware] = ()  # innermost: after keys, limits and errors
    open_paths: Sequence[str] = ()  # need no key; "/*" at the end takes everything below
    uploads: Mapping[str, int] = field(default_factory=dict)  # largest body by path, of those that go to the disk
    error_formats: Mapping[str, ErrorFormat] = field(default_factory=dict)  # by prefix of paths; the longest counts
    panels: Sequence[Panel] = ()


class ExtensionOptions:
    """Base of options classes: frozen dataclasses whose fields are options; ``panel`` names their panel in the help."""

    panel: ClassVar[str] = "Server"

    def check(self, *, has_instances: bool) -> None:
        """Refuse, before a model is loaded, options that do not go together, or not with worker processes."""

    @contextmanager
    def hold(self, host: str) -> Iterator[None]:
        """Hold what the extension will need, such as a port of ``host``, from before a model is loaded to the end."""
        yield

    def notes(self, url: str) -> Sequence[str]:
        """Return what the server says of the extension when it is ready; ``url`` is its address."""
        return ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """An extension with the options that it was given."""

    spec: ServerExtensionSpec
    options: ExtensionOptions | None  # None: the spec has none


class Extensions:
    """The extensions of one server, with their options; iterating gives them by name.

    Args:
        registry: Where they are registered; names the owner of one that fails.
        chosen: Those of the server.

    Example:
        >>> len(Extensions())
        0
    """

    def __init__(self, registry: Registry | None = None, chosen: Sequence[Chosen] = ()) -> None:
        self._registry, self._chosen = registry or Registry(), tuple(chosen)

    @classmethod
    def of(cls, system: str, registry: Registry, **options: Any) -> Extensions:
        """Return all extensions of ``system``; ``options``: objects of options classes by name, else their defaults."""
        chosen = []
        for spec in specs_of(system, registry):
            given = options.get(spec.name.replace("-", "_"))
            made = registry.part(spec, spec.options)() if given is None and spec.options is not None else given
            chosen.append(Chosen(spec, made))
        return cls(registry, chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Chosen]:
        return iter(self._chosen)

    def options(self, name: str) -> Any:
        """Return the options of the extension called ``name``; None: it is not there, or has none."""
        return next((each.options for each in self._chosen if each.spec.name == name), None)

    def check(self, *, has_instances: bool = False, needs_front: bool = False) -> None:
        """Refuse options, before a model is loaded.

        Raises:
            InvalidInputError: Some do not go together, or not with worker processes; or there is no front.
        """
        if needs_front and not any(each.spec.is_front for each in self._chosen):
            raise InvalidInputError("no protocol to serve models by is installed: pip install mlsys-open-inference")
        for each in self._chosen:
            if each.options is not None:
                each.options.check(has_instances=has_instances)

    @contextmanager
    def held(self, host: str) -> Iterator[None]:
        """Hold what the extensions will need of ``host`` while the context is open."""
        with ExitStack() as stack:
            for each in self._chosen:
                if each.options is not None:
                    stack.enter_context(each.options.hold(host))
            yield

    def notes(self, url: str) -> list[str]:
        """Return what the extensions have to say when the server is ready at ``url``."""
        return [note for each in self._chosen if each.options is not None for note in each.options.notes(url)]

    def extend(self, service: Service) -> list[Extension]:
        """Return the additions of all extensions to ``service``; each sees its own options in it.

        Raises:
            PluginError: An extension fails by a mistake of its own, or returns something else.
        """
        made: list[Extension] = []

        def panels() -> list[Panel]:
            return [panel for extension in made for panel in extension.panels]

        for each in self._chosen:
            own = replace(service, options=each.options, panels=panels)
            extension = self._registry.part(each.spec)(own)
            if extension is None:
                continue
            if not isinstance(extension, Extension):
                owner = self._registry.owner(each.spec)
                kind = type(extension).__name__
                raise PluginError(f"server extension {each.spec.name!r} of {owner}: it gave a {kind}, not an Extension")
            made.append(self._named(extension, each.spec, service.logger))
        return made

    def _named(self, extension: Extension, spec: ServerExtensionSpec, logger: FilteringBoundLogger) -> Extension:
        """Return the extension with hooks whose failures name it."""
        lifespan = extension.lifespan

        @asynccontextmanager
        async def named_lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any] | None]:
            assert lifespan is not None
            async with AsyncExitStack() as stack:
                with failing_as(spec, self._registry):
                    entered = await stack.enter_async_context(lifespan(app))
                ending = stack.pop_all()
            try:
                yield entered
            finally:
                try:
                    with failing_as(spec, self._registry):
                        await ending.aclose()
                except Exception as error:  # noqa: BLE001 - the engine and the other extensions still have to end
                    logger.error("an extension failed at its end", error=one_line(error))

        def named_hook(hook: DrainHook) -> DrainHook:
            async def named() -> None:
                with failing_as(spec, self._registry):
                    try:
                        result = hook()
                        if inspect.isawaitable(result):
                            await result
                    except (asyncio.CancelledError, KeyboardInterrupt) as error:  # would end the drain, or the server
                        task = asyncio.current_task()
                        if task is None or task.cancelling():
                            raise
                        raise RuntimeError(one_line(error)).with_traceback(error.__traceback__) from None

            return named

        return replace(
            extension,
            lifespan=None if lifespan is None else named_lifespan,
            on_drain=[named_hook(hook) for hook in extension.on_drain],
            middleware=[self._named_middleware(each, spec) for each in extension.middleware],
        )

    def _named_middleware(self, middleware: Middleware, spec: ServerExtensionSpec) -> Middleware:
        """Return a middleware for requests alone, which no mistake of it keeps from the start or the end of the app."""

        def make(app: ASGIApp) -> ASGIApp:
            with failing_as(spec, self._registry):
                made = middleware.cls(app, *middleware.args, **middleware.kwargs)

            async def of_requests(scope: Scope, receive: Receive, send: Send) -> None:
                await (app if scope["type"] == "lifespan" else made)(scope, receive, send)

            return of_requests

        kind: Any = type(middleware)
        named: Middleware = kind(make)
        return named

    def blamed(self, error: BaseException, endpoint: object = None) -> str | None:
        """Return the name and the owner of the extension whose mistake ``error`` is; None: it is none's.

        Args:
            error: Raised while a request was served, in which the code of extensions and of the system take turns.
            endpoint: Function of the request's route, for errors that are raised beside it.
        """
        specs = {each.spec.factory.partition(".")[0].partition(":")[0]: each.spec for each in self._chosen}
        raised = error.__cause__ if isinstance(error.__cause__, StopIteration) else error  # Python wraps it on its way
        names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(raised.__traceback__)]
        names = [getattr(endpoint, "__module__", ""), *names]
        packages = [name.partition(".")[0] for name in names if not name.startswith("mlsys_serving.http")]
        own = [package for package in packages if package in specs or package.startswith("mlsys_")]
        spec = specs.get(own[-1]) if own else None
        if spec is None or (spec.is_front and packages[-1] != own[-1]):  # below a front are the models of others
            return None
        exact = self._registry.blamed(error)  # of several in one package
        spec = exact if isinstance(exact, ServerExtensionSpec) else spec
        return f"{noun(type(spec))} {spec.name!r} of {self._registry.owner(spec)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The system behind an app, for its extensions; see :class:`Service` for the fields."""

    system: str
    extensions: Extensions = field(default_factory=Extensions)
    engine: Any = None
    models: Any = None
    watch: Watch | None = None

    def extend(
        self,
        config: HttpConfig,
        threads: RequestThreads,
        readiness: Readiness,
        registry: CollectorRegistry,
        logger: FilteringBoundLogger,
        clock: Clock,
    ) -> list[Extension]:
        """Return the additions of the extensions to an app of these parts."""
        service = Service(
            system=self.system,
            config=config,
            threads=threads,
            readiness=readiness,
            registry=registry,
            logger=logger,
            clock=clock,
            engine=self.engine,
            models=self.models,
            watch=self.watch,
        )
        return self.extensions.extend(service)


def specs_of(system: str, registry: Registry) -> list[ServerExtensionSpec]:
    """Return the specs of the extensions of ``system``, by name."""
    found = [spec for spec in registry.all(ServerExtensionSpec) if {"*", system} & set(spec.systems)]
    return sorted(found, key=lambda spec: spec.name)


def option_groups(system: str, registry: Registry) -> dict[str, type]:
    """Return the options classes of the extensions of ``system``, by parameter name.

    Raises:
        PluginError: Two of them have an option of the same name.
    """
    groups: dict[str, type] = {}
    owner_of: dict[str, str] = {}
    for spec in specs_of(system, registry):
        if spec.options is not None:
            with failing_as(spec, registry):
                group = resolve(spec.options)
            groups[spec.name.replace("-", "_")] = group
            for each in (each for each in fields(group) if each.init):
                if each.name in owner_of:
                    raise PluginError(
                        f"server extensions {owner_of[each.name]!r} and {spec.name!r} have both an option "
                        f"--{each.name.replace('_', '-')}; block a plugin with MLSYS_PLUGINS_BLOCK"
                    )
                owner_of[each.name] = spec.name
    return groups
