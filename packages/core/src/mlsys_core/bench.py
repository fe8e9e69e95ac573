"""Interface between ``mlsys bench`` and its suites: the suite's context and its result.

A subsystem registers suites with ``mlsys_register_benchmarks``. A suite interleaves its contestants in one run,
compares their outputs before their times, names peers that are not installed, and returns a section with its figures
as data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlsys_core.device import device_kind
from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.lazy import resolve
from mlsys_core.plugins.specs import BenchmarkSpec
from mlsys_core.report import Figure, Section, Table, write

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class BenchContext:
    """Inputs and settings of a benchmark suite."""

    console: Console
    is_quick: bool  # under three minutes, fewer repeats
    device: str  # the registered name of where to compute, for get_device
    num_threads: int  # threads each contestant may use


def run_suite(spec: BenchmarkSpec, context: BenchContext, output_dir: Path) -> Section:
    """Run one suite and write its results as :func:`write_results` does.

    Raises:
        InvalidInputError: it does not measure the context's kind of device.
        PluginError: the suite returned something other than a :class:`mlsys_core.report.Section`.
    """
    kind = device_kind(context.device).name
    if "*" not in spec.devices and kind not in spec.devices:
        raise InvalidInputError(
            f"benchmark {spec.name!r} measures {' and '.join(spec.devices)}, not {kind}: leave out --device"
        )
    section = resolve(spec.run)(context)
    if not isinstance(section, Section):
        raise PluginError(f"benchmark {spec.name!r}: {spec.run} returned {type(section).__name__}, not a Section")
    write_results(spec.name, section, context, output_dir)
    return section


def write_results(name: str, section: Section, context: BenchContext, output_dir: Path) -> list[Path]:
    """Write ``NAME.json`` (results, environment, commit), ``NAME.html`` and each figure as an SVG file.

    Returns:
        The files, below ``output_dir``, which is made.
    """
    environment = describe_environment()
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


def print_section(section: Section, console: Console) -> None:
    """Print the texts and tables of ``section``; figures are for files."""
    from rich import box
    from rich.table import Table as RichTable

    for item in section.body:
        if isinstance(item, Table):
            table = RichTable(*item.columns, title=item.caption or None, box=box.SIMPLE_HEAD)
            for row in item.rows:
                table.add_row(*row)
            console.print(table)
        elif isinstance(item, str):
            console.print(item, markup=False)
