"""Judge thousands of random programs, whole: ``python -m tests.oracles.nimble_programs.full``. Two processes, minutes.

Ends with status 1 where a result was wrong or an exception raw; such a program is printed as code.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tests.oracles.nimble_opinfo.judge import Tally
from tests.oracles.nimble_programs.run import draw

PROCESSES = 2
COUNTS = {"native": 3000, "reference": 600, "compile": 250, "training": 250, "compiled training": 150}
IN_ONE_GO = 50


def judge_some(path: str, count: int, number: int) -> Tally:
    """One go."""
    import torch

    torch.set_num_threads(1)
    return draw(path, count, number=number)


def main() -> int:
    """Draw, print faults as they are found, then a tally of each path and one of all."""
    whole, tallies = Tally("nimble-programs"), {path: Tally(f"  {path}") for path in COUNTS}
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        goes = [(path, number) for path, count in COUNTS.items() for number in range(count // IN_ONE_GO)]
        futures = [pool.submit(judge_some, path, IN_ONE_GO, 1 + number) for path, number in goes]
        for done, future in enumerate(as_completed(futures)):
            found = future.result()
            for tally in (whole, tallies[found.name]):
                tally.counts.update(found.counts)
                tally.faults += found.faults
            for fault in found.faults:
                print(f"{fault.verdict} ({fault.path}): {fault.reason}\n{fault.case}\n", flush=True)
            if done % 20 == 19:
                print(f"{done + 1} of {len(futures)} goes; {whole}", flush=True)
    print(*tallies.values(), whole, sep="\n")
    return int(bool(whole.faults))


if __name__ == "__main__":
    sys.exit(main())
