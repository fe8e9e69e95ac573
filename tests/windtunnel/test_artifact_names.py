"""Names in files are their own: each stands for something, and no class path or private attribute is written."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import GRAPH_FILE, save
from mlsys_windtunnel.export.names import types

from tests.golden.make import pipelines


def test_every_type_stands_for_something():
    for name, path in types().items():
        module, _, attribute = path.partition(":")
        assert hasattr(importlib.import_module(module), attribute), name
    assert len(set(types().values())) == len(types())


def test_no_path_and_no_private_attribute_is_written(tmp_path: Path):
    for name, source in pipelines().items():
        text = (save(translate(source), tmp_path / name) / GRAPH_FILE).read_text()
        assert "mlsys_windtunnel." not in text
        assert not re.search(r'"_\w+":', text)
        assert not re.search(r'"name": "[^"]*\._', text)
