"""Compile the large kernels for every level that this machine executes, a core each, into the cache.

Tests run kernels in all of these builds. Two test workers that want the same build wait for one compiler, and leave a
core idle; here each build is compiled once, as many at a time as there are cores.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import Kernel
from mlsys_core.native.loader import builds_to_test
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import KernelSpec
from mlsys_core.posix.machine import num_cores

LARGE_S = 5  # seconds of compiling from which on a kernel is large


def main() -> int:
    """Compile what is not in the cache; return 1 if a kernel cannot be had."""
    registry = installed_plugins().registry
    kernels: list[Kernel] = [registry.load(KernelSpec, spec.name) for spec in registry.all(KernelSpec)]
    large = sorted((each for each in kernels if each.compile_s >= LARGE_S), key=lambda each: -each.compile_s)
    builds = builds_to_test()
    started = time.perf_counter()

    def compiled(kernel: Kernel, flags: tuple[str, ...]) -> bool:
        try:
            kernel.load(flags)
        except KernelUnavailableError as error:
            print(f"{kernel.source.name}: {error}", file=sys.stderr)
            return False
        return True

    with ThreadPoolExecutor(num_cores()) as pool:
        done = [pool.submit(compiled, kernel, flags) for kernel in large for flags in builds.values()]
        failed = sum(not each.result() for each in done)
    taken_s = time.perf_counter() - started
    print(f"{len(large)} kernels in {len(builds)} builds each, {failed} failed ({taken_s:.0f} s)")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
