"""Every Python snippet of the README and the docs runs as it stands on its page; on some pages shell commands too."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from mlsys_core.plugins import hookspecs

from tests.docs.blocks import ROOT, blocks_of, pages
from tests.docs.run_page import ALL_RUN, on_free_ports
from tests.warm import Warm

THAT_RUN = [
    page
    for page in pages()
    if page.parent.name in ALL_RUN
    or any(block.language == "python" for block in blocks_of(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", THAT_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path, warm: Warm, mlsys: Path) -> None:
    running = warm.start(str(page), str(tmp_path), str(mlsys))
    try:
        assert running.stdout.read() is not None
        assert running.wait() == 0
    finally:
        with suppress(ProcessLookupError):  # a page that was cut off has not ended its servers
            os.killpg(running.pid, signal.SIGKILL)
        running.stdout.close()


def test_hidden_blocks_are_found_and_ports_are_free() -> None:
    page = "<!-- python\nx = 1\n-->\nThen:\n```python\ny = 'http://127.0.0.1:8000/v1'\n```\n"
    hidden, shown = blocks_of(page)
    assert (hidden.is_hidden, hidden.text, hidden.line) == (True, "x = 1\n", 2)
    assert (shown.is_hidden, shown.line) == (False, 6)
    assert ":8000" not in on_free_ports(page)


def test_the_plugin_tutorial_has_every_kind() -> None:
    page = (ROOT / "docs" / "tutorials" / "plugins.md").read_text(encoding="utf-8")
    hooks = {name for name in vars(hookspecs) if name.startswith("mlsys_register_")}
    registered = next(block.text for block in blocks_of(page) if (block.title or "").endswith("_plugin.py"))
    assert set(re.findall(r"def (mlsys_register_\w+)", registered)) == hooks
    modules = set(re.findall(r"mlsys_demo\.(\w+):", registered))
    assert {f"demo/src/mlsys_demo/{module}.py" for module in modules} <= {block.title for block in blocks_of(page)}
