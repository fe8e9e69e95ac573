"""``--graph`` of every command that explains a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_core.cli.main import run

from tests.core.cli.test_devices import COMMANDS, options_of

EXPLAINING = {"batchmaker explain", "dvabatch profile", "nimble explain", "nimble streams", "windtunnel inspect"}


def test_commands_that_explain_a_graph_write_it():
    assert {name for name, command in COMMANDS.items() if "--graph" in options_of(command)} == EXPLAINING


@pytest.mark.parametrize("name", sorted(EXPLAINING))
@pytest.mark.parametrize(("file", "says"), [("graph.gif", "end the name in .graphml"), ("none/graph.dot", "no folder")])
def test_a_file_that_cannot_be_written_is_refused_first(
    name: str, file: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run([*name.split(), "there-is-no-such-thing", "--graph", str(tmp_path / file)]) == 2
    assert says in capsys.readouterr().err
