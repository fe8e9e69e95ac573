"""Counts of rows nearby: what is counted, and that a pipeline with them is translated and trained as a whole."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_bench.windtunnel.experiments.data import Task
from mlsys_bench.windtunnel.experiments.nearby import CountTable, NearbyCounts, registry, with_counts
from mlsys_bench.windtunnel.experiments.sources import code_task, make_columns, make_source
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.tune import fine_tune
from sklearn.base import clone


@given(
    rows=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-30, 30)), min_size=1, max_size=40),
    width=st.integers(1, 20),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    least=st.integers(1, 3),
)
def test_counts_are_those_of_the_rows(rows: list[tuple[str, int]], width: int, before: int, after: int, least: int):
    table = np.array(rows, dtype=object)
    encoder = NearbyCounts(width, before=before, after=after, min_frequency=least)
    others = np.expm1(encoder.fit_transform(table)).round().astype(int)
    counts = np.expm1(encoder.transform(table)).round().astype(int)
    low = min(number for _, number in rows)
    slots = [(word, (number - low) // width) for word, number in rows]
    words = [word for word, _ in rows]
    for (word, slot), found in zip(slots, counts, strict=True):
        expected = [slots.count((word, slot + at)) for at in range(-before, after + 1)]
        assert found.tolist() == (expected if words.count(word) >= least else [0] * len(expected))
    assert np.array_equal(np.delete(others, before, axis=1), np.delete(counts, before, axis=1))
    assert np.array_equal(others[:, before], np.maximum(counts[:, before] - 1, 0)), "a row is not among its neighbours"
    module = CountTable(encoder.table_, before)
    cells = torch.from_numpy(encoder.lookup_(table))
    assert np.array_equal(np.expm1(module.train()(cells).numpy()).round(), others)
    assert np.array_equal(module.eval()(cells).numpy(), encoder.transform(table))


def test_strange_rows():
    encoder = NearbyCounts(10.0, before=1, after=1).fit(np.array([["a", 0], ["a", 25]], dtype=object))
    strange = np.array([["b", 0], ["a", -100], ["a", 100]], dtype=object)
    assert np.expm1(encoder.transform(strange)).round().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 0]], "ends stand in"
    assert clone(encoder).get_params() == encoder.get_params()


def test_bad_parameters():
    rows = np.array([["a", 0, 1]], dtype=object)
    with pytest.raises(InvalidInputError, match="3 columns"):
        NearbyCounts().fit(rows)
    with pytest.raises(InvalidInputError, match="width"):
        NearbyCounts(0.0).fit(rows[:, :2])
    with pytest.raises(InvalidInputError, match="before"):
        NearbyCounts(before=-1).fit(rows[:, :2])


def test_it_is_translated_and_trained(towns: Task):
    source = make_source(towns, seed=0, num_threads=1, num_trees=5)
    source.fit(towns.train.frame, towns.train.target.astype(int))
    expected = source.predict_proba(towns.test.frame)
    module = translate(source, registry=registry())
    assert module.frontend.fallbacks == ()
    assert np.abs(module.predict_proba(towns.test.frame) - expected).max() < 1e-9
    evaluation = towns.valid.frame, towns.valid.target.astype(int)
    options = {"eval_set": evaluation, "min_gain_se": 0.0, "init": "source", "lr": 0.01, "epochs": 3}
    tuned = fine_tune(module, towns.train.frame, towns.train.target.astype(int), **options)
    assert tuned.best_epoch > 0
    (counts,) = (each for each in tuned.module.network.modules() if isinstance(each, CountTable))
    assert not counts.training
    assert np.array_equal(counts.table.numpy(), source[0].named_transformers_["town-one"].table_), "counts stay"


def test_outside_models_are_given_the_same_counts(towns: Task):
    task = with_counts(towns)
    assert task.numbers == ("one", "two", *(f"town-one__town_one_{at}" for at in ("-2", "-1", "+0", "+1")))
    coded = code_task(task)
    columns = make_columns(towns)
    assert np.array_equal(coded.train.numbers[:, 2:], columns.fit_transform(towns.train.frame)[:, -4:])
    assert np.array_equal(coded.test.numbers[:, 2:], columns.transform(towns.test.frame)[:, -4:])


def test_names(towns: Task):
    frame = towns.train.frame[["town", "one"]]
    names = NearbyCounts(0.5, before=1, after=1).fit(frame).get_feature_names_out()
    assert names.tolist() == ["town_one_-1", "town_one_+0", "town_one_+1"]
    assert isinstance(frame, pd.DataFrame)
