"""``mlsys demo``: every subsystem on real input, then one HTML report."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mlsys_core.cli.options import Device
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import DemoStepSpec
from mlsys_core.posix.machine import num_cores

app = typer.Typer()


@app.command()
def demo(
    only: Annotated[list[str] | None, typer.Option(help="Run just this step; repeat for several.")] = None,
    report: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report/demo.html"),
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Cores to use; 0 means all this process may use.")] = 0,
    list_steps: Annotated[bool, typer.Option("--list", help="Print the steps and stop.")] = False,
) -> None:
    """Run each subsystem on real input and write one HTML report.

    Example: mlsys demo --only orca --report /tmp/demo.html
    """
    from rich.console import Console

    from mlsys_core.demo import DemoContext, run_steps
    from mlsys_core.environment import describe_environment
    from mlsys_core.report import write

    steps = installed_plugins().registry.all(DemoStepSpec)
    known = {step.name: step for step in steps}
    for name in only or []:
        if name not in known:
            raise InvalidInputError(
                f"no demo step is called {name!r} (there are: {', '.join(sorted(known)) or 'none'})"
            )
    chosen = [known[name] for name in only] if only else steps
    console = Console()
    if list_steps:
        for step in sorted(steps, key=lambda step: (step.order, step.name)):
            console.print(f"{step.name:14} {step.help}")
        return
    if not chosen:
        raise InvalidInputError("no installed plugin offers a demo step; install one, e.g. pip install mlsys-orca")
    report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mlsys-demo-") as work_dir:
        context = DemoContext(console, Path(work_dir), threads or num_cores(), report.parent, device)
        sections = run_steps(chosen, context)
    path = write(report, "mlsys demo", sections, describe_environment())
    console.print(f"Report: [bold]{path}[/bold] (one self-contained page; open it in a browser)", soft_wrap=True)
    failed = [str(section.data["step"]) for section in sections if section.status == "failed"]
    if failed:
        console.print(f"[red]Failed steps: {', '.join(failed)}[/red]")
        raise typer.Exit(1)
