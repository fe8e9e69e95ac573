"""Judge 100,000 programs that write and read the same memory: ``python -m tests.oracles.nimble_writes.full [COUNT]``.

``--peer inductor|onnxruntime|openvino COUNT`` counts the same programs on another compiler, one that is installed.
Two processes, about two hours. Ends with status 1 where a result or argument was wrong or an exception raw; such a
program is shrunk and printed as code, with its seed.
"""

from __future__ import annotations

import logging
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.oracles.nimble_opinfo.judge import Tally
from tests.oracles.nimble_writes.run import tally_of

PROCESSES, COUNT, IN_ONE_GO = 2, 100_000, 500


def judge_some(first: int) -> Tally:
    """One go; most programs natively, with all passes or some."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    return tally_of(range(first, first + IN_ONE_GO))


def main() -> int:
    """Print faults as they are found, then a tally."""
    if sys.argv[1:2] == ["--peer"]:
        from tests.oracles.nimble_writes import peers

        print(dict(peers.tally_of(sys.argv[2], range(int(sys.argv[3])))))
        return 0
    whole = Tally("nimble-writes")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for done, found in enumerate(pool.map(judge_some, range(0, count, IN_ONE_GO)), 1):
            whole.counts.update(found.counts)
            whole.faults += found.faults
            for fault in found.faults:
                print(f"{fault.verdict} ({fault.path}): {fault.reason}\n{fault.case}\n", flush=True)
            if done % 4 == 0:
                print(f"{done * IN_ONE_GO} seeds; {whole}", flush=True)
    print(whole)
    return int(bool(whole.faults))


if __name__ == "__main__":
    sys.exit(main())
