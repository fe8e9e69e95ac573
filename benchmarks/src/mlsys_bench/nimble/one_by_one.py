"""Races of several nets, each in a process of its own and kept when it is done, so that a run that was cut goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import MlsysError

from mlsys_bench.harness.child import run_in_child
from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.harness.race import Outcome, Outcomes

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

    from mlsys_bench.nimble.nets import RaceSettings


def race_each(
    context: BenchContext, suite: str, function: str, settings: RaceSettings, **arguments: Any
) -> Iterator[tuple[str, dict[str, Any] | MlsysError]]:
    """Yield each net with its record (``load`` and ``found``), or with the error that ended its race.

    Each net that is done is a line of the journal ``SUITE.jsonl`` in the context's folder. A run that was cut goes on
    with the nets that the journal lacks; one whose race failed is tried again.

    Args:
        context: The suite's context.
        suite: The suite's name.
        function: ``module:function`` that races on one net.
        settings: The nets and the arguments that every race has.
        arguments: Further arguments of every race, ``budget_s`` among them.

    Raises:
        InvalidInputError: the journal is of another commit, number of threads or time; nothing has run.
    """
    from mlsys_core.environment import describe_environment

    from mlsys_bench.harness.journal import Journal

    setting = {"num_threads": context.num_threads, "budget_s": arguments["budget_s"]}
    setting["commit"] = describe_environment().get("commit")
    journal = Journal(context.output_dir / f"{suite}.jsonl", setting, key="net")
    with context.console.status("") as status:
        for number, name in enumerate(settings.nets, 1):
            if name not in journal.finished:
                step = f"{number} of {len(settings.nets)}: {name.rpartition(':')[2]}"
                if not context.console.is_terminal:
                    context.console.print(f"{step} ...")
                try:
                    with LoadMeter() as meter:
                        found = run_in_child(
                            function,
                            settings.arguments(name) | arguments,
                            python=settings.python,
                            env=settings.env,
                            say=lambda text, step=step: status.update(f"{step}: {text}"),  # type: ignore[misc]
                        )
                except MlsysError as error:
                    yield name, error
                    continue
                journal.add({"net": name, "load": str(meter.load), "found": found})
            yield name, journal.finished[name]


def race_with_accuracy(
    context: BenchContext,
    suite: str,
    function: str,
    settings: RaceSettings,
    *,
    budget_s: float,
    ours: str,
    report: Callable[[dict[str, Outcomes], dict[str, dict[str, Any]], int, dict[str, str]], Section],
) -> Section:
    """Race on each net and report: outcomes and accuracy by net and case. Results are written after each net.

    Args:
        context: As for :func:`race_each`.
        suite: As for :func:`race_each`.
        function: As for :func:`race_each`; what it finds has ``outcomes``, their fields by case, and ``accuracy``.
        settings: As for :func:`race_each`.
        budget_s: Seconds of turns for each net.
        ours: Case that is told to have failed where a whole race did.
        report: Makes the section of races, accuracy, number of threads and loads.
    """
    from mlsys_core.bench import write_results

    races: dict[str, Outcomes] = {}
    accuracy: dict[str, dict[str, Any]] = {}
    loads: dict[str, str] = {}
    for name, record in race_each(context, suite, function, settings, budget_s=budget_s):
        if isinstance(record, MlsysError):
            races[name], accuracy[name] = {ours: Outcome("does not run", str(record))}, {}
            continue
        found = record["found"]
        races[name] = {case: Outcome(**fields) for case, fields in found["outcomes"].items()}
        accuracy[name], loads[name] = found["accuracy"], record["load"]
        write_results(suite, report(races, accuracy, context.num_threads, loads), context)
    return report(races, accuracy, context.num_threads, loads)
