"""``--graph FILE``: write the graph that a command explains, the same option in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = "Write the graph: .graphml, .dot, or a picture (.svg, .png, .pdf)."


def check_graph_file(path: Path | None) -> Path | None:
    """Refuse a file that no graph can be written to, before any work is done."""
    from mlsys_core.graphs import check_format

    if path is not None:
        check_format(path)
    return path


GraphFile = Annotated[Path | None, typer.Option("--graph", metavar="FILE", callback=check_graph_file, help=HELP)]
