"""XGBoost's models answer the same after translation. They sum in float32, so equal means to about 1e-6."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.tree.trees import Trees
from mlsys_windtunnel.parse.boosters import as_estimator
from mlsys_windtunnel.parse.load import load_estimator

xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install xgboost")

SMALL = {"n_estimators": 10, "max_depth": 4, "random_state": 0, "n_jobs": 1}


@pytest.mark.parametrize(
    "objective",
    [
        *("reg:squarederror", "reg:squaredlogerror", "reg:absoluteerror", "reg:pseudohubererror", "reg:logistic"),
        *("count:poisson", "reg:gamma", "reg:tweedie", "binary:logistic"),
    ],
)
def test_objectives_of_regression(same_answers, x, fresh, objective):
    y = (x[:, 0] > 0).astype(float) if "logistic" in objective else x[:, 0] ** 2
    same_answers(xgboost.XGBRegressor(objective=objective, **SMALL).fit(x, y), fresh)


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "multi:softmax"])
def test_classifiers(same_answers, x, fresh, objective):
    y = np.digitize(x[:, 0], [0.0] if objective == "binary:logistic" else [-0.5, 0.5])
    same_answers(xgboost.XGBClassifier(objective=objective, **SMALL).fit(x, y), fresh)


def test_rankers_forests_and_several_targets(same_answers, x, fresh):
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    same_answers(xgboost.XGBRanker(**SMALL).fit(x, y, group=[20] * 20), fresh)
    same_answers(xgboost.XGBRFClassifier(**SMALL).fit(x, y), fresh)
    same_answers(xgboost.XGBRFRegressor(**SMALL).fit(x, x[:, 0]), fresh)
    same_answers(xgboost.XGBRegressor(**SMALL).fit(x, x[:, :2]), fresh)
    same_answers(xgboost.XGBRegressor(num_parallel_tree=3, subsample=0.5, **SMALL).fit(x, x[:, :2]), fresh)
    same_answers(xgboost.XGBRegressor(booster="dart", rate_drop=0.5, **SMALL).fit(x, x[:, 0]), fresh)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_missing_values_and_ties(same_in_each_layout, x, fresh, share):
    rng = np.random.default_rng(0)
    x = np.where(rng.random(x.shape) < share, np.nan, np.round(x, 1))
    source = xgboost.XGBRegressor(**SMALL).fit(x, np.nan_to_num(x[:, 0]) + np.isnan(x[:, 1]))
    (trees,) = (part for part in translate(source).modules() if isinstance(part, Trees))
    at = np.nextafter(trees.ensemble.threshold.astype(np.float32), np.float32(np.inf))  # "<" this
    special = np.concatenate([at, np.nextafter(at, np.float32(-9)), [np.nan, np.inf, -np.inf]])
    rows = np.where(rng.random(fresh.shape) < 0.7, rng.choice(special, fresh.shape), fresh)
    same_in_each_layout(source, rows, tolerance=1e-5)


def test_categories(same_answers):
    def frame(seed: int) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        return pd.DataFrame(
            {
                "number": rng.normal(size=300),
                "city": pd.Categorical(rng.choice(["rome", "oslo", "bonn", None], 300)),
                "code": pd.Categorical(rng.choice([10, 30, 20], 300)),
            }
        )

    train, fresh = frame(0), frame(1)
    target = train.number + (train.city == "oslo") * 2 + (train.code.astype(int) == 30)
    for one_hot in (1, 10):
        options = {"enable_categorical": True, "max_cat_to_onehot": one_hot}
        source = xgboost.XGBRegressor(**options, **SMALL).fit(train, target)
        assert not same_answers(source, fresh).frontend.is_trivial
        codes = train.assign(city=train.city.cat.codes, code=train.code.cat.codes).to_numpy(float)
        codes[codes < 0] = np.nan
        source = xgboost.XGBRegressor(feature_types=["float", "c", "c"], **options, **SMALL).fit(codes, target)
        assert same_answers(source, codes).frontend.is_trivial


def test_text_that_the_model_cuts_is_refused():
    frame = pd.DataFrame({"city": pd.Categorical(["zürich", "bonn"] * 20)})
    source = xgboost.XGBRegressor(enable_categorical=True, **SMALL).fit(frame, np.arange(40.0))
    with pytest.raises(InvalidInputError, match="beyond ASCII"):
        translate(source)


def test_early_stopping_answers_with_the_best_iteration(same_answers, x, fresh):
    y = x[:, 0] + np.random.default_rng(0).normal(size=400)
    source = xgboost.XGBRegressor(early_stopping_rounds=3, **{**SMALL, "n_estimators": 200})
    source.fit(x[:300], y[:300], eval_set=[(x[300:], y[300:])], verbose=False)
    (trees,) = (part for part in same_answers(source, fresh).modules() if isinstance(part, Trees))
    assert len(trees.root) == source.best_iteration + 1 < source.get_booster().num_boosted_rounds()


@pytest.mark.parametrize(
    "options",
    [
        {"booster": "gblinear"},
        {"missing": -1.0},
        {"multi_strategy": "multi_output_tree"},
        {"objective": "survival:cox"},
    ],
)
def test_options(same_answers, x, fresh, options):
    y = x[:, :2] if "multi_strategy" in options else np.abs(x[:, 0])
    same_answers(xgboost.XGBRegressor(**options, **SMALL).fit(np.round(x), y), np.round(fresh))


def test_linear_boosters_of_classes_and_of_what_is_missing(same_answers, x, fresh):
    holes = np.where(np.random.default_rng(0).random(x.shape) < 0.2, np.nan, x)
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    same_answers(xgboost.XGBClassifier(booster="gblinear", **SMALL).fit(holes, y), holes)
    same_answers(xgboost.XGBRegressor(booster="gblinear", **SMALL).fit(x, x[:, :2] + [5, -9]), fresh)


@pytest.mark.parametrize(
    "objective",
    [
        *("binary:logistic", "binary:logitraw", "binary:hinge", "reg:squarederror", "count:poisson"),
        *("multi:softprob", "multi:softmax"),
    ],
)
def test_boosters(same_answers, x, fresh, objective):
    is_multi = objective.startswith("multi")
    y = np.digitize(x[:, 0], [-0.5, 0.5] if is_multi else [0.0])
    parameters = {"objective": objective, "nthread": 1, **({"num_class": 3} if is_multi else {})}
    booster = xgboost.train(parameters, xgboost.DMatrix(x, y), 8)
    module = same_answers(booster, fresh, trained=objective not in ("binary:hinge", "multi:softmax"))
    np.testing.assert_allclose(module.predict(fresh), booster.predict(xgboost.DMatrix(fresh)), rtol=1e-6, atol=1e-6)


def test_a_booster_answers_by_all_of_its_trees(same_answers, tmp_path, x, fresh):
    y = x[:, 0] + np.random.default_rng(0).normal(size=400)
    evaluation = [(xgboost.DMatrix(x[300:], y[300:]), "valid")]
    options = {"evals": evaluation, "early_stopping_rounds": 3, "verbose_eval": False}
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(x[:300], y[:300]), 99, **options)
    assert booster.best_iteration + 1 < booster.num_boosted_rounds()
    same_answers(booster, fresh)
    booster.save_model(tmp_path / "model.ubj")
    same_answers(load_estimator(tmp_path / "model.ubj", trust_code=True), fresh)


def test_a_booster_of_a_frame(same_answers):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"number": rng.normal(size=300), "city": pd.Categorical(rng.choice(["rome", "oslo"], 300))})
    matrix = xgboost.DMatrix(frame, frame.number + (frame.city == "oslo"), enable_categorical=True)
    same_answers(xgboost.train({"nthread": 1}, matrix, 5), frame)


def test_uncovered_options_are_refused_by_name(x):
    y = (x[:, 0] > 0).astype(int)
    source = xgboost.XGBClassifier(objective="binary:hinge", **SMALL).fit(x, y)
    with pytest.raises(InvalidInputError, match="XGBClassifier declines objective='binary:hinge' of a classifier"):
        translate(source)
    frame = pd.DataFrame({"a": x[:, 0], "b": pd.Categorical(y)})
    source = xgboost.XGBRegressor(missing=-1.0, enable_categorical=True, **SMALL).fit(frame, y)
    with pytest.raises(InvalidInputError, match=r"XGBRegressor declines missing=-1\.0 beside categories"):
        translate(source)


@pytest.mark.parametrize("booster", ["gbtree", "gblinear"])
def test_infinity_is_refused_where_the_source_makes_a_matrix_of_its_own(booster, x):
    bad, y = np.array(x[:2]), (x[:, 0] > 0).astype(int)
    bad[0, 0] = np.inf
    sources = [xgboost.train({"booster": booster}, xgboost.DMatrix(x, y), 2)]
    sources += [xgboost.XGBClassifier(booster=booster, **SMALL).fit(x, y)] if booster == "gblinear" else []
    for source in sources:
        with pytest.raises(xgboost.core.XGBoostError, match="inf"):
            as_estimator(source).predict(bad)
        with pytest.raises(InvalidInputError, match="infinity"):
            translate(source).predict(bad)
