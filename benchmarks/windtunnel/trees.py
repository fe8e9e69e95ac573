"""Cost of exact trees: translated modules against the source's own predict, at 1 and 10,000 rows.

Sources are fitted on random rows of 28 features. All contestants of a case take turns in one run, with the same number
of threads; their outputs are compared before any time is taken. A module is called as users call it, numpy in and numpy
out, by the native kernel; and its network in torch, by each of the two forms. Medians of wall times; a loaded machine
shows in the spread, and costs torch most, whose threads wait for each other after every operation.

    python benchmarks/windtunnel/trees.py
    python benchmarks/windtunnel/trees.py --threads 1 --repeats 31 --json trees.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.environment import describe_environment
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.native import kernel
from mlsys_windtunnel.modules.tree import trees as trees_module
from mlsys_windtunnel.modules.tree.bits import mask_bits
from mlsys_windtunnel.modules.tree.trees import Layout, Trees
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.tree import DecisionTreeClassifier

NUM_FEATURES, TRAINING_ROWS = 28, 20_000
MOST_MASK_BITS = 256  # beyond, tables of bit masks are no contestant
TOLERANCE = 1e-9
Answer = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of one contestant."""

    case: str
    num_rows: int
    contestant: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    ratio: float  # the source's median over this one: above 1 is faster than the source


def sources(threads: int) -> dict[str, Any]:
    """Return estimators to fit, by name."""
    return {
        "LightGBM, 100 trees, 64 leaves": lightgbm.LGBMClassifier(
            n_estimators=100, num_leaves=64, verbose=-1, n_jobs=threads
        ),
        "LightGBM, 100 trees, 31 leaves": lightgbm.LGBMClassifier(
            n_estimators=100, num_leaves=31, verbose=-1, n_jobs=threads
        ),
        "HistGradientBoosting, 100 trees": HistGradientBoostingClassifier(max_iter=100, early_stopping=False),
        "RandomForest, 100 trees": RandomForestClassifier(100, n_jobs=threads, random_state=0),
        "RandomForest, 100 trees, depth 8": RandomForestClassifier(100, max_depth=8, n_jobs=threads, random_state=0),
        "DecisionTree": DecisionTreeClassifier(random_state=0),
    }


def contestants(source: Any) -> dict[str, Callable[[Answer], Answer]]:
    """Return the calls to time: the source, the module with the native kernel, and with each form in torch."""
    module = translate(source)
    calls = {"source": source.predict_proba}
    if kernel() is None:
        print("no kernel: there is no compiler here")
    else:
        calls["kernel"] = module.predict_proba
    (trees,) = (part for part in module.modules() if isinstance(part, Trees))
    layouts: tuple[Layout, ...] = ("bits", "walk") if mask_bits(trees.ensemble) <= MOST_MASK_BITS else ("walk",)
    for layout in layouts:
        other = copy.deepcopy(module)
        (part,) = (part for part in other.modules() if isinstance(part, Trees))
        part.use_layout(layout)
        chosen = ", chosen" if layout == trees.layout else ""
        calls[f"torch ({layout}{chosen})"] = in_torch(other)
    return calls


def in_torch(module: WindTunnelModule) -> Callable[[Answer], Answer]:
    """Return the network in torch, as it is on a machine without a compiler."""
    native = vars(trees_module)["native_sums"]

    def without_kernel(x: Answer) -> Answer:
        vars(trees_module)["native_sums"] = lambda *_: None
        try:
            with torch.inference_mode():
                probabilities: Answer = module(torch.from_numpy(module.encode(x))).numpy()
        finally:
            vars(trees_module)["native_sums"] = native
        return probabilities

    return without_kernel


def measure(case: str, source: Any, x: Answer, repeats: int) -> list[Row]:
    """Compare the outputs, then time the contestants in turn."""
    calls = contestants(source)
    expected = source.predict_proba(x)
    for name, call in calls.items():
        difference = float(np.abs(call(x) - expected).max())
        if difference > TOLERANCE:
            raise SystemExit(f"{case}, {name}: differs from the source by {difference:.3g}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call(x)
            if number >= 2:  # the first passes warm up
                times[name].append((time.perf_counter() - start) * 1e3)
    base = statistics.median(times["source"])
    return [
        Row(case, len(x), name, statistics.median(values), min(values), max(values), base / statistics.median(values))
        for name, values in times.items()
    ]


def main() -> None:
    """Fit, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads each contestant may use")
    parser.add_argument("--repeats", type=int, default=15, help="turns at 10,000 rows; ten times as many at 1 row")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TRAINING_ROWS, NUM_FEATURES))
    y = (x[:, 0] * x[:, 1] + x[:, 2] + rng.normal(size=TRAINING_ROWS) > 0).astype(int)
    fresh = rng.normal(size=(10_000, NUM_FEATURES))
    environment = {**describe_environment(), "threads": str(options.threads)}
    print(*(f"{key}: {value}" for key, value in environment.items()), sep="\n")
    print(f"\n{'case':<34} {'rows':>6}  {'contestant':<20} {'median':>9} {'fastest':>9} {'slowest':>9}  ratio")
    rows: list[Row] = []
    for case, source in sources(options.threads).items():
        source.fit(x, y)
        for num_rows, repeats in ((1, options.repeats * 10), (10_000, options.repeats)):
            for row in measure(case, source, fresh[:num_rows], repeats):
                rows.append(row)
                figures = f"{row.median_ms:>9.3f} {row.fastest_ms:>9.3f} {row.slowest_ms:>9.3f}  {row.ratio:>5.2f}"
                print(f"{row.case:<34} {row.num_rows:>6}  {row.contestant:<20} {figures}")
    if options.json:
        record = {"environment": environment, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
