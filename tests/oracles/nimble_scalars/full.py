"""Judge every operator with every number, whole: ``python -m tests.oracles.nimble_scalars.full``. Two minutes.

Ends with status 1 where a result was wrong or an exception raw.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

from tests.oracles.nimble_opinfo.judge import Judgement, Tally
from tests.oracles.nimble_scalars.cases import DTYPES, OPERATORS
from tests.oracles.nimble_scalars.run import judgements

PROCESSES = 2


def judge_operator(operator: str, path: str) -> list[Judgement]:
    """All dtypes, with and without dimensions."""
    import torch

    torch.set_num_threads(1)
    return [each for dtype, rank in product(DTYPES, (0, 1)) for each in judgements(operator, dtype, rank, path)]


def main() -> int:
    """Print faults as they are found, then a tally."""
    tally = Tally("nimble-scalars")
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        pairs = list(product(OPERATORS, ("native", "reference")))
        for found in pool.map(judge_operator, *zip(*pairs, strict=True)):
            for each in found:
                tally.add(each)
                if each.verdict in ("wrong", "raw"):
                    print(f"{each.verdict} ({each.path}): {each.case}: {each.reason}", flush=True)
    print(tally)
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())
