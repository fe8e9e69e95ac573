"""``mlsys SUBSYSTEM bench``: ``mlsys bench`` with the subsystem's suites."""

from __future__ import annotations

from functools import wraps
from typing import Any

import typer
from mlsys_core.cli.bench import bench

from mlsys_bench._plugin import SUITES


def _of(subsystem: str) -> typer.Typer:
    app = typer.Typer()

    @app.command(help=f"Run a suite of {subsystem} (its first if none is named), as mlsys bench does.")
    @wraps(bench)
    def forward(suite: str | None = None, options: list[str] | None = None, **others: Any) -> None:
        given = [each for each in (suite, *(options or ())) if each is not None]
        first = next(name for name in SUITES if name.startswith(subsystem))
        suite = first if not given or "=" in given[0] else given.pop(0)
        bench(suite if suite in SUITES else f"{subsystem}-{suite}", given, **others)

    return app


batchmaker, dvabatch, nimble, orca, windtunnel = map(_of, ("batchmaker", "dvabatch", "nimble", "orca", "windtunnel"))
