"""Run every suite that measures a CUDA device on the first one, for ``make bench-gpu``; fails where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec
from rich.console import Console


def main() -> int:
    """Return exit code 0 when all suites ran, 1 when one failed or there is no device."""
    import torch

    if not torch.cuda.is_available():
        print("make bench-gpu: torch sees no CUDA device here, so nothing was measured", file=sys.stderr)
        return 1
    device_name = torch.cuda.get_device_name(0).replace(" ", "-").lower()
    suites = [spec for spec in installed_plugins().registry.all(BenchmarkSpec) if {"*", "cuda"} & set(spec.devices)]
    if not suites:
        print("make bench-gpu: no installed plugin registers a suite for a CUDA device", file=sys.stderr)
        return 1
    results = Path("benchmarks/results") / device_name
    context = BenchContext(Console(), is_quick=False, device="cuda", num_threads=2, output_dir=results)
    sections = [run_suite(spec, context) for spec in suites]
    return int(any(section.status == "failed" for section in sections))


if __name__ == "__main__":
    raise SystemExit(main())
