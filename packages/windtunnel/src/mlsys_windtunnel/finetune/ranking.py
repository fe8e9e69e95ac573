"""Fine-tuning of rankers: LambdaRank's loss over whole queries, and NDCG to choose the epoch by.

A ranker's targets are ``[rows, 2]``: how relevant a row is, and the number of its query. Batches hold whole queries, so
that each pair of a query's rows is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.backends.direct.watch import column_checks
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.finetune.metrics import lambda_rank
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.rows import Batch, TableRows, encode_rows, generator_of, with_offset
from mlsys_windtunnel.finetune.tune import FineTuned, head_of, on_device, run, tunable_of, with_changes
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import WindTunnelModule

HIGHEST = 30  # relevance: gains are 2 to its power


def fine_tune_ranker(
    module: WindTunnelModule,
    X: Table,  # noqa: N803 - scikit-learn's name
    y: Any,
    qid: Any,
    *,
    eval_set: tuple[Table, Any, Any] | None = None,
    soft: SoftOptions | None = None,
    options: TrainingOptions | None = None,
    **changes: Any,
) -> FineTuned:
    """Train a translated ranker further, towards LambdaRank's loss (Burges, 2010, "From RankNet to LambdaRank").

    Args:
        module: Translation of an ``LGBMRanker``, ``XGBRanker``, or any pipeline that answers one number a row.
        X: Raw rows.
        y: Relevance ``[rows]``, whole numbers from 0 to 30.
        qid: Query of each row ``[rows]``; a query's rows need not stand together.
        eval_set: Rows, relevance and queries by whose NDCG the best epoch is chosen; where its gain on the module
            itself is not above ``min_gain_se`` standard errors over the queries, that is kept.
        soft: Options that make the trees smooth.
        options: Options of training; ``loss`` and ``metric`` are those of rankers.
        changes: Fields of either options by name.

    Raises:
        InvalidInputError: an option is out of range, several processes, relevance that is no whole number, rows that
            the source refuses, a pipeline that answers classes or several numbers.

    Example:
        >>> tuned = fine_tune_ranker(translate(ranker), X, y, qid, eval_set=(X_val, y_val, qid_val))  # doctest: +SKIP
        >>> tuned.module.predict(X_test)  # doctest: +SKIP
    """
    soft, options = with_changes(soft or SoftOptions(), options or TrainingOptions(), changes)
    head = head_of(module)
    if head.classes or head.task != "regression" or (head.outputs or 1) != 1:
        raise InvalidInputError("a ranker answers one number a row; this pipeline does not: use fine_tune")
    if (options.loss, options.metric) != ("auto", "auto") or options.class_weight is not None:
        raise InvalidInputError("rankers learn LambdaRank's loss by NDCG: leave loss, metric and class_weight out")
    if options.n_processes > 1:
        raise InvalidInputError("rankers train in one process: batches hold whole queries")
    checks = column_checks(module.network)

    def encoded(x: Table, relevance: Any, query: Any) -> Batch:
        return encode_rows(module.frontend, head, x, targets_of(relevance, query), checks=checks)

    train = encoded(X, y, qid)
    evaluation = None if eval_set is None else encoded(*eval_set)
    options = replace(options, loss=lambda_rank, metric="ndcg", chunk_rows=len(train))

    def work() -> FineTuned:
        tunable = tunable_of(module, TableRows(train), soft, options)
        held = None if evaluation is None else with_offset(tunable, evaluation)
        return run(module, tunable, QueryRows(with_offset(tunable, train)), held, soft, options)

    return on_device(work, options)


def targets_of(relevance: Any, query: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return ``[rows, 2]``: relevance, and queries numbered from 0.

    Raises:
        InvalidInputError: other lengths, or relevance that is no whole number from 0 to 30.
    """
    levels, queries = np.asarray(relevance), np.asarray(query).reshape(-1)
    if levels.ndim != 1 or len(levels) != len(queries):
        raise InvalidInputError(f"y has shape {list(levels.shape)} and qid {list(queries.shape)}; both are [rows]")
    if levels.dtype.kind not in "biuf" or not np.isin(levels, np.arange(HIGHEST + 1)).all():
        raise InvalidInputError(f"y must hold relevance, whole numbers from 0 to {HIGHEST}")
    _, numbers = np.unique(queries, return_inverse=True)
    return np.column_stack([levels.astype(np.float64), numbers.astype(np.float64)])


class QueryRows(TableRows):
    """Rows in memory, in batches of whole queries."""

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield batches of about ``batch_size`` rows, as many as of single rows; empty ones are left out."""
        rows, query = self.rows, self.rows.target[:, 1].long()
        place = torch.randperm(int(query.max()) + 1, generator=generator_of(seed, epoch))[query]
        order = place.argsort(stable=True)
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order))
        first = torch.full((int(place.max()) + 1,), len(rows)).scatter_reduce(0, place, number, "amin")
        of_batch = first[place[order]] // batch_size  # a query belongs to the batch in which it begins
        for index in torch.unique(of_batch):
            yield rows[order[of_batch == index]]
