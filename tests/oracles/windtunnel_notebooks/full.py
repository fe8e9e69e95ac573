"""Forty pipelines as notebooks have them, on the rows of the fit, rows held out, and damaged ones.

Equal is an answer that is the source's, or a refusal where the source refuses too; refused is one where the source
answers. A pipeline is exact where nothing is refused in this sense.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from mlsys_core.errors import MlsysError
from mlsys_windtunnel import translate

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_estimators.compare import METHODS, compare
from tests.oracles.windtunnel_notebooks.pipelines import CASES, fitted
from tests.oracles.windtunnel_strangers.tables import asked


def run(names: Iterable[str], tally: Tally, *, every: int = 1) -> list[str]:
    """Compare each pipeline's translation with it, and return the names of those that are exact.

    Args:
        names: Pipelines.
        tally: Verdicts.
        every: Of the damaged tables, each pipeline is asked every so many-th, another one first.
    """
    warnings.simplefilter("ignore")
    exact = []
    for number, name in enumerate(names):
        source, table, held_out = fitted(name)
        own = Tally()
        try:
            module = translate(source, table[1:6])
        except MlsysError as error:
            tally.add("refused", name, str(error)[:100])
            continue
        damaged = [*asked(held_out)][number % every :: every]
        for label, x in [("rows of the fit", table), ("rows held out", held_out), *damaged]:
            for method in [method for method in METHODS if hasattr(source, method)]:
                where = f"{name}.{method}, {label}"
                if not hasattr(module, method):
                    own.add("refused", where, f"{type(source).__name__}: no {method}")
                    continue
                compare(source, module, method, x, where, own)
        if not own.faults and not own.reasons:
            exact.append(name)
        tally.counts.update(own.counts)
        tally.reasons.update({f"{name}: {reason}": count for reason, count in own.reasons.items()})
        tally.faults += own.faults
    return exact


def main() -> int:
    """Print faults, reasons and the tally; return 1 if anything is wrong or raw."""
    tally = Tally()
    exact = run(CASES, tally)
    print(
        f"exact: {len(exact)} of {len(CASES)} pipelines; not: {', '.join(name for name in CASES if name not in exact)}"
    )
    return tally.report("windtunnel_notebooks")


if __name__ == "__main__":
    sys.exit(main())
