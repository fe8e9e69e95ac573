"""``mlsys bench``: run a benchmark suite that a plugin offers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mlsys_core.cli.options import Device
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec

app = typer.Typer()

RESULTS = Path("report")  # mlsys_core.bench.RESULTS, which imports more than a command's help should


@app.command()
def bench(
    suite: Annotated[str | None, typer.Argument(help="The suite; leave it out to list them.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Options of the suite, by name.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer repeats and smaller sizes, under three minutes.")] = False,
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each case.")] = 2,
    out: Annotated[
        Path, typer.Option("--out", "--output", "-o", metavar="DIR", help="Folder for JSON, page and figures.")
    ] = RESULTS,
) -> None:
    """Run a benchmark suite against its peers; without a suite, list them.

    Example: mlsys bench NAME --quick
    """
    from rich.console import Console
    from rich.table import Table

    from mlsys_core.bench import BenchContext, print_section, read_options, run_suite

    if suite is None:
        console = Console()
        suites = installed_plugins().registry.all(BenchmarkSpec)
        if not suites:
            console.print("No installed plugin offers a suite; in a checkout of mlsys: pip install -e benchmarks")
            return
        table = Table("suite", "what it measures")
        for spec in suites:
            table.add_row(spec.name, spec.help)
        console.print(table)
        return
    spec, context = find_suite(suite), BenchContext(Console(), quick, device, threads, out)
    given = read_options(spec, options or ())
    with leaving_on_signals():
        section = run_suite(spec, context, **given)
    print_section(section, context.console)
    where = f"Written: {out / suite}.json and .html"
    context.console.print(where, soft_wrap=True, highlight=False, markup=False)
    if section.status == "failed":
        raise typer.Exit(1)


def find_suite(name: str) -> BenchmarkSpec:
    """Return a registered suite.

    Raises:
        InvalidInputError: there is none of this name; the message says where mlsys's own suites are.
    """
    try:
        return installed_plugins().registry.get(BenchmarkSpec, name)
    except PluginError as error:
        hint = "mlsys's own suites are in mlsys-bench; in a checkout of mlsys: pip install -e benchmarks"
        raise InvalidInputError(f"{error}. {hint}") from error


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Have the first SIGTERM or Ctrl-C leave the block, so that a suite ends the servers that it has started.

    Further ones change nothing: they would interrupt just that, and ``timeout`` sends two.
    """

    def leave(number: int, _: object) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)  # a process that a suite has forked: the block is not its own
        for each in before:
            signal.signal(each, lambda *_: None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
