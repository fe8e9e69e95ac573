r"""Try options of fine-tuning, one set after another on the same rows and source; score on validation rows alone.

    python benchmarks/windtunnel/search.py windtunnel-search --data flights-3m --rows 300000 --trees 40 --leaves 32 \\
        lr=.002,batch_size=2048,init=source lr=.002,batch_size=2048,init=source,ema=.99

Each finished set is a line of ``benchmarks/results/NAME.jsonl``, with its data and source. The test rows are not used,
so ``mlsys windtunnel bench`` may report the chosen options on them.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

import torch
from mlsys_core.environment import describe_environment
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.experiments.data import Sizes, Task, load_task
from mlsys_windtunnel.experiments.nearby import registry
from mlsys_windtunnel.experiments.sources import make_source
from mlsys_windtunnel.finetune.tune import fine_tune

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Fit the source of each seed, fine-tune it with each set of options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file of results")
    parser.add_argument("options", nargs="+", help="a set each: lr=.002,ema=.99")
    parser.add_argument("--data", default="flights-3m")
    parser.add_argument("--rows", type=int, default=None, help="to train on, of the flights; all if not given")
    parser.add_argument("--valid-rows", type=int, default=60_000)
    parser.add_argument("--pre", default="pre2")
    parser.add_argument("--pipe", default="pipe2")
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = ("data", "pre", "pipe", "rows", "valid_rows", "trees", "leaves", "epochs")
    place = {name: getattr(arguments, name) for name in names}
    path = RESULTS / f"{arguments.name}.jsonl"
    if not path.exists():
        path.write_text(json.dumps({"environment": describe_environment()}) + "\n")
    for seed in arguments.seeds:
        sizes = Sizes(arguments.rows, arguments.valid_rows, 100) if arguments.data == "flights-3m" else None
        task = load_task(arguments.data, seed=seed, sizes=sizes)
        source = make_source(
            task,
            arguments.pre,
            arguments.pipe,
            seed=seed,
            num_threads=arguments.threads,
            num_trees=arguments.trees,
        )
        if arguments.pipe == "pipe2":
            source.set_params(lgbmclassifier__num_leaves=arguments.leaves)
        source.fit(task.train.frame, task.train.target.astype(int))
        for text in arguments.options:
            line = {
                **place,
                "seed": seed,
                "options": parsed(text),
                **tried(source, task, parsed(text), arguments, seed),
            }
            print(json.dumps(line), flush=True)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def parsed(text: str) -> dict[str, Any]:
    """Parse ``"lr=.002,init=source"`` into a dictionary: numbers where possible, words else."""
    pairs = (pair.split("=", 1) for pair in text.split(","))
    return {name: ast.literal_eval(value) if value[0] in "0123456789.-N" else value for name, value in pairs}


def tried(source: Any, task: Task, options: dict[str, Any], arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return scores by epoch, the first before training."""
    settings = {"level": "L4", "epochs": arguments.epochs, **options}
    tuned = fine_tune(
        translate(source, registry=registry()),
        task.train.frame,
        task.train.target.astype(int),
        eval_set=(task.valid.frame, task.valid.target.astype(int)),
        random_state=seed,
        n_threads=arguments.threads,
        **settings,
    )
    return {
        "best_epoch": tuned.best_epoch,
        "gain": [round(tuned.gain, 6), round(tuned.gain_se, 6)],
        "valid_by_epoch": [round(epoch["valid_score"], 5) for epoch in tuned.history],
        "train_loss": [round(epoch["train_loss"], 5) for epoch in tuned.history[1:]],
        "seconds": round(sum(epoch["seconds"] for epoch in tuned.history), 1),
    }


if __name__ == "__main__":
    main()
