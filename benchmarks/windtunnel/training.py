"""Rows a second of a training step at each level: 100 trees of 64 leaves, 54 features, with the time of each part.

    python benchmarks/windtunnel/training.py
    python benchmarks/windtunnel/training.py --threads 1 --torch

A step is ``fine_tune``'s work on a batch: forward, loss, backward, AdamW. Levels take turns, medians are printed,
and the fused kernel's scores are compared with torch's before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import numpy as np
import torch
from lightgbm import LGBMClassifier
from mlsys_windtunnel.backends.soft import trees as soft_trees
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.backends.soft.soften import soften
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, TableRows
from mlsys_windtunnel.finetune.train import Trainer
from torch.profiler import ProfilerActivity, profile

GOALS = {"L2": 15_000, "L4": 8_000}  # rows a second on two cores
TOLERANCE = 1e-4  # of scores in float32


def main() -> None:
    """Time each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=1024, help="rows that go through the network at once")
    parser.add_argument("--gate", choices=["softmax", "tanh"], default="softmax")
    parser.add_argument("--torch", action="store_true", help="time torch's form of the trees as well as the kernel")
    parser.add_argument("--profile", action="store_true", help="print the operators that take the time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 54))
    y = (x[:, :20] @ rng.normal(size=20) + np.sin(3 * x[:, 20]) * x[:, 21] + rng.normal(size=len(x)) > 0).astype(int)
    source = LGBMClassifier(n_estimators=100, num_leaves=64, verbose=-1, n_jobs=arguments.threads).fit(x, y)
    module = translate(source)
    packed, target = torch.from_numpy(x), torch.from_numpy(y)
    batch = Batch(packed, target, torch.ones(len(x)), None).slice(0, arguments.batch)
    forms = ["kernel", "torch"] if arguments.torch else ["kernel"]
    trainers = {}
    for level in ("L1", "L2", "L3", "L4"):
        options = SoftOptions(level=level, gate=arguments.gate, init="source")
        tunable = Tunable(module.frontend, soften(module.network, packed, options))
        training = TrainingOptions(batch_size=arguments.batch, chunk_rows=arguments.chunk)
        trainers[level] = Trainer(tunable, TableRows(batch), None, training)
        compare(tunable, batch)
    taken: dict[tuple[str, str], list[float]] = {(level, form): [] for level in trainers for form in forms}
    for turn in range(arguments.rounds + 1):
        for (level, form), times in taken.items():
            with in_form(form):
                started = time.perf_counter()
                trainers[level]._step(batch, 1.0)
                if turn:
                    times.append(time.perf_counter() - started)
    print(f"{arguments.threads} threads, batch {arguments.batch}, chunks of {arguments.chunk}, {arguments.gate}")
    for (level, form), times in taken.items():
        rows = arguments.batch / statistics.median(times)
        goal = f", goal {GOALS[level]:,}" if level in GOALS and form == "kernel" else ""
        print(f"{level} {form:6} {rows:8,.0f} rows/s (best round {arguments.batch / min(times):,.0f}{goal})")
    if arguments.profile:
        for level, trainer in trainers.items():
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                trainer._step(batch, 1.0)
            print(level)
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))


def in_form(form: str) -> mock._patch:
    """Return a patch that computes the trees by the kernel or by torch."""
    return mock.patch.object(soft_trees, "is_native", soft_trees.is_native if form == "kernel" else lambda *_: False)


def compare(tunable: Tunable, batch: Batch) -> None:
    """Raise if the two forms answer differently."""
    answers = []
    for form in ("kernel", "torch"):
        with in_form(form), torch.no_grad():
            answers.append(tunable.soft(batch.x))
    worst = float((answers[0] - answers[1]).abs().max())
    if worst > TOLERANCE:
        raise SystemExit(f"the kernel's scores differ from torch's by {worst:.2g}")


if __name__ == "__main__":
    main()
