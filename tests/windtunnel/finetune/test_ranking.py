"""Rankers are fine-tuned by whole queries: the loss and NDCG beside their definitions, and a ranker that gains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRanker
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelRegressor, fine_tune, fine_tune_ranker, translate, update
from mlsys_windtunnel.finetune import metrics as ranks
from mlsys_windtunnel.finetune.ranking import QueryRows, targets_of
from mlsys_windtunnel.finetune.rows import Batch
from sklearn.metrics import ndcg_score

RNG = np.random.default_rng(0)
QID = RNG.permutation(np.repeat(np.arange(60), RNG.integers(1, 30, 60)))
X = RNG.normal(size=(len(QID), 4))
Y = np.digitize(X[:, 0] + X[:, 1] ** 2 + RNG.normal(size=len(QID)), [0.5, 1.5, 3])
ROWS = Batch(torch.from_numpy(X), torch.from_numpy(targets_of(Y, QID)), torch.ones(len(QID)), None)


@pytest.mark.parametrize("most_pairs", [1, 500, 4_000_000])
def test_the_loss_and_ndcg_are_those_of_their_definitions(most_pairs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "MOST_PAIRS", most_pairs)
    score = RNG.normal(size=len(QID))
    found = ranks.ndcg(torch.from_numpy(score[:, None]), ROWS.target).numpy()
    losses = ranks.lambda_rank(torch.from_numpy(score[:, None]), ROWS.target).numpy()
    expected = np.zeros(len(QID))
    for query in np.unique(QID):
        rows = np.flatnonzero(query == QID)
        gain, rank = 2.0 ** Y[rows] - 1, (-score[rows]).argsort().argsort()
        discount, best = 1 / np.log2(rank + 2), (-np.sort(-gain) / np.log2(np.arange(len(rows)) + 2)).sum()
        if len(rows) > 1 and best > 0:
            np.testing.assert_allclose(found[rows], ndcg_score(gain[None], score[None, rows]))
        else:
            np.testing.assert_array_equal(found[rows], 1)
        for one, i in enumerate(rows):
            for other, j in enumerate(rows):
                if gain[one] > gain[other]:
                    change = abs((gain[one] - gain[other]) * (discount[one] - discount[other])) / best
                    expected[i] += change * np.log1p(np.exp(score[j] - score[i]))
    np.testing.assert_allclose(losses, expected)


@pytest.mark.parametrize("batch_size", [1, 64, 10_000])
def test_batches_hold_whole_queries_and_all_rows(batch_size: int):
    batches = list(QueryRows(ROWS).batches(batch_size, seed=0, epoch=1))
    seen = [set(batch.target[:, 1].tolist()) for batch in batches]
    assert sum(map(len, seen)) == 60, "no query is in two batches"
    assert sum(map(len, batches)) == len(QID)
    again = torch.cat([batch.x for batch in QueryRows(ROWS).batches(batch_size, seed=0, epoch=2)])
    assert batch_size == 10_000 or not torch.equal(torch.cat([batch.x for batch in batches]), again)
    np.testing.assert_array_equal(np.sort(again.numpy(), axis=0), np.sort(X, axis=0))


def _sorted(part: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.flatnonzero(part)[QID[part].argsort(kind="stable")]
    return X[rows], Y[rows], QID[rows]


def test_a_ranker_gains_on_queries_held_out_and_its_source_is_kept_where_nothing_is():
    train, held = _sorted(QID < 40), _sorted(QID >= 40)
    source = LGBMRanker(n_estimators=3, num_leaves=4, verbose=-1, min_child_samples=5)
    source.fit(train[0], train[1], group=np.unique(train[2], return_counts=True)[1])
    start = translate(source)
    tuned = fine_tune_ranker(start, *train, eval_set=held, epochs=8, lr=2e-2, batch_size=128, level="L2")
    assert tuned.metric == "ndcg"
    assert tuned.best_epoch > 0
    target = torch.from_numpy(targets_of(*held[1:]))
    score, before = (
        ranks.ndcg(torch.from_numpy(module.predict(held[0]))[:, None], target) for module in (tuned.module, start)
    )
    by_query = np.unique(held[2], return_index=True)[1]
    np.testing.assert_allclose((score - before)[by_query].mean(), tuned.gain, atol=1e-6)
    assert tuned.gain > tuned.gain_se > 0
    kept = fine_tune_ranker(start, *train, eval_set=held, epochs=1, lr=1e-9)
    assert kept.best_epoch == 0
    np.testing.assert_array_equal(kept.module.predict(held[0]), source.predict(held[0]))


def test_what_is_no_ranker_or_no_query_is_refused():
    ranker = translate(LGBMRanker(n_estimators=2, verbose=-1).fit(X, Y, group=[len(Y)]))
    for x, y, qid, changes, message in (
        (X, Y + 0.5, QID, {}, "whole numbers from 0 to 30"),
        (X, Y, QID[1:], {}, r"both are \[rows\]"),
        (X, Y, QID, {"loss": "huber"}, "leave loss, metric and class_weight out"),
        (X, Y, QID, {"n_processes": 2}, "one process"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            fine_tune_ranker(ranker, x, y, qid, **changes)
    with pytest.raises(InvalidInputError, match="one number a row"):
        fine_tune_ranker(translate(LGBMClassifier(n_estimators=2, verbose=-1).fit(X, Y > 1)), X, Y, QID)
    with pytest.raises(InvalidInputError, match="use fine_tune_ranker"):
        fine_tune(ranker, X, Y, eval_set=(X, Y), metric="ndcg")
    with pytest.raises(InvalidInputError, match="LGBMRanker ranks rows within queries"):
        WindTunnelRegressor(LGBMRanker()).fit(X, Y)


def test_nothing_but_a_loss_by_name_trains_a_ranker_without_queries():
    train = _sorted(QID < 40)
    source = LGBMRanker(n_estimators=3, num_leaves=4, verbose=-1, min_child_samples=5)
    module = translate(source.fit(train[0], train[1], group=np.unique(train[2], return_counts=True)[1]))
    ranker = fine_tune_ranker(module, *train, epochs=1).module
    booster = translate(source.booster_)
    for each in (module, ranker, booster):
        for refused in (
            lambda each=each: fine_tune(each, *train[:2], epochs=1),
            lambda each=each: update(each, *train[:2]),
        ):
            with pytest.raises(InvalidInputError, match=r"ranks rows within queries.*fine_tune_ranker"):
                refused()
    assert fine_tune(module, *train[:2], epochs=1, loss="squared_error").best_epoch == 1
