"""`mlsys dvabatch bench` with options that mean nothing: one line, and the exit status of a usage error."""

from __future__ import annotations

import pytest
from mlsys_core.cli.main import run


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--part", "audio"], "give one of all, encoder, vision, stepping"),
        (["--lengths", "RTE,GLUE"], "--lengths 'GLUE': give some of CoLA"),
    ],
)
def test_options_are_refused_in_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert run(["dvabatch", "bench", *options]) == 2
    assert says in capsys.readouterr().err
