"""Run every operator that torch has test data for through Nimble: ``python -m tests.oracles.nimble_opinfo.full``.

Two processes, some minutes. ``--write`` writes what was refused to docs/nimble-refusals.md. Ends with status 1 where a
result was wrong, an exception raw, or a refusal is not on that page. ``--journal FILE`` keeps what came of each
operator, and a later run with the same file takes the others.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple
from multiprocessing import get_context

from tests.oracles.journal import Journal
from tests.oracles.nimble_opinfo import plan, refusals
from tests.oracles.nimble_opinfo.judge import Judgement, Tally

PROCESSES = 2


def judge_all(works: list[plan.Work]) -> list[Judgement]:
    """The verdicts on the works of one operator."""
    import torch

    torch.set_num_threads(1)
    return [judgement for work in works for judgement in plan.judgements(work)]


def results(works: dict[int, list[plan.Work]], journal: Journal) -> Iterator[list[Judgement]]:
    """The verdicts on each operator: those of the journal, then the others as they come."""
    known = journal.read()
    for number in works:
        if str(number) in known:
            yield [Judgement(*each) for each in known[str(number)]]
    left = {number: of_one for number, of_one in works.items() if str(number) not in known}
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(judge_all, of_one): number for number, of_one in left.items()}
        for future in as_completed(futures):
            journal.add(str(futures[future]), [astuple(judgement) for judgement in future.result()])
            yield future.result()


def main() -> int:
    """Judge, print faults as they are found, then a tally of each path and one of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the list of what is refused into the docs")
    parser.add_argument("--journal", help="file of what came of each operator; those in it are not run again")
    options = parser.parse_args()
    by_operator: dict[int, list[plan.Work]] = defaultdict(list)
    for work in (*plan.whole(), *plan.in_modes()):
        by_operator[work.number].append(work)
    tallies: dict[str, Tally] = {}
    whole = Tally("nimble-opinfo")
    found: list[Judgement] = []
    for done, judgements in enumerate(results(by_operator, Journal(options.journal)), 1):
        for judgement in judgements:
            found.append(judgement)
            whole.add(judgement)
            path = "ambient modes" if ", prepared in " in judgement.case else judgement.path
            tallies.setdefault(path, Tally(f"  {path}")).add(judgement)
            if judgement.verdict in ("wrong", "raw"):
                print(f"{judgement.verdict}: {judgement.case} ({judgement.path}): {judgement.reason}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {len(by_operator)} operators; {whole}", flush=True)
    if options.write:
        refusals.write(found)
    unlisted = refusals.rows(found).items() - refusals.listed().items()
    for case, reason in sorted(unlisted):
        print(f"refused, and not in {refusals.PAGE.name}: {case}: {reason}")
    print(*tallies.values(), whole, sep="\n")
    return int(bool(whole.faults or unlisted))


if __name__ == "__main__":
    sys.exit(main())
