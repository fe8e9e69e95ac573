"""WindTunnel's second step of ``mlsys demo``: a pipeline on real flights, fine-tuned end to end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlsys_core.config import settings
from mlsys_core.report import Figure, Section, Story, Table
from mlsys_windtunnel.cli.demo import load_dataset

if TYPE_CHECKING:
    from mlsys_core.demo import DemoContext

NUM_TREES, NUM_LEAVES, SOURCE_RATE = 60, 32, 0.25
EPOCHS, RATE, LEVEL = 6, 2e-3, "L4"
MAX_ROWS = 100_000
SHARES = (0.15, 0.15)  # of the rows, to choose the epoch by and to report on


def run(context: DemoContext) -> Section:
    """Train, translate, fine-tune; AUC before and after on rows that nothing was chosen by.

    Raises:
        MissingDependencyError: no data set, or pandas, is installed.
    """
    import numpy as np
    from lightgbm import LGBMClassifier
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.estimators import TwoHotEncoder
    from mlsys_windtunnel.finetune.tune import fine_tune
    from sklearn.compose import ColumnTransformer
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import Pipeline

    console = context.console
    with context.progress("reading data"):
        data = load_dataset(settings().cache_dir, MAX_ROWS)
    order = np.random.default_rng(1).permutation(len(data.frame))
    ends = np.cumsum([int(len(order) * share) for share in SHARES])
    validation, test, training = np.split(order, ends)
    texts = [*data.few, *data.many]
    source = Pipeline(
        [
            ("columns", ColumnTransformer([("texts", TwoHotEncoder(), texts)], remainder="passthrough")),
            (
                "model",
                LGBMClassifier(
                    n_estimators=NUM_TREES,
                    num_leaves=NUM_LEAVES,
                    learning_rate=SOURCE_RATE,
                    n_jobs=context.num_threads,
                    random_state=0,
                    verbose=-1,
                ),
            ),
        ]
    )
    with context.progress(f"fitting two-hot encoders and LightGBM on {len(training):,} rows"):
        source.fit(data.frame.iloc[training], data.target[training])
    started = time.perf_counter()
    with context.progress(f"fine-tuning at {LEVEL}, {EPOCHS} epochs"):
        result = fine_tune(
            translate(source),
            data.frame.iloc[training],
            data.target[training],
            eval_set=(data.frame.iloc[validation], data.target[validation]),
            level=LEVEL,
            epochs=EPOCHS,
            lr=RATE,
            n_threads=context.num_threads,
            device=context.device,
            keeps_interrupted=False,
        )
    tune_s = time.perf_counter() - started
    rows, labels = data.frame.iloc[test], data.target[test]
    before, after = (float(roc_auc_score(labels, each.predict_proba(rows)[:, 1])) for each in (source, result.module))
    seconds = sum(epoch["seconds"] for epoch in result.history)
    text = (
        f"AUC on {len(rows):,} other rows: {before:.4f} before, {after:.4f} after {EPOCHS} epochs at {LEVEL} "
        f"(best epoch {result.best_epoch}, {len(training) * EPOCHS / seconds:,.0f} rows/s, {tune_s:.0f} s in all)"
    )
    console.print(f"[bold]{text}[/bold]", highlight=False)
    return Section(
        "WindTunnel: the pipeline trained further as a whole",
        [
            Story(
                f"{data.name}: {data.question} Two-hot encoders and LightGBM, {NUM_TREES} trees of {NUM_LEAVES} "
                f"leaves, were fitted on {len(training):,} rows, translated, and trained together. {text}.",
                "The encoders were made without a look at the goal. As one network, encoders and trees move towards it "
                "together; training starts at the pipeline's own answers, so nothing can get lost.",
                "The curve is the AUC on validation rows after each epoch, the line that of the source. The best "
                "epoch is kept, and its AUC on rows that chose nothing stands above.",
                "LightGBM alone can add trees or refit leaves, and cannot move its encoders. A tuned LightGBM on its"
                " own table often leaves nothing to gain; fit then says so and returns the source.",
            ),
            Table(
                ["epoch", "training loss", "validation AUC", "seconds"],
                [
                    [
                        f"{e['epoch']:.0f}",
                        f"{e['train_loss']:.4f}" if e["epoch"] else "",
                        f"{e['valid_score']:.4f}",
                        f"{e['seconds']:.1f}",
                    ]
                    for e in result.history
                ],
                "Epoch 0 is the source: training starts at its answers.",
            ),
            Figure(
                _figure(result.history),
                "AUC on the validation rows, epoch by epoch; the line is the source's.",
            ),
        ],
        data={
            "dataset": data.name,
            "training_rows": len(training),
            "auc_before": round(before, 5),
            "auc_after": round(after, 5),
            "best_epoch": result.best_epoch,
            "rows_per_second": round(len(training) * EPOCHS / seconds),
            "fine_tune_s": round(tune_s, 1),
        },
    )


def _figure(history: list[dict[str, float]]) -> str:
    from mlsys_core.plot import require_matplotlib, to_svg

    require_matplotlib()
    from matplotlib.figure import Figure as MplFigure

    figure = MplFigure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [entry["epoch"] for entry in history], [entry["valid_score"] for entry in history], marker="o", markersize=3
    )
    axes.axhline(history[0]["valid_score"], linewidth=0.8, color="grey")
    axes.set(xlabel="epoch", ylabel="validation AUC")
    return to_svg(figure)
