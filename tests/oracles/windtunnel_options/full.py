"""The whole oracle: every class of each library that is installed, five option sets each, on a tenth of the inputs.

``python -m tests.oracles.windtunnel_options.full [SHARE]`` tries every SHAREth input of each source.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context

from mlsys_bench.windtunnel.coverage.options import cases

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_options.options import run

PROCESSES = 2
PARTS = 12


def _part(job: tuple[int, int]) -> tuple[Tally, dict[str, str]]:
    first, share = job
    tally, refusals = Tally(), {}  # type: Tally, dict[str, str]
    warnings.simplefilter("ignore")
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        run(cases(every=PARTS, first=first), tally, refusals, every=share, seed=first)
    return tally, refusals


def main(share: int) -> int:
    """Print the faults, the reasons and the tally; 1 if anything is wrong or raw."""
    whole, refused = Tally(), {}  # type: Tally, dict[str, str]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for tally, refusals in pool.map(_part, [(first, share) for first in range(PARTS)]):
            for fault in tally.faults:
                print(f"  {fault}", flush=True)
            whole.counts.update(tally.counts)
            whole.faults += tally.faults
            refused |= refusals
    reasons = Counter(reason.partition("; register one")[0] for reason in refused.values())
    print(f"not translated, by reason ({len(refused)}):")
    for reason, count in reasons.most_common():
        print(f"  {count} {reason}")
    print(whole.line("windtunnel_options"))
    return int(bool(whole.faults))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
