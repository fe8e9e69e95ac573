"""Every producer, container, step and consumer: translations beside their sources, on dense and on sparse batches.

``python -m tests.oracles.windtunnel_containers.full [EVERY]`` runs each so many-th pipeline, by default each.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import scipy.sparse
from mlsys_core.errors import MlsysError
from mlsys_windtunnel import translate
from sklearn.pipeline import make_pipeline

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_containers.parts import (
    CONSUMERS,
    CONTAINERS,
    NUMBERS,
    PRODUCERS,
    STEPS,
    TABLE,
    TARGET,
    stored,
)
from tests.oracles.windtunnel_estimators.compare import compare

Names = tuple[str, str, str, str]
BARE = ("array", "csr")  # pipelines on numbers, fitted on such a table


def every_pipeline() -> list[Names]:
    """Return the names of a pipeline's parts: its producer or, for one on bare numbers, the container of its fit."""
    inner = product(CONTAINERS, STEPS, CONSUMERS)
    made = [(producer, *parts) for parts in inner for producer in PRODUCERS]
    return made + [
        (container, "as made", step, consumer) for container, step, consumer in product(BARE, STEPS, CONSUMERS)
    ]


def fitted(names: Names) -> tuple[Any, Any] | None:
    """Return a fitted pipeline and the table of its fit; None where the source cannot be fitted so."""
    first, container, step, consumer = names
    parts = [CONTAINERS[container], STEPS[step], CONSUMERS[consumer]]
    table: Any = TABLE
    if first in BARE:
        table = NUMBERS.to_numpy() if first == "array" else scipy.sparse.csr_matrix(NUMBERS.to_numpy())
    else:
        parts = [PRODUCERS[first], *parts]
    source = make_pipeline(*[part() for part in parts if part is not None])
    target = TARGET[:, None] if "chain" in consumer else TARGET
    try:
        return source.fit(table, target), table
    except Exception:  # noqa: BLE001  third-party code
        return None


def asked(table: Any) -> Iterator[tuple[str, Any]]:
    """Yield batches by what holds them."""
    if table is TABLE:
        yield "the fit's", table
        yield "one row", table[3:4]
        yield "another index", table[5:25].set_axis([0] * 20)
        return
    array = NUMBERS.to_numpy()
    yield "dense", array
    yield "dense, one row", array[3:4]
    for kind in (scipy.sparse.csr_matrix, scipy.sparse.csc_array, scipy.sparse.coo_matrix):
        yield kind.__name__, kind(array)
    yield "sparse, zeros stored", stored(array)
    yield "sparse, NaN stored", scipy.sparse.csr_matrix(np.where(array == 0.5, np.nan, array))


def run(pipelines: Iterable[Names], tally: Tally) -> None:
    """Compare each pipeline's translation with it."""
    warnings.simplefilter("ignore")
    for names in pipelines:
        found = fitted(names)
        if found is None:
            continue
        source, table = found
        try:
            module = translate(source, table[:5])
        except MlsysError as error:
            tally.add("refused", " > ".join(names), f"{names[-1]}: {str(error)[:90]}")
            continue
        except Exception as error:  # noqa: BLE001  what is looked for
            tally.add("raw", " > ".join(names), f"{type(error).__name__}: {error}")
            continue
        for label, x in asked(table):
            compare(source, module, "predict", x, f"{' > '.join(names)}, {label}", tally)


def main(every: int) -> int:
    """Print faults, reasons and the tally; return 1 if anything is wrong or raw."""
    tally = Tally()
    run(every_pipeline()[::every], tally)
    return tally.report("windtunnel_containers")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
