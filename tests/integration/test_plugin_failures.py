"""A third party's plugin that raises in any part, at any moment: one line names the part and its distribution.

Drawn are the kind of part, the moment (its hook is called, its module is imported, it is made, it is used) and the
exception. ``MLSYS_DEBUG=1`` shows where it came from.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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
from mlsys_serving.extensions import Extensions, Service
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


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def deep() -> None:
    deep()


def raising(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

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
