"""docs/tutorials/plugins.md: its example of each kind, loaded as a plugin and used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlsys_core.config import read_settings
from mlsys_core.device import get_device
from mlsys_core.lazy import resolve
from mlsys_core.memory import find_pool
from mlsys_core.plugins import Registry, load_plugins, specs
from mlsys_core.plugins.loading import LoadContext, find_loader, find_module_compiler
from mlsys_core.profiling import Recorder

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "plugins.md"
TITLED = re.compile(r'^```\w+ title="demo/src/([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
FILES = TITLED.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Return what the page's package registers, beside the core's."""
    folder = tmp_path_factory.mktemp("site")
    for path, text in FILES:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    entry = SimpleNamespace(
        name="demo", value="mlsys_demo", dist=None, load=lambda: importlib.import_module("mlsys_demo._plugin")
    )
    loaded = load_plugins(read_settings({"MLSYS_PLUGINS_STRICT": "1"}), entry_points=[entry])
    yield loaded.registry
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlsys_demo"]:
        del sys.modules[name]


def test_there_is_one_of_every_kind(registry: Registry) -> None:
    kinds = {kind for kind in vars(specs).values() if isinstance(kind, type) and issubclass(kind, specs.Spec)}
    assert {type(spec) for spec in registry.owned_by("mlsys_demo")} == kinds - {specs.Spec}


def test_the_apps_are_apps(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    typer.main.get_command(resolve(registry.get(specs.CommandSpec, "greet").app)).main([], standalone_mode=False)
    assert capsys.readouterr().out == "hello\n"
    command: Any = typer.main.get_command(resolve(registry.get(specs.EngineSpec, "demo").app))
    assert {"model", "port", "config"} <= {parameter.name for parameter in command.params}


def test_device_pool_and_compiler_are_made(registry: Registry) -> None:
    device, ran = get_device("quiet", registry=registry), []
    with device.stream() as stream:
        stream.submit(ran.append, 1)
    assert ran == [1]
    pool = find_pool("counted", "blocks", registry)(8)
    pool.allocate(3)
    assert pool.num_allocated == 3
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    assert torch.equal(find_module_compiler("frozen", registry)(layer, (x,))(x), layer(x))


def test_the_extension_adds_a_route_and_a_panel(registry: Registry) -> None:
    from fastapi.testclient import TestClient
    from mlsys_serving.extensions import Extensions, Served
    from mlsys_serving.http import HttpConfig, create_app

    app = create_app(HttpConfig(), served=Served(system="demo", extensions=Extensions.of("demo", registry)))
    with TestClient(app) as client:
        assert client.get("/greeting").json() == {"greeting": "hello"}


def test_the_kernel_is_one(registry: Registry) -> None:
    assert registry.load(specs.KernelSpec, "answer").load().answer() == 42


def test_exporter_benchmark_and_step_run(registry: Registry, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.complete("step", 0, 5)
    registry.load(specs.ExporterSpec, "csv")(recorder.recording(), tmp_path / "run.csv")
    assert (tmp_path / "run.csv").read_text() == "step,5\n"
    assert registry.load(specs.BenchmarkSpec, "counting")(SimpleNamespace(device="quiet")).data == {"count": 3}
    assert registry.load(specs.DemoStepSpec, "greeting")(None).title == "Greeting"


def test_loader_policy_and_converter_are_found(registry: Registry, tmp_path: Path) -> None:
    spec = find_loader(Path("model.note"), "orca", registry)
    assert spec is not None
    (tmp_path / "model.note").write_text(f"{tmp_path}/nowhere.gguf")
    with pytest.raises(Exception, match=r"nowhere"):
        resolve(spec.factory)(tmp_path / "model.note", LoadContext())
    from mlsys_orca.scheduling.block_tables import BlockTables

    tables = BlockTables(num_blocks=8)
    scheduler = registry.load(specs.PolicySpec, "patient")(tables, max_batch_size=8, max_model_len=64)
    assert scheduler.pool.max_batch_size == 2
    half = registry.load(specs.ConverterSpec, "half")(None)
    assert half(torch.ones(2)).tolist() == [0.5, 0.5]
