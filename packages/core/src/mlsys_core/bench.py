"""The seam of ``mlsys bench``: what a suite gets and what it returns.

A subsystem registers suites with ``mlsys_register_benchmarks``. A suite interleaves its contestants in one run,
compares their outputs before their times, names peers that are not installed, and returns a section with its figures
as data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlsys_core.environment import describe_environment
from mlsys_core.errors import PluginError
from mlsys_core.lazy import resolve
from mlsys_core.plugins.specs import BenchmarkSpec
from mlsys_core.report import Section, write

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class BenchContext:
    """What a suite may use."""

    console: Console
    is_quick: bool  # under three minutes, fewer repeats
    device: str  # "cpu", "cuda", ...
    num_threads: int  # threads each contestant may use


def run_suite(spec: BenchmarkSpec, context: BenchContext, output_dir: Path) -> Section:
    """Run one suite and write ``NAME.json`` (figures, environment, commit) and ``NAME.html`` below ``output_dir``.

    Raises:
        PluginError: the suite returned something other than a :class:`mlsys_core.report.Section`.
    """
    section = resolve(spec.run)(context)
    if not isinstance(section, Section):
        raise PluginError(f"benchmark {spec.name!r}: {spec.run} returned {type(section).__name__}, not a Section")
    environment = describe_environment()
    output_dir.mkdir(parents=True, exist_ok=True)
    record = {"suite": spec.name, "device": context.device, "quick": context.is_quick, "environment": environment}
    text = json.dumps({**record, "results": dict(section.data)}, indent=1, allow_nan=False)
    (output_dir / f"{spec.name}.json").write_text(text + "\n")
    write(output_dir / f"{spec.name}.html", f"mlsys bench {spec.name}", [section], environment)
    return section
