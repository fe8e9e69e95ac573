"""Run each oracle whole, one after the other, and print their tallies: ``python tests/oracles [NAME ...]``.

An oracle is a folder here with a ``full.py``: cases that nobody wrote for this project (torch's OpInfo, scikit-learn's
estimators, model zoos, random programs, other people's clients), each equal to its reference or refused with a reason.
It prints its tally last and ends with a status other than 0 where an answer was wrong or an exception was raw.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the oracles named on the command line, or all; return 1 if one failed."""
    known = sorted(path.parent.name for path in HERE.glob("*/full.py"))
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        print(f"there is no oracle {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    tallies, failed = [], []
    for name in names:
        print(f"== {name}", flush=True)
        start, last = time.monotonic(), ""
        command = [sys.executable, "-u", "-m", f"tests.oracles.{name}.full"]
        with subprocess.Popen(command, cwd=HERE.parents[1], env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        if run.returncode != 0:
            failed.append(name)
        tallies.append(f"{last} ({time.monotonic() - start:.0f} s{', FAILED' if run.returncode else ''})")
    print("\n".join(["", "tallies:", *tallies]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
