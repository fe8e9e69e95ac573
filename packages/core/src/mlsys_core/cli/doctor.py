"""``mlsys doctor``: abilities of this machine and installation, missing parts, and the commands that add them.

:mod:`mlsys_core.device.checks` and :mod:`mlsys_core.device.torch_probe` find; this adds plugins, and shows it all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mlsys_core.device.checks import BUILT_IN, Check, nvidia_driver, package_checks, system_checks, tool_checks
from mlsys_core.device.torch_probe import torch_checks

if TYPE_CHECKING:
    from rich.console import Console

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
    plugins, failure = _plugins()
    checks = [*_machine_checks(), *plugin_checks(plugins, failure)]
    is_broken = any(check.status == "broken" for check in checks)
    if json_output:
        rows = [{field: getattr(row, field) for field in PLUGIN_FIELDS} for row in plugins]
        found = {"status": "broken" if is_broken else "ok", "checks": [*map(asdict, checks)], "plugins": rows}
        typer.echo(json.dumps(found, indent=2))
    else:
        from rich.console import Console

        render(checks, Console())
    if is_broken:
        raise typer.Exit(1)


def _machine_checks() -> Iterator[Check]:
    yield from system_checks()
    of_torch = torch_checks()
    yield from (check for check in of_torch if check.section == "Torch")
    driver = nvidia_driver()
    if driver is not None:
        yield Check("GPU", "NVIDIA driver", driver, "ok")
    yield from (check for check in of_torch if check.section == "GPU")
    yield from tool_checks(has_gpu=driver is not None or any(check.name.startswith("cuda:") for check in of_torch))
    yield from package_checks()


def _plugins() -> tuple[Sequence[PluginRow], str | None]:
    """Return the plugins of this process and, if they cannot be listed, the reason."""
    from mlsys_core.plugins import installed_plugins

    try:
        return installed_plugins().rows, None
    except Exception as error:  # noqa: BLE001 - in strict mode, whatever a plugin raised; it becomes a row
        return (), f"{type(error).__name__}: {error}"


def plugin_checks(rows: Sequence[PluginRow], failure: str | None = None) -> Iterator[Check]:
    """Judge plugins: a built-in one that does not load is broken, a third party's costs only itself.

    Args:
        rows: as the plugin loader reports them.
        failure: why they could not be listed, if so.
    """
    for row in rows:
        value = f"{row.distribution} {row.version}"
        if row.status == "loaded":
            note = f"; {row.hint}" if row.hint else ""
            yield Check("Plugins", row.name, f"{value}, loaded in {row.load_time_s * 1e3:.0f} ms{note}", "ok")
        elif row.status == "broken":
            fault = f"{value}, not loaded: {row.error}"
            yield Check("Plugins", row.name, fault, "broken" if row.distribution in BUILT_IN else "missing", row.hint)
        else:
            reason = f": {row.hint}" if row.hint else ""
            yield Check("Plugins", row.name, f"{value}, {row.status}{reason}", "info")
    if failure is not None:
        fix = "unset MLSYS_PLUGINS MLSYS_PLUGINS_STRICT; mlsys plugins list"
        yield Check("Plugins", "loading", failure, "broken", fix)


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
