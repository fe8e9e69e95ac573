"""The reference's pages are written from the code, and nothing in them is left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import CommandSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("docs_pages", ROOT / "scripts" / "docs_pages.py")
assert SPEC is not None
assert SPEC.loader is not None
docs_pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_pages)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    written: dict[str, str] = docs_pages.written_pages(installed_plugins())
    return written


def test_every_command_has_a_page(pages: dict[str, str]) -> None:
    registered = {spec.name for spec in installed_plugins().registry.all(CommandSpec)}
    names = {name for name in registered if " " not in name}
    assert {name for name in pages if "/cli/" in name} == {f"reference/cli/{name}.md" for name in names}
    assert all(f"cli/{name}.md" in pages["reference/commands.md"] for name in names)
    assert "| `--tensor-parallel` | `INT` |" in pages["reference/cli/orca.md"]
    assert {"## mlsys orca serve", "## mlsys orca quantize"} <= set(pages["reference/cli/orca.md"].splitlines())


def test_settings_errors_and_metrics_are_there(pages: dict[str, str]) -> None:
    assert {"MLSYS_PLUGINS", "MLSYS_CACHE_DIR", "MLSYS_KERNEL_LEVEL", "CXX"} <= set(
        pages["reference/settings.md"].split("`")
    )
    assert "| `InvalidInputError` | 2 |" in pages["reference/errors.md"]
    for metric in ("mlsys_http_requests", "mlsys_orca_num_requests_running", "mlsys_batchmaker_cells"):
        assert f"| `{metric}` |" in pages["reference/metrics.md"]


def test_every_decision_is_listed(pages: dict[str, str]) -> None:
    for path in (ROOT / "docs" / "adr").glob("*.md"):
        assert f"(adr/{path.name})" in pages["decisions.md"]


def test_metrics_are_read_from_calls_with_and_without_a_prefix() -> None:
    source = '_PREFIX = "mlsys_x_"\nself._gauge("load", "Of it.", 3)\nCounter("mlsys_y", "All.")\nother("a", "b")\n'
    assert set(docs_pages.metrics_of(source)) == {("mlsys_x_load", "gauge", "Of it."), ("mlsys_y", "counter", "All.")}


def test_tables_are_not_broken_by_what_stands_in_them() -> None:
    assert docs_pages.cell("a | b\n*c* <d>") == r"a \| b \*c\* \<d\>"
