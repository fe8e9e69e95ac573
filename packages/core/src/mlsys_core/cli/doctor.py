"""``mlsys doctor``: abilities of this machine and installation, missing parts, and the commands that add them.

:mod:`mlsys_core.device.capabilities` collects facts, :mod:`mlsys_core.device.checks` judges them; this shows them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mlsys_core.device.capabilities import CapabilityReport
    from mlsys_core.device.checks import Check
    from mlsys_core.plugins import PluginRow

app = typer.Typer()

MARKS = {"ok": "[green]ok[/]", "info": "[dim]info[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}
PLUGIN_FIELDS = ("name", "distribution", "version", "status", "error", "hint", "load_time_s")


@app.command()
def doctor(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout, nothing else.")
    ] = False,
) -> None:
    """Show what this machine and installation can do, and what is missing.

    Each line is ok, info, missing (optional; the command that adds it follows below) or broken (mlsys cannot work).
    The exit code is 1 if anything is broken, else 0.

    Example: mlsys doctor --json | python -m json.tool
    """
    from mlsys_core.device.capabilities import probe
    from mlsys_core.device.checks import is_broken, run_checks

    report = probe(isolate_torch=True)
    rows, failure = _plugin_rows()
    checks = (*run_checks(report), *plugin_checks(rows, failure))
    if json_output:
        typer.echo(json.dumps(as_json(report, checks, rows), indent=2))
    else:
        from rich.console import Console

        render(checks, Console())
    if is_broken(checks):
        raise typer.Exit(1)


def _plugin_rows() -> tuple[Sequence[PluginRow], str | None]:
    """Return the plugins of this process and, if they cannot be listed, the reason."""
    from mlsys_core.plugins import installed_plugins

    try:
        return installed_plugins().rows, None
    except Exception as error:  # noqa: BLE001 - in strict mode, whatever a plugin raised; it becomes a row
        return (), f"{type(error).__name__}: {error}"


def plugin_checks(rows: Sequence[PluginRow], failure: str | None = None) -> tuple[Check, ...]:
    """Judge plugins: a built-in one that does not load is broken, a third party's costs only itself.

    Args:
        rows: as the plugin loader reports them.
        failure: why they could not be listed, if so.
    """
    from mlsys_core.device.capabilities import BUILT_IN
    from mlsys_core.device.checks import Check, Status

    checks = []
    for row in rows:
        value = f"{row.distribution} {row.version}"
        if row.status == "loaded":
            note = f"; {row.hint}" if row.hint else ""
            checks.append(Check("Plugins", row.name, f"{value}, loaded in {row.load_time_s * 1e3:.0f} ms{note}", "ok"))
        elif row.status == "broken":
            status: Status = "broken" if row.distribution in BUILT_IN else "missing"
            checks.append(Check("Plugins", row.name, f"{value}, not loaded: {row.error}", status, row.hint))
        else:
            reason = f": {row.hint}" if row.hint else ""
            checks.append(Check("Plugins", row.name, f"{value}, {row.status}{reason}", "info"))
    if failure is not None:
        fix = "unset MLSYS_PLUGINS MLSYS_PLUGINS_STRICT; mlsys plugins list"
        checks.append(Check("Plugins", "loading", failure, "broken", fix))
    return tuple(checks)


def as_json(report: CapabilityReport, checks: Sequence[Check], rows: Sequence[PluginRow]) -> dict[str, Any]:
    """Return all results as JSON data: ``status``, ``checks`` (rows shown), ``report`` (facts), ``plugins``."""
    from mlsys_core.device.checks import is_broken

    return {
        "status": "broken" if is_broken(checks) else "ok",
        "checks": [asdict(check) for check in checks],
        "report": asdict(report),
        "plugins": [{field: getattr(row, field) for field in PLUGIN_FIELDS} for row in rows],
    }


def render(checks: Sequence[Check], console: Console) -> None:
    """Print ``checks`` as one table in sections, then the repair commands, each on its own line for copying."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = None
    for check in checks:
        if check.section != section:
            if section is not None:
                table.add_row()
            table.add_row(f"[bold]{escape(check.section)}[/]")
            section = check.section
        table.add_row(f"  {escape(check.name)}", MARKS[check.status], escape(check.value))
    console.print(table)

    for status, title in (("broken", "Broken, mend with:"), ("missing", "Optional, add with:")):
        fixes = dict.fromkeys(check.fix for check in checks if check.status == status and check.fix)
        if fixes:
            console.print(f"\n[bold]{title}[/]")
            for fix in fixes:
                console.print(f"  {fix}", markup=False, highlight=False, soft_wrap=True)
    num_broken = sum(check.status == "broken" for check in checks)
    verdict = (
        f"[red]{num_broken} broken: mlsys cannot work like this.[/]" if num_broken else "[green]mlsys can work here.[/]"
    )
    console.print(f"\n{verdict}")
