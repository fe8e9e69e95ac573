"""Races of several nets, each in a process of its own and kept when it is done, so that a run that was cut goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import MlsysError

from mlsys_bench.harness.child import run_in_child
from mlsys_bench.harness.machine import LoadMeter

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

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
