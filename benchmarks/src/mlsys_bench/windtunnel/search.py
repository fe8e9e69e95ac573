"""The suite ``windtunnel-search``: sets of fine-tuning options on the same rows and source, by validation rows alone.

The test rows are not used, so ``windtunnel-tables`` may report the chosen options on them.

    mlsys bench windtunnel-search rows=300000 trees=40 leaves=32 "sets=lr=.002,init=source lr=.002,init=source,ema=.99"
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Section, Table

from mlsys_bench.harness.journal import Journal

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

    from mlsys_bench.windtunnel.experiments.data import Task


def run(
    context: BenchContext,
    *,
    sets: str = "lr=.002,batch_size=2048,init=source",
    data: str = "flights-3m",
    pre: str = "pre2",
    pipe: str = "pipe2",
    rows: int = 0,
    valid_rows: int = 60_000,
    trees: int = 100,
    leaves: int = 64,
    epochs: int = 4,
    seeds: tuple[int, ...] = (0,),
    journal: str = "windtunnel-search",
) -> Section:
    """Fit the source of each seed, fine-tune it with each set of options; each finished one is a line of the journal.

    Args:
        context: The suite's context; quick takes 2,000 rows, 4 trees and one epoch.
        sets: Sets of options with blanks between: ``lr=.002,ema=.99``.
        data: A data set of the experiments.
        pre: Its columns.
        pipe: The source's model.
        rows: Training rows of flights-3m; 0: all.
        valid_rows: Its validation rows.
        trees: Of the source.
        leaves: Of each tree.
        epochs: Of fine-tuning.
        seeds: Of rows and source.
        journal: Name of the file, ``JOURNAL.jsonl`` in the context's folder.
    """
    import torch

    from mlsys_bench.windtunnel.experiments.data import Sizes, load_task
    from mlsys_bench.windtunnel.experiments.sources import make_source

    if context.is_quick:
        rows, valid_rows, trees, epochs = 2_000, 2_000, 4, 1
    torch.set_num_threads(context.num_threads)
    place = {"data": data, "pre": pre, "pipe": pipe, "rows": rows or None, "valid_rows": valid_rows}
    place |= {"trees": trees, "leaves": leaves, "epochs": epochs}
    lines = Journal(context.output_dir / f"{journal}.jsonl", {}, key="tried")
    for seed in seeds:
        wanted = {f"{place}, seed {seed}: {text}": parsed(text) for text in sets.split()}
        if all(key in lines.finished for key in wanted):
            continue
        sizes = Sizes(rows or None, valid_rows, 100) if data == "flights-3m" or context.is_quick else None
        task = load_task(data, seed=seed, sizes=sizes)
        source = make_source(task, pre, pipe, seed=seed, num_threads=context.num_threads, num_trees=trees)
        if pipe == "pipe2":
            source.set_params(lgbmclassifier__num_leaves=leaves)
        source.fit(task.train.frame, task.train.target.astype(int))
        for key, options in wanted.items():
            if key not in lines.finished:
                found = tried(source, task, options, epochs, seed, context.num_threads)
                lines.add({"tried": key, **place, "seed": seed, "options": options, **found})
                context.console.print(f"{key}: {found}", highlight=False)
    cells = [
        [name, ", ".join(f"{score:.4f}" for score in line["valid_by_epoch"]), f"{100 * line['gain'][0]:.2f}"]
        for name, line in lines.finished.items()
    ]
    return Section(
        "WindTunnel: options of fine-tuning",
        [Table(["options", "validation by epoch, the start first", "gain in points"], cells)],
        data={"tried": list(lines.finished.values())},
    )


def parsed(text: str) -> dict[str, Any]:
    """Parse a set of options: numbers where possible, words else.

    Example:
        >>> parsed("lr=.002,init=source")
        {'lr': 0.002, 'init': 'source'}
    """
    pairs = (pair.split("=", 1) for pair in text.split(","))
    return {name: ast.literal_eval(value) if value[0] in "0123456789.-N" else value for name, value in pairs}


def tried(source: Any, task: Task, options: dict[str, Any], epochs: int, seed: int, num_threads: int) -> dict[str, Any]:
    """Return scores by epoch, the first before training."""
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.finetune.tune import fine_tune

    from mlsys_bench.windtunnel.experiments.nearby import registry

    settings = {"level": "L4", "epochs": epochs, **options}
    tuned = fine_tune(
        translate(source, registry=registry()),
        task.train.frame,
        task.train.target.astype(int),
        eval_set=(task.valid.frame, task.valid.target.astype(int)),
        random_state=seed,
        n_threads=num_threads,
        **settings,
        keeps_interrupted=False,
    )
    return {
        "best_epoch": tuned.best_epoch,
        "gain": [round(tuned.gain, 6), round(tuned.gain_se, 6)],
        "valid_by_epoch": [round(epoch["valid_score"], 5) for epoch in tuned.history],
        "train_loss": [round(epoch["train_loss"], 5) for epoch in tuned.history[1:]],
        "seconds": round(sum(epoch["seconds"] for epoch in tuned.history), 1),
    }
