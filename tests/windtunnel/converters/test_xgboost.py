"""XGBoost's models answer the same after translation. They sum in float32, so equal means to about 1e-6."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.backends.soft.soften import soften
from mlsys_windtunnel.backends.soft.trees import SoftTrees
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.onnx import export_onnx
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
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


@pytest.mark.parametrize("one_hot", [1, 100])
def test_numbers_below_0_are_categories_that_no_split_knows(same_answers, one_hot):
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=300), rng.integers(0, 7, 300).astype(float)], axis=1)
    x[::5, 1] = np.nan
    options = {"enable_categorical": True, "feature_types": ["q", "c"], "max_cat_to_onehot": one_hot}
    source = xgboost.XGBRegressor(**options, **SMALL).fit(x, np.where(np.isnan(x[:, 1]), -9, x[:, 1] * x[:, 0]))
    odd = np.repeat([-1.0, -0.5, -1e-9, -0.0, 0.5, 7, 2.0**24, -3e9, np.nan], 30)  # -1: what pandas codes a gap with
    same_answers(source, np.stack([np.resize(x[:, 0], len(odd)), odd], axis=1))


def test_soft_trees_send_categories_below_0_where_xgboost_does():
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=300), rng.integers(0, 7, 300).astype(float)], axis=1)
    x[::5, 1] = np.nan
    options = {"enable_categorical": True, "feature_types": ["q", "c"]}
    source = xgboost.XGBRegressor(**options, **SMALL).fit(x, np.where(np.isnan(x[:, 1]), -9, x[:, 1] * x[:, 0]))
    exact = translate(source).network
    soft = soften(exact, torch.from_numpy(x), SoftOptions(level="L4", temperature=1e-6))
    for part in soft.modules():
        if isinstance(part, SoftTrees):
            part.sharpness = 1e3
    x[:, 1] = np.resize([-3.0, -1.0, -0.5, 0.0, 100.0, np.nan], len(x))
    with torch.no_grad():
        odd = torch.from_numpy(x)
        torch.testing.assert_close(soft(odd), exact(odd), rtol=1e-5, atol=1e-5)


def test_categories_that_the_fit_did_not_see_are_refused_in_files_too(tmp_path):
    frame = pd.DataFrame({"n": np.arange(40.0), "city": pd.Categorical(["bonn", "oslo", None, "rome"] * 10)})
    source = xgboost.XGBRegressor(enable_categorical=True, **SMALL).fit(frame, frame.n % 4)
    module = translate(source)
    save(module, tmp_path / "folder")
    program = load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=["predict"]))
    export_onnx(module, tmp_path / "m.onnx", columns=True, X_example=frame)
    run = onnxruntime.InferenceSession(str(tmp_path / "m.onnx")).run
    unseen = frame.assign(city=pd.Categorical(["zürich", *frame.city[1:]], ["bonn", "oslo", "rome", "zürich"]))
    for table in (frame, unseen):
        city = table.city.astype(object).where(table.city.notna(), "nan").to_numpy(object)[:, None]
        answers = [
            lambda table=table: module.predict(table),
            lambda table=table: load(tmp_path / "folder").predict(table),
            lambda table=table: program.predict(table),
            lambda table=table, city=city: run(None, {"n": table[["n"]].to_numpy(), "city": city})[0].ravel(),
        ]
        for answer in answers:
            if table is frame:
                np.testing.assert_allclose(answer(), source.predict(frame), atol=1e-5)
            else:
                with pytest.raises(Exception, match="Found a category not in the training set"):
                    answer()
    with pytest.raises(xgboost.core.XGBoostError, match="Found a category not in the training set"):
        source.predict(unseen)


def test_a_linear_booster_refuses_what_float32_does_not_hold(x):
    source = xgboost.XGBRegressor(booster="gblinear", **SMALL).fit(x, x[:, 0])
    bad = np.array(x[:2])
    bad[0, 0] = 3.5e38
    with pytest.raises(xgboost.core.XGBoostError, match="too large"):
        source.predict(bad)
    with pytest.raises(InvalidInputError, match="too large"):
        translate(source).predict(bad)
