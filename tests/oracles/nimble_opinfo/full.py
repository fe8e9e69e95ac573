"""Run every operator that torch has test data for through Nimble: ``python tests/oracles/nimble_opinfo/full.py``.

Two processes, some minutes. ``--write`` writes what was refused to docs/nimble-refusals.md. Ends with status 1 where a
result was wrong, an exception raw, or a refusal is not on that page.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]
import tests  # noqa: E402

tests.__path__ = [str(ROOT / "tests")]  # whatever distribution has installed a package of this name

from tests.oracles.nimble_opinfo import plan, refusals  # noqa: E402
from tests.oracles.nimble_opinfo.judge import Judgement, Tally  # noqa: E402

PROCESSES = 2


def judge_all(works: list[plan.Work]) -> list[Judgement]:
    """The verdicts on the works of one operator."""
    import torch

    torch.set_num_threads(1)
    return [judgement for work in works for judgement in plan.judgements(work)]


def main() -> int:
    """Judge, print faults as they are found, then a tally of each path and one of all."""
    by_operator: dict[int, list[plan.Work]] = defaultdict(list)
    for work in plan.whole():
        by_operator[work.number].append(work)
    tallies: dict[str, Tally] = {}
    whole = Tally("nimble-opinfo")
    found: list[Judgement] = []
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for done, future in enumerate(as_completed([pool.submit(judge_all, works) for works in by_operator.values()])):
            for judgement in future.result():
                found.append(judgement)
                whole.add(judgement)
                tallies.setdefault(judgement.path, Tally(f"  {judgement.path}")).add(judgement)
                if judgement.verdict in ("wrong", "raw"):
                    print(f"{judgement.verdict}: {judgement.case} ({judgement.path}): {judgement.reason}", flush=True)
            if done % 100 == 99:
                print(f"{done + 1} of {len(by_operator)} operators; {whole}", flush=True)
    if "--write" in sys.argv:
        refusals.write(found)
    unlisted = refusals.rows(found).items() - refusals.listed().items()
    for case, reason in sorted(unlisted):
        print(f"refused, and not in {refusals.PAGE.name}: {case}: {reason}")
    print(*tallies.values(), whole, sep="\n")
    return int(bool(whole.faults or unlisted))


if __name__ == "__main__":
    sys.exit(main())
