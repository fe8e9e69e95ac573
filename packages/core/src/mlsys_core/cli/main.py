"""The entry point of ``mlsys``: plugins, the lazy root group, and one line per error.

Exit codes: 0 done, 1 failed, 2 wrong arguments or input, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import mlsys_core
from mlsys_core.cli.lazy_group import lazy_group
from mlsys_core.collector import collect_seldom
from mlsys_core.config import apply_process_defaults, settings
from mlsys_core.errors import MlsysError
from mlsys_core.exits import end_process
from mlsys_core.plugins import LoadedPlugins, installed_plugins

HELP = """Make machine-learning workloads run efficiently.

Begin with 'mlsys doctor' (what can this machine do?) and 'mlsys demo' (see it run).
Each command explains itself: 'mlsys COMMAND --help'.
"""


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"mlsys {mlsys_core.__version__}")
        raise typer.Exit()


def build_app(plugins: LoadedPlugins) -> typer.Typer:
    """Return the root app over the registrations of ``plugins``."""
    app = typer.Typer(
        name="mlsys",
        cls=lazy_group(plugins.registry),
        help=HELP,
        rich_markup_mode=None,  # rich would take a third of the time of `mlsys --help`; commands' own help has it
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True, help=HELP)
    def root(
        ctx: typer.Context,
        version: Annotated[  # noqa: ARG001
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())

    return app


def _complain(message: str) -> None:
    typer.echo(f"mlsys: {' '.join(message.split())}", err=True)


def _usage_message(error: Exception) -> str:
    """Return one line for a usage error: the fault, then the command that shows help."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if message and context is not None:
        stop = "" if message.endswith(("?", "!")) else "."
        message = f"{message.rstrip('.')}{stop} Try: {context.command_path} --help"
    return message


def main(args: Sequence[str] | None = None) -> None:
    """Run ``mlsys`` with ``args`` (the process's own by default) and exit."""
    apply_process_defaults(os.environ)
    collect_seldom()
    end_process(run(sys.argv[1:] if args is None else list(args)))


def run(args: list[str]) -> int:
    """Run ``mlsys`` with ``args``; return the exit code, and raise only defects."""
    try:
        plugins = installed_plugins()
        for row in plugins.broken:
            _complain(f"warning: plugin {row.name!r} ({row.distribution}) is not loaded: {row.error}. {row.hint}")
        command = typer.main.get_command(build_app(plugins))
        code = command.main(args, prog_name="mlsys", standalone_mode=False)
    except MlsysError as error:
        if settings().debug:
            raise
        _complain(f"error: {error}")
        return error.exit_code
    except typer.TyperException as error:
        message = _usage_message(error)
        if message:  # empty: the group has printed its help instead
            _complain(f"error: {message}")
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted")
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone: nothing is wrong
        sys.stderr.close()
        return 0
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
