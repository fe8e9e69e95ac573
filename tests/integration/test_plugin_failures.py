"""A third party's plugin that raises in any part, at any moment: one line names the part and its distribution.

Drawn are the kind of part, the moment (its hook is called, its module is imported, it is made, it is used) and the
exception. ``MLSYS_DEBUG=1`` shows where it came from.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.abc
import importlib.util
import io
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import mlsys_core.plugins
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core import config
from mlsys_core.cli import main
from mlsys_core.config import read_settings
from mlsys_core.device import get_device
from mlsys_core.errors import PluginError
from mlsys_core.memory.pools import find_pool
from mlsys_core.plugins import Registry, hookimpl, load_plugins
from mlsys_core.plugins import specs as kinds
from mlsys_core.plugins.loading import LoadContext, find_module_compiler, load_with
from mlsys_core.profiling import Recorder, write_trace
from mlsys_dvabatch.scheduling.policies.registry import make_policy
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_serving.extensions import Extensions, Served, Service
from mlsys_serving.http import BackgroundServer, HttpConfig, create_app
from mlsys_serving.http.record import make_logger
from mlsys_windtunnel.convert.registry import default_registry

MODULE, OWNER = "acme_drawn", "acme-drawn"
SOURCE = """
import typer

def trip(moment):
    if moment == MOMENT:
        FAULT()

def part(*args, **keywords):
    trip("make")
    return Made()

class Made:
    def __getattr__(self, name):
        return lambda *args, **keywords: trip("use")

    def __call__(self, *args):
        trip("use")

class kernel:
    @staticmethod
    def load():
        trip("use")

def taken(value: str) -> str:
    trip("make")
    return value

app = typer.Typer()

@app.command()
def command(option: str = typer.Option("x", callback=taken)):
    trip("use")

trip("import")
"""
EXTENSION = """
from contextlib import asynccontextmanager

from mlsys_serving.extensions import Extension
from mlsys_serving.http import Router
from starlette.middleware import Middleware
from starlette.responses import StreamingResponse
from starlette.routing import Route

def trip(place):
    if place == PLACE:
        FAULT()

class Between:
    def __init__(self, app):
        trip("middleware made")
        self.app = app

    async def __call__(self, scope, receive, send):
        scope["path"]  # the app's lifespan has none
        if scope["path"] == "/drawn":
            trip("middleware")
        await self.app(scope, receive, send)

def extend(service):
    router = Router()

    @router.get("/drawn")
    async def drawn():
        trip("route")
        return "fine"

    @router.get("/drawn/blocking")
    def blocking():
        trip("blocking route")
        return "fine"

    @router.get("/drawn/stream")
    async def stream():
        async def parts():
            yield "one "
            trip("stream")
            yield "two"
        return StreamingResponse(parts())

    async def plain(request):
        trip("plain route")

    @asynccontextmanager
    async def beside(app):
        trip("start")
        yield
        trip("end")

    async def drain():
        trip("drain")

    def drain_at_once():
        trip("drain at once")

    routes = [Route("/drawn/plain", plain)]
    return Extension(routers=[router], routes=routes, lifespan=beside, middleware=[Middleware(Between)],
                     on_drain=[drain, drain_at_once])
"""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def deep() -> None:
    deep()


def raising(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise copy.copy(error)  # without the frames of the time before

    return fault


FAULTS: dict[str, Callable[[], object]] = {
    "KeyError": lambda: {}["missing"],
    "TypeError": lambda: len(3),  # type: ignore[arg-type]
    "FileNotFoundError": lambda: Path("/nonexistent/acme").read_text(),
    "ValueError": raising(ValueError("first\nsecond\n\n  third")),
    "ImportError": raising(ImportError("no libacme.so")),
    "ModuleNotFoundError": raising(ModuleNotFoundError("No module named 'acme_core'")),
    "AttributeError": raising(AttributeError("part")),
    "AssertionError": raising(AssertionError()),
    "StopIteration": raising(StopIteration()),
    "ExceptionGroup": raising(ExceptionGroup("several", [ValueError("a"), KeyError("b")])),
    "UnspeakableError": raising(UnspeakableError()),
    "RecursionError": deep,
    "SystemExit": raising(SystemExit("gone")),
}


def cancelled() -> None:
    raise asyncio.CancelledError


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the drawn plugin's module."""

    def __init__(self, moment: str, fault: Callable[[], object]) -> None:
        self.moment, self.fault = moment, fault

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == MODULE else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(MOMENT=self.moment, FAULT=self.fault)
        exec(SOURCE, module.__dict__)


class Kind(NamedTuple):
    """How a part is registered, and what calls it."""

    hook: str
    spec: kinds.Spec
    use: Sequence[str] | Callable[[Registry], object]  # a command line, or a function that a command would call
    moments: tuple[str, ...] = ("hook", "import", "make", "use")


def spec(kind: type[kinds.Spec], /, **fields: Any) -> kinds.Spec:
    return kind(**{"name": "drawn", "help": "x", **fields})


PART = f"{MODULE}:part"
UNUSED = ("hook", "import", "make")  # its object is nothing that is called later
NOTHING: Any = None
SERVICE = Service(
    system="acme",
    **dict.fromkeys(("config", "threads", "readiness", "registry", "logger", "clock"), NOTHING),
)
CASES = [
    Kind("commands", spec(kinds.CommandSpec, app=f"{MODULE}:app"), ["drawn"]),
    Kind("commands", spec(kinds.CommandSpec, name="plugins drawn", app=f"{MODULE}:app"), ["plugins", "drawn"]),
    Kind("engines", spec(kinds.EngineSpec, app=f"{MODULE}:app"), ["serve", "drawn"]),
    Kind("devices", spec(kinds.DeviceSpec, factory=PART), lambda r: get_device("drawn", registry=r).stream()),
    Kind(
        "memory_pools",
        spec(kinds.MemoryPoolSpec, kind="blocks", factory=PART),
        lambda r: find_pool("drawn", "blocks", registry=r)(4).allocate(1),
    ),
    Kind(
        "compilers",
        spec(kinds.CompilerSpec, factory=PART),
        lambda r: find_module_compiler("drawn", r)(None, ())(1),
    ),
    Kind(
        "kernels",
        spec(kinds.KernelSpec, factory=f"{MODULE}:kernel"),
        ["build", "--only", "drawn"],
        ("hook", "import", "use"),
    ),
    Kind(
        "policies",
        spec(kinds.PolicySpec, kind="scheduling", factory=PART),
        lambda r: make_scheduler(
            "drawn", r, block_tables=BlockTables(num_blocks=4), max_batch_size=2, max_model_len=8
        ).next_batch(0, 0.0),
    ),
    Kind(
        "policies",
        spec(kinds.PolicySpec, name="dvabatch-drawn", kind="batching", factory=PART),
        lambda r: make_policy("drawn", r),
        UNUSED,
    ),
    Kind(
        "model_loaders",
        spec(kinds.ModelLoaderSpec, engine="orca", suffixes=(".drawn",), factory=PART),
        lambda r: load_with(r.all(kinds.ModelLoaderSpec)[-1], Path("a.drawn"), LoadContext(), r, kind=object)(),
    ),
    Kind(
        "converters",
        spec(kinds.ConverterSpec, source="acme:Estimator", factory=PART),
        lambda r: default_registry().find("acme.Estimator")(None)(1),
    ),
    Kind(
        "converters",
        spec(kinds.ConverterSpec, source="acme:Estimator", factory=PART),
        lambda r: default_registry().find("acme.Estimator")(None).forward(1),
    ),
    Kind(
        "exporters",
        spec(kinds.ExporterSpec, factory=PART),
        ["trace", "export", "TRACE", "OUT", "--to", "drawn"],
        UNUSED,
    ),
    Kind("benchmarks", spec(kinds.BenchmarkSpec, run=PART), ["bench", "drawn"], UNUSED),
    Kind(
        "demo_steps",
        spec(kinds.DemoStepSpec, run=PART),
        ["demo", "--only", "drawn", "--report", "OUT"],
        UNUSED,
    ),
    Kind(
        "server_extensions",
        spec(kinds.ServerExtensionSpec, factory=PART),
        lambda r: Extensions.of("acme", r).extend(SERVICE),
        UNUSED,
    ),
]


class Drawn:
    """An entry point of the drawn plugin, beside those that are installed."""

    name, value = "acme", f"{MODULE}:plugin"
    dist = types.SimpleNamespace(name=OWNER, version="1", requires=[])

    def __init__(self, kind: Kind, moment: str, fault: Callable[[], object]) -> None:
        self.kind, self.moment, self.fault = kind, moment, fault

    def load(self) -> object:
        def hook() -> list[kinds.Spec]:
            if self.moment == "hook":
                self.fault()
            return [self.kind.spec]

        name = f"mlsys_register_{self.kind.hook}"
        return types.SimpleNamespace(**{name: hookimpl(specname=name)(hook)})


@contextmanager
def installed(drawn: Drawn) -> Iterator[Registry]:
    """Have the process see the drawn plugin, and a command ``reader`` that uses its part."""
    finder = Finder(drawn.moment, drawn.fault)
    found = [*metadata.entry_points(group="mlsys.plugins", name="serving"), drawn]  # it has mlsys serve
    plugins = load_plugins(read_settings({}), entry_points=found)  # type: ignore[arg-type]
    app = typer.Typer()

    @app.command()
    def reader() -> None:
        assert callable(drawn.kind.use)
        drawn.kind.use(plugins.registry)

    sys.modules["reading"] = types.ModuleType("reading")
    sys.modules["reading"].app = app  # type: ignore[attr-defined]
    plugins.registry.add(kinds.CommandSpec(name="reader", help="x", app="reading:app"), "reading")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlsys_core.plugins, "load_plugins", lambda _: plugins)
        patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        patch.delitem(sys.modules, "mlsys_serving.cli.serve", raising=False)  # it lists engines when it is imported
        mlsys_core.plugins.installed_plugins.cache_clear()
        try:
            yield plugins.registry
        finally:
            mlsys_core.plugins.installed_plugins.cache_clear()
            sys.modules.pop(MODULE, None)
            del sys.modules["reading"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("failures")
    write_trace(Recorder().recording(), made / "trace.json")
    return made


def run(kind: Kind, folder: Path) -> int:
    words = ["reader"] if callable(kind.use) else kind.use
    paths = {"TRACE": str(folder / "trace.json"), "OUT": str(folder / "out")}
    return main.run([paths.get(word, word) for word in words])


cases = st.sampled_from(CASES).flatmap(lambda kind: st.tuples(st.just(kind), st.sampled_from(kind.moments)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases, fault=st.sampled_from(sorted(FAULTS)))
def test_one_line_names_the_part(
    case: tuple[Kind, str], fault: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (kind, moment), is_command = case, hasattr(case[0].spec, "app")
    if is_command and fault == "SystemExit" and moment in ("make", "use"):
        return  # a command may end its process
    with installed(Drawn(kind, moment, FAULTS[fault])):
        capfd.readouterr()
        if moment == "hook":
            assert main.run(["plugins", "list"]) == 0
            said = capfd.readouterr().err
            assert f"warning: plugin 'acme' ({OWNER}) is not loaded: " in said
        else:
            assert run(kind, folder) == 1
            shown = capfd.readouterr()
            said = shown.err
            if kind.hook == "demo_steps":  # says it among the others' output, and goes on
                said = next(line for line in shown.out.replace("\n", " ").split("  ") if "failed:" in line)
            noun = kinds.noun(type(kind.spec))
            assert f"{noun} {kind.spec.name!r} of {OWNER}" in said
            assert "Traceback" not in shown.out + shown.err
        assert fault in said or (fault, moment) == ("ModuleNotFoundError", "import")
        assert said.count("\n") <= 1


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: f"{kind.hook} {kind.spec.name}")
def test_debug_shows_where(kind: Kind, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSYS_DEBUG", "1")
    config.settings.cache_clear()
    try:
        with installed(Drawn(kind, kind.moments[-1], FAULTS["KeyError"])), pytest.raises(PluginError) as info:
            run(kind, folder)
    finally:
        config.settings.cache_clear()
    assert isinstance(info.value.__cause__, KeyError)


PATHS = {
    "route": "/drawn",
    "middleware": "/drawn",
    "blocking route": "/drawn/blocking",
    "plain route": "/drawn/plain",
    "stream": "/drawn/stream",
}
PLACES = (*PATHS, "middleware made", "start", "end", "drain", "drain at once")
NAMED = f"server extension 'drawn' of {OWNER}"


@settings(max_examples=60, deadline=None)
@given(place=st.sampled_from(PLACES), fault=st.sampled_from(sorted({*FAULTS, "CancelledError", "KeyboardInterrupt"})))
def test_a_server_outlives_its_extension(place: str, fault: str) -> None:
    if fault in ("CancelledError", "KeyboardInterrupt") and place not in (*PATHS, "drain"):
        return
    if place == "stream" and fault in ("SystemExit", "KeyboardInterrupt", "CancelledError"):
        return  # raised in a task of the response's, where Python ends the event loop or forgets the task
    faults = {**FAULTS, "CancelledError": cancelled, "KeyboardInterrupt": raising(KeyboardInterrupt())}
    module = types.ModuleType(MODULE)
    module.__dict__.update(PLACE=place, FAULT=faults[fault])
    exec(EXTENSION, module.__dict__)
    registry = Registry()
    registry.add(kinds.ServerExtensionSpec(name="drawn", help="x", factory=f"{MODULE}:extend"), OWNER)
    log, ends = io.StringIO(), []

    @asynccontextmanager
    async def engine(app: object) -> AsyncIterator[None]:
        yield
        ends.append("engine")

    def server() -> BackgroundServer:
        return BackgroundServer(
            create_app(
                HttpConfig(),
                lifespan=engine,
                served=Served(system="acme", extensions=Extensions.of("acme", registry)),
                logger=make_logger("console", level="error", stream=log),
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, module)
        if place in ("middleware made", "start"):
            with pytest.raises(PluginError, match=NAMED), server():
                pass
            assert not log.getvalue()
            return
        with server() as running:
            if path := PATHS.get(place):
                check_request(running.url + path, place, fault)
            assert httpx.get(running.url + "/health/ready").status_code == 200
            assert httpx.get(running.url + PATHS["route"]).status_code in (200, 500)
    assert ends == ["engine"]
    access = ("[error    ] request  ", "source=uvicorn")  # the lines of any request that failed
    lines = [line for line in log.getvalue().splitlines() if not any(word in line for word in access)]
    assert len(lines) == 1 + (place in ("route", "middleware")), log.getvalue()
    assert NAMED in lines[0]
    assert fault in lines[0] or fault == "CancelledError"


def check_request(url: str, place: str, fault: str) -> None:
    if place == "stream":
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url)
        return
    answer = httpx.get(url)
    assert answer.status_code == 500
    said = answer.json()["error"]["message"]
    assert said == f"{NAMED} failed on this request; its operator finds the reason in the log under the request id"
