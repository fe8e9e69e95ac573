"""torch's own modules through DVABatch's and BatchMaker's executors: ``make oracles``.

Every class of torch's own module tests, three argument lists each, in evaluation and in training, among 24 requests;
then 400 requests of Triton's clients, REST and gRPC, every ninth at fault.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.oracles.isolation.catalogue import cases
from tests.oracles.isolation.clients import many_clients
from tests.oracles.isolation.judge import Tally, by_cells, by_stages


def main(per_class: int = 3) -> int:
    """Run all and print the tally; 1 if an answer was wrong or an exception raw."""
    warnings.simplefilter("ignore")
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell of what export refuses
    tally = Tally()
    for number, case in enumerate(cases(per_class)):
        tally.judge(case, "stages", by_stages)
        tally.judge(case, "cells", by_cells)
        if number % 50 == 49:
            print(tally.line(f"up to {case.name}"), flush=True)
    many_clients(tally, requests=400)
    for line in tally.bad[:50]:
        print(line)
    for reason, count in tally.refusals.most_common(12):
        print(f"{count:6,} refused: {reason} ...")
    print(tally.line("isolation"))
    return int(bool(tally.bad))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
