"""Interface between ``mlsys demo`` and its steps: a step's context, and the runner of all subsystems' steps.

A subsystem registers a step with ``mlsys_register_demo_steps``; its ``run`` takes a :class:`DemoContext`, shows its
work on the console as it goes, and returns a :class:`mlsys_core.report.Section` for the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlsys_core.config import settings
from mlsys_core.device import device_kind
from mlsys_core.errors import MlsysError
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import DemoStepSpec
from mlsys_core.report import Section

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class DemoContext:
    """Inputs and settings of a demo step."""

    console: Console  # prints to the user
    work_dir: Path  # scratch space, removed after the demo
    num_threads: int  # number of cores the step may keep busy
    output_dir: Path  # the report's folder: pictures written here stay
    device: str = "cpu"  # the registered name of where to compute, for get_device

    @contextmanager
    def progress(self, description: str) -> Iterator[Callable[[float, float | None], None]]:
        """Show a progress bar; yield ``update(completed, total)``. ``total`` may stay None: a spinner.

        Example::

            with context.progress("loading weights") as update:
                load_model(path, progress=update)
        """
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(description, total=None)
            yield lambda completed, total: progress.update(task, completed=completed, total=total)


def run_steps(steps: Sequence[DemoStepSpec], context: DemoContext) -> list[Section]:
    """Run ``steps`` in order; a failing step becomes a failed section and the others still run."""
    sections = []
    for position, step in enumerate(sorted(steps, key=lambda step: (step.order, step.name)), 1):
        context.console.rule(f"[bold]{position}/{len(steps)}  {step.help}", align="left")
        started = time.perf_counter()
        section = _run_step(step, context)
        elapsed_s = time.perf_counter() - started
        context.console.print(f"[dim]{step.name}: {section.status} in {elapsed_s:.1f} s[/dim]\n")
        sections.append(replace(section, data={**section.data, "step": step.name, "elapsed_s": round(elapsed_s, 2)}))
    return sections


def _run_step(step: DemoStepSpec, context: DemoContext) -> Section:
    from rich.markup import escape

    kind = device_kind(context.device).name
    if kind not in step.devices and "*" not in step.devices:
        said = f"This step computes on {' and '.join(step.devices)}, not on {kind}."
        context.console.print(said)
        return Section(step.help, [said], status="skipped")
    try:
        section = installed_plugins().registry.part(step)(context)
    except MlsysError as error:  # the other steps still run
        context.console.print(f"[red]{step.name} failed:[/red] {escape(str(error))}")
        if settings().debug:
            raise
        return Section(step.help, [f"This step failed: {error}"], status="failed")
    if not isinstance(section, Section):
        return Section(step.help, [f"{step.run} returned {type(section).__name__}, not a Section"], status="failed")
    return section
