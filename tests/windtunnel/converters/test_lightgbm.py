"""LightGBM's models answer the same after translation: objectives, what is missing, categories, boosting types."""

from __future__ import annotations

import lightgbm
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.lightgbm import read_model
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.finetune.tune import fine_tune
from mlsys_windtunnel.modules.tree.trees import Trees
from mlsys_windtunnel.parse.load import load_estimator
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

pytestmark = pytest.mark.filterwarnings("ignore:X does not have valid feature names")

SMALL = {"n_estimators": 15, "num_leaves": 12, "min_child_samples": 5, "verbose": -1, "n_jobs": 1, "random_state": 0}
CATEGORIES = {"min_data_per_group": 1, "cat_smooth": 0.1, "cat_l2": 0.1}  # so that small data are split on categories


def _trees(module) -> Trees:
    return next(part for part in module.modules() if isinstance(part, Trees))


@pytest.mark.parametrize(
    "objective",
    [
        *("regression", "regression_l1", "huber", "fair", "poisson", "quantile", "mape", "gamma", "tweedie"),
        *("binary", "cross_entropy", "cross_entropy_lambda"),
    ],
)
def test_objectives_of_regression(same_answers, x, fresh, objective):
    y = (
        (x[:, 0] > 0).astype(float)
        if objective in ("binary", "cross_entropy", "cross_entropy_lambda")
        else x[:, 0] ** 2
    )
    same_answers(lightgbm.LGBMRegressor(objective=objective, **SMALL).fit(x, y), fresh)


def test_square_root_of_the_target(same_answers, x, fresh):
    same_answers(lightgbm.LGBMRegressor(reg_sqrt=True, **SMALL).fit(x, x[:, 0] ** 3 * 10), fresh)


@pytest.mark.parametrize("objective", ["binary", "cross_entropy"])
@pytest.mark.parametrize("sigmoid", [1.0, 2.5])
def test_two_classes(same_answers, x, fresh, objective, sigmoid):
    y = np.where(x[:, 0] + x[:, 1] > 0, "yes", "no")
    same_answers(lightgbm.LGBMClassifier(objective=objective, sigmoid=sigmoid, **SMALL).fit(x, y), fresh)


@pytest.mark.parametrize("objective", ["multiclass", "multiclassova"])
@pytest.mark.parametrize("sigmoid", [1.0, 2.5])
def test_several_classes(same_answers, x, fresh, objective, sigmoid):
    y = np.array(["a", "c", "b", "d"])[np.digitize(x[:, 0], [-1, 0, 1])]
    same_answers(lightgbm.LGBMClassifier(objective=objective, sigmoid=sigmoid, **SMALL).fit(x, y), fresh)


def test_one_class_only(same_answers, x, fresh):
    source = lightgbm.LGBMClassifier(**SMALL).fit(x, np.zeros(400, int))
    module = same_answers(source, fresh)
    assert module.predict(fresh).tolist() == [0] * 200


def test_ranking_scores(same_answers, x, fresh):
    y = np.digitize(x[:, 0], [-1, 0, 1])
    for objective in ("lambdarank", "rank_xendcg"):
        same_answers(lightgbm.LGBMRanker(objective=objective, **SMALL).fit(x, y, group=[20] * 20), fresh)


@pytest.mark.parametrize("boosting", ["gbdt", "dart", "rf"])
@pytest.mark.parametrize("kind", [lightgbm.LGBMClassifier, lightgbm.LGBMRegressor])
def test_boosting_types(same_answers, x, fresh, boosting, kind):
    source = kind(boosting_type=boosting, subsample=0.7, subsample_freq=1, **SMALL)
    same_answers(source.fit(x, np.digitize(x[:, 0], [-0.5, 0.5])), fresh)


@pytest.mark.parametrize("options", [{}, {"zero_as_missing": True}, {"use_missing": False}])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_missing_parts(same_in_each_layout, x, fresh, options, share):
    """Zero, the numbers about 1e-35 that LightGBM takes for zero, NaN whether training had it or not, infinities."""
    rng = np.random.default_rng(0)
    x = np.where(rng.random(x.shape) < 0.3, 0, x)
    y = x[:, 0] + (x[:, 1] == 0)
    x = np.where(rng.random(x.shape) < share, np.nan, x)
    special = [0.0, -0.0, 1e-35, 1.1e-35, -1e-35, 1e-36, np.nan, np.inf, -np.inf, float(np.float32(1e-35))]
    fresh = np.where(rng.random(fresh.shape) < 0.5, rng.choice(special, fresh.shape), fresh)
    same_in_each_layout(lightgbm.LGBMRegressor(**SMALL, **options).fit(x, y), fresh, tolerance=1e-12)


def test_ties_at_thresholds(same_in_each_layout, x):
    source = lightgbm.LGBMRegressor(**SMALL).fit(np.round(x, 1), x[:, 0] + x[:, 1] * x[:, 2])
    thresholds = read_model(source.booster_).ensemble.threshold
    rows = np.concatenate([thresholds, np.nextafter(thresholds, 9), np.nextafter(thresholds, -9)])
    rows = np.random.default_rng(0).choice(rows, (300, 5))
    same_in_each_layout(source, rows, tolerance=1e-12)


def test_categories_given_as_numbers(same_in_each_layout, x, fresh):
    """Unseen, negative, fractional and missing codes go where LightGBM sends them."""
    rng = np.random.default_rng(0)
    x[:, 1], x[:, 3] = rng.integers(0, 90, 400), rng.integers(0, 3, 400)
    y = x[:, 0] + (x[:, 1] % 3 == 0) + (x[:, 3] == 1)
    source = lightgbm.LGBMRegressor(**SMALL, **CATEGORIES).fit(x, y, categorical_feature=[1, 3])
    assert len(read_model(source.booster_).ensemble.categorical_features) == 2
    fresh[:, 1] = rng.choice([*range(95), -1, -0.5, 0.5, 7.9, 1e9, np.nan], 200)
    fresh[:, 3] = rng.choice([0, 1, 2, 3, -7, np.nan], 200)
    same_in_each_layout(source, fresh, tolerance=1e-12)


def _frame(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "number": rng.normal(size=300),
            "city": pd.Categorical(rng.choice(["rome", "oslo", "bonn", None], 300)),
            "whole": rng.integers(0, 5, 300),
            "constant": pd.Categorical(["same"] * 300),
            "code": pd.Categorical(rng.choice([10, 30, 20], 300)),
            "flag": rng.random(300) < 0.5,
        }
    )


def _target(frame: pd.DataFrame) -> np.ndarray:
    return (frame.number + (frame.city == "oslo") * 2 + (frame.code.astype(int) == 30) + frame.flag).to_numpy()


def test_pandas_categories(same_in_each_layout):
    """Text, whole numbers, missing, and a column that never varies; their codes come from the host."""
    frame, fresh = _frame(0), _frame(1)
    source = lightgbm.LGBMRegressor(**SMALL, **CATEGORIES).fit(frame, _target(frame))
    fresh["city"] = pd.Categorical(fresh.city.astype(object).where(fresh.number < 1, "lima"))  # never seen
    module = same_in_each_layout(source, fresh, tolerance=1e-12)
    assert not module.frontend.is_trivial
    by_name = {name: fresh[name] for name in fresh.columns[::-1]}
    np.testing.assert_allclose(module.predict(by_name), source.predict(fresh), atol=1e-12)
    with pytest.raises(InvalidInputError, match="same order"):  # LightGBM itself takes them for one another
        module.predict(fresh[fresh.columns[::-1]])


def test_pandas_categories_in_a_column_transformer(same_answers):
    frame, fresh = _frame(0), _frame(1)
    columns = ColumnTransformer(
        [("n", StandardScaler(), ["number"]), ("c", "passthrough", ["city", "whole"])], verbose_feature_names_out=False
    ).set_output(transform="pandas")
    source = make_pipeline(columns, lightgbm.LGBMClassifier(**SMALL, **CATEGORIES))
    source.fit(frame, _target(frame) > 1)
    assert source[-1].booster_.pandas_categorical
    same_answers(source, fresh)


def test_pandas_columns_without_categories(same_answers):
    frame, fresh = _frame(0)[["number", "whole", "flag"]], _frame(1)[["number", "whole", "flag"]]
    frame.loc[:50, "number"] = fresh.loc[:50, "number"] = np.nan
    same_answers(lightgbm.LGBMRegressor(**SMALL).fit(frame, np.arange(300.0)), fresh)


def test_ordered_categories_are_refused_since_the_model_does_not_name_them():
    frame = _frame(0)[["number", "city"]].assign(size=pd.Categorical(["s", "l"] * 150, ordered=True))
    source = lightgbm.LGBMRegressor(**SMALL).fit(frame, _target(_frame(0)))
    with pytest.raises(InvalidInputError, match="ordered categories"):
        translate(source)


def test_text_in_a_column_of_numbers_is_refused():
    frame = _frame(0)[["number", "city"]]
    module = translate(lightgbm.LGBMRegressor(**SMALL, **CATEGORIES).fit(frame, frame.number))
    with pytest.raises(InvalidInputError, match="takes columns of int, float or bool"):
        module.predict(frame.assign(number="many"))


def test_early_stopping_answers_with_the_best_iteration(same_answers, x, fresh):
    y = x[:, 0] + np.random.default_rng(0).normal(size=400)
    source = lightgbm.LGBMRegressor(**{**SMALL, "n_estimators": 200, "learning_rate": 0.1})
    source.fit(x[:300], y[:300], eval_set=[(x[300:], y[300:])], callbacks=[lightgbm.early_stopping(5, verbose=False)])
    module = same_answers(source, fresh)
    assert len(_trees(module).root) == source.best_iteration_ < 200
    source.booster_.best_iteration = 3
    assert len(_trees(same_answers(source, fresh)).root) == 3


def test_training_on_from_another_model(same_answers, x, fresh):
    first = lightgbm.LGBMRegressor(**SMALL).fit(x, x[:, 0])
    x = np.where(np.random.default_rng(0).random(x.shape) < 0.2, np.nan, x)
    source = lightgbm.LGBMRegressor(**SMALL).fit(x, np.nan_to_num(x[:, 1]), init_model=first)
    fresh[::3, 1] = fresh[::4, 0] = np.nan
    same_answers(source, fresh)


def test_zeros_that_are_missing_in_some_trees_only_are_refused(x):
    first = lightgbm.LGBMRegressor(**SMALL).fit(x, x[:, 0])
    source = lightgbm.LGBMRegressor(**SMALL, zero_as_missing=True)
    x = np.where(np.random.default_rng(0).random(x.shape) < 0.5, 0, x)
    with pytest.raises(InvalidInputError, match="same zero_as_missing"):
        translate(source.fit(x, x[:, 0], init_model=first))


def test_other_inputs(same_answers, x, fresh):
    source = lightgbm.LGBMClassifier(**SMALL).fit(np.maximum(x, 0), x[:, 0] > 0)
    fresh = np.maximum(fresh, 0)
    same_answers(source, fresh.astype(np.float32))
    same_answers(source, fresh[:1])
    same_answers(source, scipy.sparse.csr_matrix(fresh))
    same_answers(lightgbm.LGBMRegressor(**SMALL).fit(x[:, :1], x[:, 0]), fresh[:, :1])


def test_float32_rounds_inputs_and_thresholds(x, fresh):
    source = lightgbm.LGBMRegressor(**SMALL).fit(x, x[:, 0])
    module = translate(source, dtype=torch.float32)
    np.testing.assert_allclose(module.predict(fresh), source.predict(fresh), atol=1e-5)


@pytest.mark.parametrize(("leaves", "layout"), [(4, "bits"), (31, "bits"), (100, "bits"), (400, "walk")])
def test_trees_of_any_size(same_answers, leaves, layout):
    rng = np.random.default_rng(0)
    x, fresh = rng.normal(size=(2000, 6)), rng.normal(size=(300, 6))
    source = lightgbm.LGBMRegressor(**{**SMALL, "n_estimators": 60, "num_leaves": leaves, "min_child_samples": 1})
    module = same_answers(source.fit(x, np.sin(x * 3).sum(1)), fresh)
    assert _trees(module).layout == layout


def _squared(y, raw):
    return raw - y, np.ones_like(raw)


def _logistic(y, raw):
    share = 1 / (1 + np.exp(-raw))
    return share - y, share * (1 - share)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_linear_leaves(same_answers, x, fresh, share):
    rng = np.random.default_rng(0)
    rows = np.where(rng.random(fresh.shape) < share, np.nan, fresh)
    train = np.where(rng.random(x.shape) < share, np.nan, x)
    source = lightgbm.LGBMRegressor(linear_tree=True, **SMALL).fit(train, x[:, 0] + x[:, 1] ** 2)
    module = same_answers(source, rows)
    rows[0, 0] = np.inf  # is multiplied like any number
    np.testing.assert_allclose(module.predict(rows), source.predict(rows), atol=1e-9)
    classes = np.digitize(x[:, 0], [-0.5, 0.5])
    same_answers(lightgbm.LGBMClassifier(linear_tree=True, **SMALL).fit(train, classes), rows[1:])


def test_linear_leaves_are_trained_and_exported(tmp_path, x):
    source = lightgbm.LGBMRegressor(linear_tree=True, **SMALL).fit(x, x[:, 0] + x[:, 1] ** 2)
    module = translate(source)
    tuned = fine_tune(module, x, x[:, 0], level="L4", epochs=2, lr=1e-2)
    assert np.abs(tuned.module.predict(x) - source.predict(x)).max() > 1e-4
    export_pt2(module, tmp_path / "m.pt2", methods=["predict"])
    np.testing.assert_allclose(load_pt2(tmp_path / "m.pt2").predict(x), source.predict(x), atol=1e-9)


def test_objectives_of_ones_own_are_answered_with_raw_scores(same_answers, x, fresh):
    y = (x[:, 0] > 0).astype(int)
    source = lightgbm.LGBMClassifier(objective=_logistic, **SMALL).fit(x, y)
    module = same_answers(source, fresh)
    assert module.predict(fresh).min() < 0 < module.predict_proba(fresh).max()
    same_answers(lightgbm.LGBMRegressor(objective=_squared, **SMALL).fit(x, x[:, 0]), fresh)


@pytest.mark.parametrize(
    ("parameters", "target"),
    [
        ({"objective": "binary"}, lambda x: (x[:, 0] > 0).astype(int)),
        ({"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.7}, lambda x: x[:, 0] > 0),
        ({"objective": "poisson"}, lambda x: np.abs(x[:, 0])),
        ({"objective": "multiclass", "num_class": 3}, lambda x: np.digitize(x[:, 0], [-0.5, 0.5])),
        ({"objective": "multiclassova", "num_class": 3}, lambda x: np.digitize(x[:, 0], [-0.5, 0.5])),
        ({"objective": lambda raw, data: _squared(data.get_label(), raw)}, lambda x: x[:, 0]),
        ({"objective": "regression", "linear_tree": True}, lambda x: x[:, 0]),
    ],
)
def test_boosters(same_answers, x, fresh, parameters, target):
    booster = lightgbm.train({"verbose": -1, "num_threads": 1, **parameters}, lightgbm.Dataset(x, target(x)), 8)
    module = same_answers(booster, fresh)
    np.testing.assert_allclose(module.predict(fresh), booster.predict(fresh), atol=1e-9)


def test_boosters_of_frames_with_categories(same_answers, tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"number": rng.normal(size=300), "city": pd.Categorical(rng.choice(["rome", "oslo"], 300))})
    booster = lightgbm.train({"verbose": -1}, lightgbm.Dataset(frame, frame.number + (frame.city == "oslo")), 5)
    module = same_answers(booster, frame)
    with pytest.raises(InvalidInputError, match="same order"):
        module.predict(frame[["city", "number"]])
    booster.save_model(tmp_path / "model.txt")
    with pytest.raises(InvalidInputError, match="--trust-code"):
        load_estimator(tmp_path / "model.txt")
    loaded = load_estimator(tmp_path / "model.txt", trust_code=True)
    np.testing.assert_allclose(translate(loaded).predict(frame), booster.predict(frame), atol=1e-9)


def test_a_classifier_with_the_objective_of_a_regressor_is_refused_by_option(x):
    source = lightgbm.LGBMClassifier(objective="huber", **SMALL).fit(x, (x[:, 0] > 0).astype(int))
    with pytest.raises(InvalidInputError, match="declines objective='huber' of a classifier; fit it with binary"):
        translate(source)


def test_prediction_that_stops_early_is_refused(x):
    source = lightgbm.LGBMClassifier(pred_early_stop=True, **SMALL).fit(x, x[:, 0] > 0)
    with pytest.raises(InvalidInputError, match="declines pred_early_stop=True"):
        translate(source)


def test_columns_of_arrow_are_refused_as_the_source_refuses_them(x):
    frame = pd.DataFrame(x[:50])
    source = lightgbm.LGBMRegressor(**SMALL).fit(frame, x[:50, 0])
    arrow = frame.convert_dtypes(dtype_backend="pyarrow")
    for refusing, error in (
        (source, ValueError),
        (source.booster_, ValueError),
        (translate(source), InvalidInputError),
    ):
        with pytest.raises(error, match="int, float or bool"):
            refusing.predict(arrow)
