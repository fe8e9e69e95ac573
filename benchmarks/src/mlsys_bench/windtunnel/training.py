"""The suite ``windtunnel-training``: rows a second of a training step at each level, the kernel beside torch.

100 trees of 64 leaves, 54 features. A step is ``fine_tune``'s work on a batch: forward, loss, backward, AdamW. The
fused kernel's scores are compared with torch's before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

from mlsys_core.profiling.turns import take_turns
from mlsys_core.report import Section, Table

from mlsys_bench.harness.machine import LoadMeter

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

GOALS = {"L2": 15_000, "L4": 8_000}  # rows a second on two cores
TOLERANCE = 1e-4  # of scores in float32
LEVELS: tuple[Literal["L1", "L2", "L3", "L4"], ...] = ("L1", "L2", "L3", "L4")


def run(
    context: BenchContext, *, batch: int = 2048, chunk: int = 1024, gate: Literal["softmax", "tanh"] = "softmax"
) -> Section:
    """Time a step of each level and form in turns.

    Args:
        context: The suite's context; quick has a tenth of the trees and three rounds.
        batch: Rows of a step.
        chunk: Rows that go through the network at once.
        gate: ``softmax`` or ``tanh``.
    """
    from statistics import median

    import numpy as np
    import torch
    from lightgbm import LGBMClassifier
    from mlsys_windtunnel.backends.soft.options import SoftOptions
    from mlsys_windtunnel.backends.soft.soften import soften
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.finetune.options import TrainingOptions
    from mlsys_windtunnel.finetune.residual import Tunable
    from mlsys_windtunnel.finetune.rows import Batch, TableRows
    from mlsys_windtunnel.finetune.train import Trainer

    torch.set_num_threads(context.num_threads)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 54))
    y = (x[:, :20] @ rng.normal(size=20) + np.sin(3 * x[:, 20]) * x[:, 21] + rng.normal(size=len(x)) > 0).astype(int)
    num_trees = 10 if context.is_quick else 100
    module = translate(
        LGBMClassifier(n_estimators=num_trees, num_leaves=64, verbose=-1, n_jobs=context.num_threads).fit(x, y)
    )
    packed, target = torch.from_numpy(x), torch.from_numpy(y)
    rows = Batch(packed, target, torch.ones(len(x)), None).slice(0, batch)
    calls: dict[str, Callable[[], object]] = {}
    differences: dict[str, float] = {}
    for level in LEVELS:
        tunable = Tunable(
            module.frontend, soften(module.network, packed, SoftOptions(level=level, gate=gate, init="source"))
        )
        trainer = Trainer(tunable, TableRows(rows), None, TrainingOptions(batch_size=batch, chunk_rows=chunk))
        with torch.no_grad():
            scores = [in_form(form, partial(tunable.soft, rows.x)) for form in ("kernel", "torch")]
        differences[level] = float((scores[0] - scores[1]).abs().max())
        for form in ("kernel", "torch"):
            calls[f"{level} {form}"] = partial(in_form, form, partial(trainer._step, rows, 1.0))
    with LoadMeter() as meter:
        turns = take_turns(calls, turn_s=0.0, fewest_calls=1, num_rounds=3 if context.is_quick else 7)
    speeds = {name: [batch / seconds for turn in own for seconds in turn] for name, own in turns.items()}
    cells = [
        [
            level,
            *(f"{figure(speeds[f'{level} {form}']):,.0f}" for form in ("kernel", "torch") for figure in (median, max)),
            f"{GOALS[level]:,}" if level in GOALS else "",
            f"{differences[level]:.1e}",
        ]
        for level in LEVELS
    ]
    columns = ["level", "kernel, rows/s", "best", "torch, rows/s", "best", "goal", "difference"]
    return Section(
        "WindTunnel: a training step",
        [str(meter.load), Table(columns, cells, f"{context.num_threads} threads, {batch} rows, {gate}")],
        status="failed" if max(differences.values()) > TOLERANCE else "ok",
        data={"num_trees": num_trees, "batch": batch, "chunk": chunk, "gate": gate, "rows_per_s": speeds},
    )


def in_form(form: str, call: Callable[[], Any]) -> Any:
    """Call with the trees computed by the kernel or by torch."""
    from mlsys_windtunnel.backends.soft import trees

    if form == "kernel":
        return call()
    with mock.patch.object(trees, "is_native", return_value=False):
        return call()
