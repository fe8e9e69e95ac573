"""``mlsys bench``: run a benchmark suite that a plugin offers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlsys_core.cli.registered import Device
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec

app = typer.Typer()


@app.command()
def bench(
    suite: Annotated[str | None, typer.Argument(help="The suite; leave it out to list them.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer repeats, under three minutes.")] = False,
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads each contestant may use.")] = 2,
    output: Annotated[Path, typer.Option(help="Folder for the JSON and the page.")] = Path("benchmarks/results"),
) -> None:
    """Run a benchmark suite against its peers; without a suite, list them.

    Example: mlsys bench NAME --quick
    """
    from rich.console import Console
    from rich.table import Table

    from mlsys_core.bench import BenchContext, print_section, run_suite

    registry = installed_plugins().registry
    console = Console()
    if suite is None:
        suites = registry.all(BenchmarkSpec)
        if not suites:
            console.print("No installed plugin offers a suite yet; the core's own benchmarks run with: make bench")
            return
        table = Table("suite", "what it measures")
        for spec in suites:
            table.add_row(spec.name, spec.help)
        console.print(table)
        return
    spec = registry.get(BenchmarkSpec, suite)
    section = run_suite(spec, BenchContext(console, quick, device, threads), output)
    print_section(section, console)
    console.print(f"Written: {output / suite}.json and .html")
    if section.status == "failed":
        raise typer.Exit(1)
