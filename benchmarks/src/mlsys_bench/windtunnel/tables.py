"""The suite ``windtunnel-tables``: the experiments of the dissertation's section 5.4, a fit a line of a journal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from typer import Exit

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

    from mlsys_bench.windtunnel.experiments.plan import Row

QUICK_ROWS, QUICK_TREES, QUICK_EPOCHS, QUICK_SEEDS = 8_000, 20, 3, 2
QUICK_TABLES = ("5.4", "5.5", "outside", "ratings")


def run(
    context: BenchContext,
    *,
    tables: tuple[str, ...] = (),
    data: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    pipe: tuple[str, ...] = (),
    seeds: int = 5,
    rows: int = 0,
    valid_rows: int = 60_000,
    test_rows: int = 0,
    epochs: int = 7,
    trees: int = 100,
    journal: str = "windtunnel-tables",
    dry_run: bool = False,
) -> Section:
    """Run what the journal lacks, and report all that it has; stopped by Ctrl-C, report what there is.

    Args:
        context: The suite's context.
        tables: Of :data:`~.experiments.plan.TABLES`; none: all, or :data:`QUICK_TABLES`.
        data: Only these data sets, if any are named.
        only: Only rows of these models, likewise.
        columns: Only rows with these columns, ``pre1`` to ``pre5``.
        pipe: Only translations of these models, ``pipe1`` to ``pipe3``.
        seeds: 0, 1, ...; the first chooses between candidates.
        rows: Training rows of flights-3m; 0: all.
        valid_rows: Its validation rows.
        test_rows: Its test rows; 0: all.
        epochs: Of every network.
        trees: Of LightGBM within the sources and DeepGBM; the paper has 100.
        journal: Name of the file of finished fits, ``JOURNAL.jsonl`` in the context's folder; of quick runs
            ``JOURNAL-quick.jsonl``.
        dry_run: Print the cells that would run first, and exit.

    Raises:
        InvalidInputError: a name is unknown, no row is left, or the journal is of another setting.
    """
    from mlsys_bench.windtunnel.experiments.data import Sizes
    from mlsys_bench.windtunnel.experiments.plan import TABLES, Setting, next_cells
    from mlsys_bench.windtunnel.experiments.run import counter, finished_of, missing_packages, open_journal, run_cells
    from mlsys_bench.windtunnel.experiments.tables import report

    console = context.console
    chosen = tables or (QUICK_TABLES if context.is_quick else TABLES)
    setting = Setting(Sizes(rows or None, valid_rows, test_rows or None), epochs, trees)
    if context.is_quick:
        setting = Setting(Sizes(QUICK_ROWS, QUICK_ROWS, QUICK_ROWS), QUICK_EPOCHS, QUICK_TREES, is_quick=True)
        seeds, journal = min(seeds, QUICK_SEEDS), f"{journal}-quick"
    wanted = wanted_rows(chosen, dataset=data, model=only, pre=columns, pipe=pipe)
    absent = missing_packages(wanted)
    finished = open_journal(context.output_dir / f"{journal}.jsonl", setting)
    if dry_run:
        present = [row for row in wanted if row.model not in absent]
        for cell in next_cells(present, range(seeds), finished_of(finished), counter(setting)):
            console.print(cell.key, highlight=False)
        raise Exit
    finished.begin()
    total = len(set(wanted)) * seeds
    with suppress(KeyboardInterrupt), console.status("starting") as status:
        for result in run_cells(
            wanted,
            range(seeds),
            finished,
            setting,
            num_threads=context.num_threads,
            on_cell=lambda cell, left: status.update(f"{cell.key} ({left} known to follow)"),
        ):
            console.print(
                f"{len(finished.finished)} done of about {total}: {result.cell} valid {result.valid:.4f}, "
                f"test {result.test:.4f}, {result.seconds:.0f} s",
                highlight=False,
            )
    return report(chosen, data, range(seeds), finished_of(finished), setting, absent=absent)


def wanted_rows(tables: Sequence[str], **choices: Sequence[str]) -> list[Row]:
    """Return the rows of some tables with the named values of ``dataset``, ``model``, ``pre`` and ``pipe``; none: all.

    Raises:
        InvalidInputError: a name is unknown, or no row is left.
    """
    from mlsys_bench.windtunnel.experiments.plan import TABLES, rows_of

    rows = [row for table in tables for row in rows_of(table, choices.get("dataset", ()))]
    for field, given in choices.items():
        known = {getattr(row, field) for table in TABLES for row in rows_of(table)} - {"-"}
        for unknown in set(given) - known:
            raise InvalidInputError(f"{field} {unknown}: there is none; there are {', '.join(sorted(known))}")
        rows = [row for row in rows if not given or getattr(row, field) in (*given, "-")]
    if not rows:
        raise InvalidInputError(f"{', '.join(tables)}: no row is left to run with {choices}")
    return rows
