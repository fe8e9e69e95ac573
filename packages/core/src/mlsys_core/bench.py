"""Interface between ``mlsys bench`` and its suites: the suite's context, its options and its result.

A plugin registers suites with ``mlsys_register_benchmarks``. A suite times its cases in turns in one run, compares
their outputs before their times, names peers that are not installed, and returns a section with its figures as data.
Keyword parameters of its function are its options: ``mlsys bench SUITE NAME=VALUE``.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlsys_core.device import device_kind
from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec
from mlsys_core.report import Figure, Section, Table, write

if TYPE_CHECKING:
    from rich.console import Console

RESULTS = Path("report")  # where results go unless a command's --out says otherwise; git does not track it


@dataclass(frozen=True, slots=True)
class BenchContext:
    """Inputs and settings of a benchmark suite."""

    console: Console
    is_quick: bool  # under three minutes, fewer repeats
    device: str  # the registered name of where to compute, for get_device
    num_threads: int  # threads each case may use
    output_dir: Path = RESULTS  # for what a suite writes beside its section, such as a journal


def run_suite(spec: BenchmarkSpec, context: BenchContext, *, name: str = "", **options: Any) -> Section:
    """Run one suite and write its results as :func:`write_results` does.

    Args:
        spec: The suite.
        context: Its context.
        name: Name of the files; empty: the suite's.
        options: Keyword arguments of the suite's function.

    Raises:
        InvalidInputError: it does not measure the context's kind of device.
        PluginError: the suite returned something other than a :class:`mlsys_core.report.Section`.
    """
    kind = device_kind(context.device).name
    if "*" not in spec.devices and kind not in spec.devices:
        hint = "leave out --device" if "cpu" in spec.devices else f"give --device {spec.devices[0]}"
        raise InvalidInputError(f"benchmark {spec.name!r} measures {' and '.join(spec.devices)}, not {kind}: {hint}")
    ends = (typer.Exit, typer.Abort)  # a suite may end its command
    section = installed_plugins().registry.part(spec, passing=ends)(context, **options)
    if not isinstance(section, Section):
        raise PluginError(f"benchmark {spec.name!r}: {spec.run} returned {type(section).__name__}, not a Section")
    write_results(name or spec.name, section, context)
    return section


def read_options(spec: BenchmarkSpec, texts: Sequence[str]) -> dict[str, Any]:
    """Return the options that ``NAME=VALUE`` texts give a suite; each has the type of the parameter's default.

    A tuple's values are separated by commas; a default of None takes text.

    Raises:
        InvalidInputError: the suite has no such option, or the value is not of its type.
    """
    parameters = list(inspect.signature(installed_plugins().registry.part(spec)).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in defaults:
            known = ", ".join(f"{key}={_as_text(default)}" for key, default in defaults.items())
            raise InvalidInputError(f"{text!r} is no option of {spec.name}, which has: {known or 'none'}")
        try:
            options[name] = _parse(value, defaults[name])
        except ValueError as error:
            raise InvalidInputError(f"{text!r}: write it like {name}={_as_text(defaults[name])}") from error
    return options


def _parse(text: str, default: object) -> object:
    if isinstance(default, tuple):
        kind = type(default[0]) if default else str
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return text if default is None else type(default)(text)  # type: ignore[call-arg]


def _as_text(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if default is None else str(default)


def write_results(name: str, section: Section, context: BenchContext) -> list[Path]:
    """Write ``NAME.json`` (results, environment, commit), ``NAME.html`` and each figure as an SVG file.

    Returns:
        The files, below the context's folder, which is made.
    """
    environment, output_dir = describe_environment(), context.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    record = {"suite": name, "device": context.device, "quick": context.is_quick, "environment": environment}
    text = json.dumps({**record, "results": dict(section.data)}, indent=1, allow_nan=False)
    figures = [item.svg for item in section.body if isinstance(item, Figure)]
    svgs = [
        output_dir / (f"{name}.svg" if number == 1 else f"{name}-{number}.svg") for number in range(1, len(figures) + 1)
    ]
    for path, svg in zip(svgs, figures, strict=True):
        path.write_text(svg)
    (output_dir / f"{name}.json").write_text(text + "\n")
    page = write(output_dir / f"{name}.html", f"mlsys bench {name}", [section], environment)
    return [output_dir / f"{name}.json", page, *svgs]


def split_columns(table: Table, width: int) -> list[Table]:
    """Split a table that is wider than ``width`` letters into several; each begins with the first column.

    A heading may be broken between words, never within one.

    Example:
        >>> wide = Table(["net", "time of eager, ms", "time of ours, ms"], [["mlp", "1.5", "1.0"]])
        >>> [list(part.columns) for part in split_columns(wide, 16)]
        [['net', 'time of eager, ms'], ['net', 'time of ours, ms']]
    """
    needed = [_column_width(table, number, width) for number in range(len(table.columns))]
    parts: list[list[int]] = [[0]]
    for number in range(1, len(needed)):
        taken = sum(needed[each] for each in parts[-1])
        if len(parts[-1]) > 1 and taken + needed[number] > width:
            parts.append([0])
        parts[-1].append(number)
    return [
        Table(
            [table.columns[number] for number in part],
            [[row[number] for number in part] for row in table.rows],
            table.caption if part is parts[0] else "",
        )
        for part in parts
    ]


def _column_width(table: Table, number: int, width: int) -> int:
    """Return the letters that a column needs with its margin; cells of many words are broken at half the width."""
    cells = max((len(row[number]) for row in table.rows), default=0)
    words = max(map(len, table.columns[number].split()), default=0)
    return max(words, min(cells, math.ceil(width / 2))) + 3


def print_section(section: Section, console: Console) -> None:
    """Print the texts and tables of ``section``, wide tables in parts; figures are for files."""
    from rich import box
    from rich.table import Table as RichTable

    for item in section.body:
        if isinstance(item, Table):
            for part in split_columns(item, console.width - 1):
                table = RichTable(title=part.caption or None, box=box.SIMPLE_HEAD)
                for number, heading in enumerate(part.columns):
                    least = _column_width(part, number, console.width - 1) - 3
                    is_narrow = all(len(row[number]) <= least for row in part.rows)
                    # its heading is broken first; rich would shrink the widest column, below what its cells need
                    most = least if is_narrow else None
                    table.add_column(heading, overflow="fold", min_width=least, max_width=most)
                for row in part.rows:
                    table.add_row(*row)
                console.print(table)
        elif isinstance(item, str):
            console.print(item, markup=False)
