"""Exact inference of WindTunnel against its sources and peers: the suite ``mlsys bench windtunnel-infer`` as a script.

    python benchmarks/windtunnel/infer.py
    python benchmarks/windtunnel/infer.py --quick --threads 1 --output /tmp/results

The peers' versions are in ``benchmarks/peers/windtunnel/requirements.txt``; those that are not installed are named.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec
from mlsys_core.report import Table
from rich.console import Console
from rich.table import Table as Printed


def main() -> int:
    """Run the suite, print its tables and write JSON and page; 1 if an answer of WindTunnel's was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller batches and fewer rounds, under a minute")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results", help="folder to write to")
    arguments = parser.parse_args()
    console = Console()
    spec = installed_plugins().registry.get(BenchmarkSpec, "windtunnel-infer")
    context = BenchContext(console, is_quick=arguments.quick, device="cpu", num_threads=arguments.threads)
    section = run_suite(spec, context, arguments.output)
    for item in section.body:
        if isinstance(item, Table):
            printed = Printed(*item.columns, title=item.caption)
            for row in item.rows:
                printed.add_row(*row)
            console.print(printed)
        elif isinstance(item, str):
            console.print(item, markup=False)
    return int(section.status == "failed")


if __name__ == "__main__":
    raise SystemExit(main())
