"""Updates by gradients, for pipelines that have no closed form: folds of the labels choose the number of epochs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, TableRows, with_offset
from mlsys_windtunnel.finetune.train import Trainer
from mlsys_windtunnel.finetune.tune import on_device, tunable_of
from mlsys_windtunnel.module import WindTunnelModule

if TYPE_CHECKING:
    from mlsys_windtunnel.finetune.update import UpdateOptions


def train_on(
    start: WindTunnelModule, rows: Batch, options: UpdateOptions
) -> tuple[WindTunnelModule, int, float, float]:
    """Train a copy of the module on rows.

    Returns:
        The module, ``start`` itself where nothing is surely gained; the epochs; the gain and its standard error.
    """
    training = TrainingOptions(
        epochs=options.epochs,
        lr=options.lr,
        batch_size=options.batch_size,
        schedule="constant",
        random_state=options.random_state,
        device=options.device,
        keeps_interrupted=False,
    )
    soft = SoftOptions(level=options.level)  # type: ignore[arg-type]  # it checks the name

    def work() -> tuple[WindTunnelModule, int, float, float]:
        tunable = tunable_of(start, TableRows(rows), soft, training)
        every = with_offset(tunable, rows)
        epochs, gain, error = _epochs(tunable, every, options, training)
        module = start
        if epochs:
            trainer = Trainer(tunable, TableRows(every), None, replace(training, epochs=epochs))
            trainer.run()
            tunable.move("cpu")
            module = tunable.module()
        return module, epochs, gain, error

    return on_device(work, training)  # type: ignore[return-value, arg-type]


def _epochs(
    tunable: Tunable, rows: Batch, options: UpdateOptions, training: TrainingOptions
) -> tuple[int, float, float]:
    """Return the epochs that gain the most on held-out folds (0: none for sure), the gain and its standard error."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.random_state))
    parts = torch.tensor_split(order, options.folds)
    curves, sizes = [], []
    for number, held in enumerate(parts):
        kept = torch.cat([part for index, part in enumerate(parts) if index != number])
        trainer = Trainer(copy.deepcopy(tunable), TableRows(_taken(rows, kept)), _taken(rows, held), training)
        losses = np.array([epoch["valid_loss"] for epoch in trainer.run().history])
        curves.append(losses[0] - losses)
        sizes.append(float(rows.weight[held].sum()))
    gains = np.average(curves, axis=0, weights=sizes)
    best = int(np.nanargmax(gains))
    error = float(np.std([curve[best] for curve in curves], ddof=1) / math.sqrt(options.folds))
    is_sure = best > 0 and gains[best] > options.min_gain_se * error
    return (best if is_sure else 0), float(gains[best]), error


def _taken(rows: Batch, indices: Tensor) -> Batch:
    offset = None if rows.offset is None else rows.offset[indices]
    return Batch(rows.x[indices], rows.target[indices], rows.weight[indices], offset)
