"""One process that gives a range of a target's inputs to its parser: ``python -m tests.fuzz.worker``.

What it is at stands in a file that the runner reads, so that an input that kills or stops the process is known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

from mlsys_core.errors import MlsysError

from tests.fuzz.mutate import mutated
from tests.fuzz.target import MODULES, Input, Target, all_targets

HANG_S = 1.0  # of processor time for one input


def input_of(target: Target, seeds: Any, words: Any, seed: int, index: int) -> Input:
    """Return input ``index`` of a target."""
    return mutated(seeds, words, Random(f"{target.name}:{seed}:{index}"))


def run(target: Target, seed: int, start: int, stop: int, progress: Path, say: Any) -> None:
    """Parse inputs ``start`` to ``stop``, and say what became of them as lines of JSON."""
    with tempfile.TemporaryDirectory(prefix="mlsys-fuzz-") as folder:
        case = target.prepare(Path(folder))
        for each in case.seeds:  # a seed that is refused would make for poor mutants
            case.parse(each)
        _limit_memory(target.limit_nbytes)
        before = _peak_nbytes()
        refused = taken = 0
        with progress.open("r+b", buffering=0) as at:
            for index in range(start, stop):
                at.seek(0)
                at.write(struct.pack("<q", index))
                made = input_of(target, case.seeds, case.words, seed, index)
                began = time.process_time()
                try:
                    case.parse(made)
                    taken += 1
                except MlsysError as error:
                    refused += 1
                    if "\n" in str(error).strip() and len(str(error)) > 2000:
                        say(
                            {
                                "kind": "crash",
                                "target": target.name,
                                "index": index,
                                "what": f"a refusal of {len(str(error))} characters",
                            }
                        )
                except RecursionError:
                    say({"kind": "crash", "target": target.name, "index": index, "what": "RecursionError"})
                except Exception as error:  # noqa: BLE001 - this is what is looked for
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    what = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"
                    say({"kind": "crash", "target": target.name, "index": index, "what": what})
                spent = time.process_time() - began
                if spent > HANG_S:
                    say({"kind": "hang", "target": target.name, "index": index, "what": f"{spent:.1f} s"})
        growth = _peak_nbytes() - before
        say({"kind": "done", "target": target.name, "refused": refused, "taken": taken, "growth": growth})


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit_memory(nbytes: int) -> None:
    """Bound what may be taken from now on; what is mapped already stays."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.worker", description=__doc__)
    parser.add_argument("target", help="a name, or several with commas: each gets the same numbers, in one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, required=True)
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")  # parsers may print
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    targets = all_targets(*MODULES, "selftest")
    for name in options.target.split(","):
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        run(targets[name], options.seed, options.start, options.stop, options.progress, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
