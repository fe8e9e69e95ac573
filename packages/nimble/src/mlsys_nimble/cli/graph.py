"""``--graph FILE`` of Nimble's commands, where ``--svg`` is its old name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli.graph import HELP, check_graph_file

GraphFile = Annotated[
    Path | None,
    typer.Option("--graph", "--svg", metavar="FILE", callback=check_graph_file, help=f"{HELP} --svg is its old name."),
]
