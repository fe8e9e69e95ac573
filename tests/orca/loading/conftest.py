"""Fixtures that the tests of hostile model files share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError

SCRIPT = """
import resource, sys, time
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import load_model
before = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for path in [sys.argv[1], *sys.argv[1:]]:
    start = time.process_time()
    try:
        load_model(path, backend="torch")
    except InvalidInputError:
        pass
    print(path, time.process_time() - start)
after = resource.getrusage(resource.RUSAGE_SELF)
print("grew", (after.ru_maxrss - before.ru_maxrss) / 1024)
"""


@pytest.fixture(scope="session")
def refused() -> Callable[[Callable[[], Any]], str]:
    """Run a call that is refused in one line; returns the line."""

    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises(InvalidInputError) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 1500
        return message

    return refused


@pytest.fixture(scope="session")
def cost_of_loading() -> Callable[[Sequence[Path]], tuple[float, float]]:
    """Try to load models in a process of their own: (most seconds of processor time of one, MiB that all took)."""

    def cost_of_loading(paths: Sequence[Path]) -> tuple[float, float]:
        command = [sys.executable, "-c", SCRIPT, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        _, *lines, grew = done.stdout.splitlines()  # the first time loads torch's lazy parts
        assert len(lines) == len(paths)
        return max(float(line.rpartition(" ")[2]) for line in lines), float(grew.split()[1])

    return cost_of_loading
