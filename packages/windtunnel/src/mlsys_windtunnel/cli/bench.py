"""``mlsys windtunnel bench``: the experiments of the dissertation's section 5.4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.bench import RESULTS, Out
from mlsys_core.cli.registered import CpuDevice
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_windtunnel.experiments.plan import Row, Setting
    from mlsys_windtunnel.experiments.run import Journal
    from rich.console import Console

QUICK_ROWS, QUICK_TREES, QUICK_EPOCHS = 8_000, 20, 3
QUICK_TABLES = ("5.4", "5.5", "outside", "ratings")


def bench(
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help="5.3, 5.4, 5.5, 5.6, nearby, outside, ratings; all if none."),
    ] = None,
    datasets: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="NAME", help="Only this data set; may be given more than once."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Only rows of this model; may be given more than once.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="PRE", help="Only rows with these columns: pre1 to pre5; more than once."),
    ] = None,
    pipes: Annotated[
        list[str] | None,
        typer.Option("--pipe", metavar="PIPE", help="Only translations of these models: pipe1, pipe2, pipe3."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="A few minutes: 8,000 rows, 20 trees, 3 epochs, 2 seeds.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...; the first chooses between candidates.")] = 5,
    rows: Annotated[int | None, typer.Option(min=100, help="Training rows of flights-3m; all if not given.")] = None,
    valid_rows: Annotated[int | None, typer.Option(min=100, help="Validation rows of flights-3m.")] = 60_000,
    test_rows: Annotated[int | None, typer.Option(min=100, help="Test rows of flights-3m; all if not given.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Of every network.")] = 7,
    trees: Annotated[int, typer.Option(min=1, help="Of LightGBM within the sources; the paper has 100.")] = 100,
    threads: Annotated[int, typer.Option(min=1, help="Of each fit.")] = 1,
    device: CpuDevice = "cpu",
    output: Out = RESULTS,
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the files.")] = "windtunnel-tables",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name the cells that would run first, run none.")] = False,
) -> None:
    """Run the experiments of the dissertation's section 5.4: tables 5.3 to 5.6, nearby, outside, ratings.

    Each finished fit is a line of OUTPUT/NAME.jsonl: the same command goes on where it was stopped. The report of all
    finished ones is OUTPUT/NAME.html and NAME.json. XGBoost and CatBoost are run where they are installed.

    Example: mlsys windtunnel bench --quick -o /tmp/tables

    Example: mlsys windtunnel bench 5.4 --data flights-3m --rows 300000 --seeds 2
    """
    from mlsys_core.bench import BenchContext, print_section, write_results
    from mlsys_windtunnel.experiments.data import Sizes
    from mlsys_windtunnel.experiments.plan import TABLES, Setting, next_cells, rows_of
    from mlsys_windtunnel.experiments.run import Journal, counter, missing_packages
    from mlsys_windtunnel.experiments.tables import report
    from rich.console import Console

    console = Console()
    chosen = tables or list(QUICK_TABLES if quick else TABLES)
    setting = Setting(Sizes(rows, valid_rows, test_rows), epochs, trees)
    if quick:
        setting = Setting(Sizes(QUICK_ROWS, QUICK_ROWS, QUICK_ROWS), QUICK_EPOCHS, QUICK_TREES, is_quick=True)
        seeds, name = min(seeds, 2), f"{name}-quick"
    choices = {"--data": (datasets, "dataset"), "--only": (only, "model"), "--columns": (columns, "pre")}
    choices["--pipe"] = (pipes, "pipe")
    wanted = [row for table in chosen for row in rows_of(table, datasets or ())]
    for option, (given, name_of) in choices.items():
        known = {getattr(row, name_of) for table in TABLES for row in rows_of(table)} - {"-"}
        for unknown in set(given or ()) - known:
            raise InvalidInputError(f"{option} {unknown}: there is none; there are {', '.join(sorted(known))}")
        wanted = [row for row in wanted if not given or getattr(row, name_of) in (*given, "-")]
    if not wanted:
        options = ", ".join(option for option, (given, _) in choices.items() if given)
        raise InvalidInputError(f"{', '.join(chosen)}: no row is left to run with {options}")
    journal = Journal(output / f"{name}.jsonl", setting)
    absent = missing_packages(wanted)
    cells = next_cells(
        [row for row in wanted if row.model not in absent], range(seeds), journal.finished, counter(setting)
    )
    if dry_run:
        for cell in cells:
            console.print(cell.key, highlight=False)
        return
    journal.begin()
    try:
        _run(wanted, range(seeds), journal, setting, threads, console)
    finally:
        section = report(chosen, datasets or (), range(seeds), journal.finished, setting, absent=absent)
        context = BenchContext(console, is_quick=quick, device=device, num_threads=threads, output_dir=output)
        written = write_results(name, section, context)
    print_section(section, console)
    console.print(f"written: {journal.path}, {', '.join(map(str, written))}", highlight=False)


def _run(rows: list[Row], seeds: range, journal: Journal, setting: Setting, num_threads: int, console: Console) -> None:
    from mlsys_windtunnel.experiments.run import run_cells

    total = len(set(rows)) * len(seeds)
    with console.status("starting") as status:
        results = run_cells(
            rows,
            seeds,
            journal,
            setting,
            num_threads=num_threads,
            on_cell=lambda cell, left: status.update(f"{cell.key} ({left} known to follow)"),
        )
        for result in results:
            console.print(
                f"{len(journal.finished)} done of about {total}: {result.cell} valid {result.valid:.4f}, "
                f"test {result.test:.4f}, {result.seconds:.0f} s",
                highlight=False,
            )
