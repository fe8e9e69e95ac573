"""Run every benchmark on the first CUDA device, for ``make bench-gpu``; fails where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec
from rich.console import Console

SCRIPTS = ("benchmarks/orca/gpu.py",)  # benchmarks of GPU-only kernels are no suites of ``mlsys bench``


def main() -> int:
    """Return exit code 0 when all suites and scripts ran, 1 when one failed or there is no device."""
    import torch

    if not torch.cuda.is_available():
        print("make bench-gpu: torch sees no CUDA device here, so nothing was measured", file=sys.stderr)
        return 1
    device_name = torch.cuda.get_device_name(0).replace(" ", "-").lower()
    suites = installed_plugins().registry.all(BenchmarkSpec)
    if not suites:
        print("make bench-gpu: no installed plugin registers a benchmark suite", file=sys.stderr)
        return 1
    results = Path("benchmarks/results") / device_name
    context = BenchContext(Console(), is_quick=False, device="cuda", num_threads=2, output_dir=results)
    sections = [run_suite(spec, context) for spec in suites]
    codes = [
        subprocess.run([sys.executable, script, "--json", results / f"{script.split('/')[1]}-gpu.json"]).returncode
        for script in SCRIPTS
    ]
    return int(any(section.status == "failed" for section in sections) or any(codes))


if __name__ == "__main__":
    raise SystemExit(main())
