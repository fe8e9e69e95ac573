"""The page about the client's parameters is what the client and the server say today, and the server does so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import openai
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("openai_table", ROOT / "scripts" / "openai_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(script: ModuleType) -> None:
    written = script.PAGE.read_text(encoding="utf-8")
    if f"version {openai.__version__}." not in written:
        pytest.skip(f"another client, {openai.__version__}: python scripts/openai_table.py writes the page anew")
    assert written == script.page()


def test_no_parameter_is_ignored(script: ModuleType) -> None:
    """Each body forbids what it does not know, and refuses what it only knows by name."""
    for _, create, body in script.ENDPOINTS:
        assert body.model_config["extra"] == "forbid"
        for row in script.rows(create, body):
            name, verdict = re.fullmatch(r"\| `(\w+)` \| (.*) \|", row).groups()
            assert verdict.startswith(("honoured", "taken", "refused"))
            if verdict.startswith("refused"):
                with pytest.raises(ValueError, match=name):
                    body.model_validate({name: "something"})


def test_resources_that_are_not_served_are_named(script: ModuleType) -> None:
    assert {"audio", "images", "files", "batches", "fine_tuning", "moderations"} <= set(script.resources())
    assert script._SERVED.keys() <= set(script.resources())
