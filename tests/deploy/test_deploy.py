"""The dashboard asks for metrics that servers have; Compose, Prometheus and Grafana name each other's parts."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlsys_serving.http.record import HttpMetrics
from prometheus_client import CollectorRegistry, Metric

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "mlsys.json").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def series(families: Iterable[Metric]) -> Iterator[str]:
    """Yield the names of the series of metrics, as Prometheus stores them."""
    for family in families:
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        yield from (family.name + ending for ending in endings)


@pytest.fixture(scope="module")
def orca_families(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    from mlsys_orca.api.metrics import EngineMetrics
    from mlsys_orca.engine.engine import Engine, EngineConfig
    from mlsys_orca.engine.settings import Recoveries
    from mlsys_orca.loading.load import load_model

    spec = importlib.util.spec_from_file_location("orca_conftest", ROOT / "tests" / "orca" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    path = conftest.write_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", conftest.tiny_metadata(), conftest.tiny_tensors()
    )
    engine = Engine(load_model(path, dtype="fp32"), EngineConfig(policy="chunked"), available_nbytes=2**30)
    with pytest.MonkeyPatch.context() as patch:  # a supervised engine has them too
        patch.setattr(type(engine), "recoveries", property(lambda _: Recoveries()))
        return list(EngineMetrics(engine).collect())


def test_every_series_of_the_dashboard_is_some_servers(orca_families: list[Metric]) -> None:
    from mlsys_batchmaker.serve.metrics import EngineMetrics as CellMetrics
    from mlsys_dvabatch.serve.models import StageMetrics

    registry = CollectorRegistry()
    HttpMetrics(registry)
    http = registry.collect()
    known = {*series(http), *series(orca_families), *series(CellMetrics(list).collect())}
    known |= set(series(StageMetrics([]).collect()))
    asked = {name for text in expressions() for name in re.findall(r"\bmlsys_\w+", text)}
    assert asked <= known
    for prefix in ("mlsys_http_", "mlsys_orca_", "mlsys_batchmaker_", "mlsys_dvabatch_"):
        assert any(name.startswith(prefix) for name in asked)


def test_panels_stand_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def test_prometheus_scrapes_the_servers_of_compose() -> None:
    servers = {name for name, service in COMPOSE["services"].items() if service["image"] == "mlsys"}
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert {target.partition(":")[0] for target in targets} == servers == {"orca", "batchmaker", "dvabatch"}
    assert {target.partition(":")[2] for target in targets} == {"8000"}


def test_what_compose_mounts_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel} == {source["uid"]}


@pytest.mark.parametrize("name", ["orca", "batchmaker", "dvabatch"])
def test_the_servers_commands_have_these_options(name: str) -> None:
    import typer
    from mlsys_core.cli.main import build_app
    from mlsys_core.plugins import installed_plugins

    command: Any = typer.main.get_command(build_app(installed_plugins()))
    group, verb, *arguments = COMPOSE["services"][name]["command"]
    _, found, _ = command.resolve_command(command.make_context("mlsys", [group], resilient_parsing=True), [group])
    options = {option for parameter in found.commands[verb].params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_the_image_is_made_as_the_jail_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert "\nUSER 10001\n" in last  # not root; a number, as Kubernetes can check
    assert "HEALTHCHECK" in last
    assert "g++" not in text
    assert "COPY dist/*.whl" in text
    assert (ROOT / ".dockerignore").read_text().split() == ["*", "!dist/*.whl"]
