"""Outside models, all in one table: how each is fitted, and with which candidates.

Everybody has three candidates of options, chosen between by validation; networks train for as many epochs as
WindTunnel and keep the best one.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlsys_bench.windtunnel.experiments.sources import NUM_TREES, frame_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mlsys_bench.windtunnel.experiments.sources import Coded, CodedTask

Scores = npt.NDArray[np.float64]
PATIENCE = 60  # rounds without a better AUC

LIGHTGBM: tuple[Mapping[str, Any], ...] = (
    {"learning_rate": 0.05, "num_leaves": 64, "min_child_samples": 50, "cat_smooth": 50, "n_estimators": 1500},
    {"learning_rate": 0.05, "num_leaves": 511, "min_child_samples": 20, "as_numbers": True, "n_estimators": 6000},
    {"learning_rate": 0.05, "num_leaves": 255, "min_child_samples": 50, "as_numbers": True, "n_estimators": 6000},
)
XGBOOST: tuple[Mapping[str, Any], ...] = (
    {"learning_rate": 0.08, "max_depth": 8, "min_child_weight": 10, "n_estimators": 800},
    {"learning_rate": 0.05, "max_depth": 10, "min_child_weight": 20, "n_estimators": 1200},
    {"learning_rate": 0.05, "max_depth": 12, "min_child_weight": 50, "n_estimators": 1200},
)
CATBOOST: tuple[Mapping[str, Any], ...] = (
    {"learning_rate": 0.1, "depth": 7, "iterations": 800},
    {"learning_rate": 0.1, "depth": 10, "iterations": 500},
    {"learning_rate": 0.05, "depth": 8, "iterations": 1500},
)


def lightgbm(task: CodedTask, options: Mapping[str, Any], *, seed: int, num_threads: int) -> tuple[Scores, Scores]:
    """Return scores of the validation and test rows; ``as_numbers`` gives codes as numbers in place of categories."""
    package = importlib.import_module("lightgbm")
    options = {"n_estimators": 100, **options}
    kind = "int64" if options.pop("as_numbers", False) else "category"
    rounds = options.pop("n_estimators")
    train, valid, test = (frame_of(part, task, kind) for part in (task.train, task.valid, task.test))
    data = package.Dataset(train, task.train.target)
    model = package.train(
        {
            "objective": "binary",
            "metric": "auc",
            "subsample": 0.8,
            "subsample_freq": 1,
            "colsample_bytree": 0.7,
            "num_threads": num_threads,
            "seed": seed,
            "verbose": -1,
            **options,
        },
        data,
        rounds,
        valid_sets=[package.Dataset(valid, task.valid.target, reference=data)],
        callbacks=[package.early_stopping(PATIENCE, verbose=False)],
    )
    return model.predict(valid), model.predict(test)


def xgboost(task: CodedTask, options: Mapping[str, Any], *, seed: int, num_threads: int) -> tuple[Scores, Scores]:
    """Return scores of the validation and test rows."""
    train, valid, test = (frame_of(part, task, "category") for part in (task.train, task.valid, task.test))
    model = importlib.import_module("xgboost").XGBClassifier(
        subsample=0.8,
        colsample_bytree=0.7,
        enable_categorical=True,
        tree_method="hist",
        eval_metric="auc",
        early_stopping_rounds=PATIENCE,
        n_jobs=num_threads,
        random_state=seed,
        **options,
    )
    model.fit(train, task.train.target, eval_set=[(valid, task.valid.target)], verbose=False)
    return model.predict_proba(valid)[:, 1], model.predict_proba(test)[:, 1]


def catboost(task: CodedTask, options: Mapping[str, Any], *, seed: int, num_threads: int) -> tuple[Scores, Scores]:
    """Return scores of the validation and test rows."""
    train, valid, test = (frame_of(part, task, "int64") for part in (task.train, task.valid, task.test))
    model = importlib.import_module("catboost").CatBoostClassifier(
        eval_metric="AUC",
        early_stopping_rounds=PATIENCE,
        max_ctr_complexity=2,
        cat_features=[name for name in train.columns if name.startswith("word")],
        thread_count=num_threads,
        random_seed=seed,
        verbose=0,
        allow_writing_files=False,
        **options,
    )
    model.fit(train, task.train.target, eval_set=(valid, task.valid.target))
    return model.predict_proba(valid)[:, 1], model.predict_proba(test)[:, 1]


NETWORK_RATES: tuple[Mapping[str, Any], ...] = ({"lr": 1e-3}, {"lr": 3e-3}, {"lr": 3e-3, "dropout": 0.3})
DEEPGBM_RATES: tuple[Mapping[str, Any], ...] = ({"lr": 1e-3}, {"lr": 3e-3}, {"lr": 1e-2})
BATCH_ROWS, EVALUATION_ROWS = 1024, 8192


@dataclass(frozen=True, slots=True)
class Budget:
    """Resources that a model may use."""

    epochs: int  # of networks
    num_threads: int
    seed: int
    num_trees: int = NUM_TREES  # of the trees that a network distils


@dataclass(frozen=True, slots=True)
class Outside:
    """A model that is no translation."""

    candidates: tuple[Mapping[str, Any], ...]
    fit: Callable[[CodedTask, Mapping[str, Any], Budget], tuple[Scores, Scores]]  # scores of valid and test rows
    package: str | None = None  # that must be installed, where it is no dependency


def _boosted(fit: Callable[..., tuple[Scores, Scores]]) -> Callable[..., tuple[Scores, Scores]]:
    def run(task: CodedTask, options: Mapping[str, Any], budget: Budget) -> tuple[Scores, Scores]:
        return fit(task, options, seed=budget.seed, num_threads=budget.num_threads)

    return run


def _network(name: str) -> Callable[..., tuple[Scores, Scores]]:
    def run(task: CodedTask, options: Mapping[str, Any], budget: Budget) -> tuple[Scores, Scores]:
        import torch

        from mlsys_bench.windtunnel.experiments import networks

        torch.manual_seed(budget.seed)
        options = dict(options)
        rate = options.pop("lr")
        kind = networks.Mlp if name == "mlp" else networks.TabM
        model = kind(task.train, task.cardinalities, **options)
        target = torch.from_numpy(task.train.target).float()

        def loss(rows: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
            scores = model(*inputs)
            wanted = target[rows].unsqueeze(1).expand_as(scores)
            return torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)

        return train(model, loss, task, rate, budget)

    return run


def _deepgbm(task: CodedTask, options: Mapping[str, Any], budget: Budget) -> tuple[Scores, Scores]:
    import torch

    from mlsys_bench.windtunnel.experiments.networks import DeepGbm, leaf_indices
    from mlsys_bench.windtunnel.experiments.sources import make_trees

    torch.manual_seed(budget.seed)
    trees = make_trees(seed=budget.seed, num_threads=budget.num_threads, num_trees=budget.num_trees)
    trees.fit(frame_of(task.train, task, "int64"), task.train.target)
    model = DeepGbm(task, trees)
    leaves = leaf_indices(trees, task.train, task)
    target = torch.from_numpy(task.train.target).float()

    def loss(rows: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return model.loss(*inputs, leaves[rows], target[rows])

    return train(model, loss, task, options["lr"], budget)


OUTSIDE: dict[str, Outside] = {
    "lightgbm": Outside(LIGHTGBM, _boosted(lightgbm)),
    "xgboost": Outside(XGBOOST, _boosted(xgboost), package="xgboost"),
    "catboost": Outside(CATBOOST, _boosted(catboost), package="catboost"),
    "mlp": Outside(NETWORK_RATES, _network("mlp")),
    "tabm": Outside(NETWORK_RATES, _network("tabm")),
    "deepgbm": Outside(DEEPGBM_RATES, _deepgbm),
}


def train(
    model: nn.Module,
    loss: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor],
    task: CodedTask,
    rate: float,
    budget: Budget,
) -> tuple[Scores, Scores]:
    """Train by AdamW with OneCycle; the epoch with the best validation AUC answers."""
    import torch
    from sklearn.metrics import roc_auc_score

    from mlsys_bench.windtunnel.experiments.networks import tensors

    numbers, codes = tensors(task.train)
    generator = torch.Generator().manual_seed(budget.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-5)
    num_steps = budget.epochs * -(-len(codes) // BATCH_ROWS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=num_steps + 1, pct_start=0.1)
    best, state = -np.inf, copy.deepcopy(model.state_dict())
    for _ in range(budget.epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(codes), generator=generator), BATCH_ROWS):
            optimizer.zero_grad()
            torch.autograd.backward(loss(rows, (numbers[rows], codes[rows])))
            optimizer.step()
            schedule.step()
        score = roc_auc_score(task.valid.target, answer(model, task.valid))
        if score > best:
            best, state = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    return answer(model, task.valid), answer(model, task.test)


def answer(model: nn.Module, part: Coded) -> Scores:
    """Return probabilities ``[rows]``, in evaluation mode."""
    import torch

    from mlsys_bench.windtunnel.experiments.networks import probabilities, tensors

    model.eval()
    inputs = tensors(part)
    with torch.no_grad():
        parts = [
            probabilities(model(*(tensor[at : at + EVALUATION_ROWS] for tensor in inputs)))
            for at in range(0, len(part.target), EVALUATION_ROWS)
        ]
    return np.concatenate(parts)
