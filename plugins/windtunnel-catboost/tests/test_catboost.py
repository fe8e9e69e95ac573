"""CatBoost's models answer the same after translation: losses, trees of each growth, categories and statistics."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import parse_pipeline
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.modules.tree.trees import Trees
from sklearn.compose import make_column_transformer
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

catboost = pytest.importorskip("catboost", reason="CatBoost is not installed: pip install catboost")

SMALL = {"iterations": 12, "depth": 4, "learning_rate": 0.3, "thread_count": 1, "random_seed": 0}
SMALL |= {"verbose": False, "allow_writing_files": False}
GROWTH = ["SymmetricTree", "Depthwise", "Lossguide"]


def _table(seed: int, rows: int = 300) -> np.ndarray:
    """Numbers with ties, and in all columns but the last missing ones."""
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(rows, 4)), 1)
    x[:, :3][rng.random((rows, 3)) < 0.2] = np.nan
    return x


X, FRESH = _table(0), _table(1, 200)
FRESH[:8, 3] = [np.inf, -np.inf, 1e300, -1e300, 1e-50, -0.0, 3.4e38, np.nan]
NUMBERS = np.nan_to_num(X).sum(axis=1)
PLACES = np.digitize(NUMBERS, [-1, 1])


@pytest.mark.parametrize(
    "loss",
    [
        *("RMSE", "MAE", "Quantile", "LogLinQuantile", "Expectile:alpha=0.3", "MAPE", "LogCosh", "Huber:delta=1"),
        *("Poisson", "Tweedie:variance_power=1.5", "RMSEWithUncertainty", "MultiQuantile:alpha=0.2,0.8", "Cox"),
    ],
)
def test_losses_of_regression(same_answers, loss):
    target = NUMBERS**2 if loss.startswith(("Poisson", "Tweedie")) else NUMBERS
    same_answers(catboost.CatBoostRegressor(loss_function=loss, **SMALL).fit(X, target), FRESH)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ("Logloss", NUMBERS > 0),
        ("Logloss", np.where(NUMBERS > 0, "yes", "no")),
        ("CrossEntropy", (NUMBERS > 0) * 0.5 + 0.2),
        ("Focal:focal_alpha=0.5;focal_gamma=2", PLACES > 0),
        ("MultiClass", PLACES),
        ("MultiClass", NUMBERS > 0),
        ("MultiClassOneVsAll", np.array(["u", "v", "w"])[PLACES]),
        ("MultiLogloss", (np.nan_to_num(X) > 0).astype(int)),
        ("MultiCrossEntropy", (np.nan_to_num(X) > 0).astype(int)),
    ],
)
def test_losses_of_classification(same_answers, loss, target):
    source = catboost.CatBoostClassifier(loss_function=loss, **SMALL).fit(X, target)
    same_answers(source, FRESH)
    same_answers(source, FRESH[:1])


def test_rankers_several_targets_and_the_class_that_all_extend(same_answers):
    groups = np.repeat(np.arange(30), 10)
    same_answers(catboost.CatBoostRanker(**SMALL).fit(X, PLACES, group_id=groups), FRESH)
    targets = np.nan_to_num(X)[:, :3]
    same_answers(catboost.CatBoostRegressor(loss_function="MultiRMSE", **SMALL).fit(X, targets), FRESH)
    same_answers(catboost.CatBoost({"loss_function": "Logloss", **SMALL}).fit(X, NUMBERS > 0), FRESH)


@pytest.mark.parametrize("grow_policy", GROWTH)
@pytest.mark.parametrize("nan_mode", ["Min", "Max"])
def test_missing_values_and_ties(same_in_each_layout, grow_policy, nan_mode):
    source = catboost.CatBoostRegressor(grow_policy=grow_policy, nan_mode=nan_mode, **SMALL)
    source.fit(X, NUMBERS + np.isnan(X[:, 1]))
    (trees,) = (part for part in translate(source).modules() if isinstance(part, Trees))
    at = trees.ensemble.threshold.astype(np.float32)
    ends = [np.nan, np.inf, -np.inf, 1e300, 1e-50]
    special = np.concatenate([at, np.nextafter(at, np.float32(9)), np.nextafter(at, np.float32(-9)), ends])
    rng = np.random.default_rng(0)
    same_in_each_layout(source, rng.choice(special, (300, 4)).astype(np.float64), tolerance=1e-12)


def _frame(seed: int, rows: int = 400) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "x": rng.normal(size=rows),
            "city": rng.choice(["rome", "oslo", "Zürich"], rows),
            "shop": rng.choice([f"shop {number}" * (number % 9) for number in range(25)], rows),
            "code": rng.integers(0, 30, rows),
            "z": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(size=rows)),
        }
    )
    return frame.assign(city=pd.Categorical(frame.city), flag=rng.random(rows) < 0.5)


FRAME = _frame(0)
CATEGORIES = {"cat_features": ["city", "shop", "code", "flag"]}
TARGET = (FRAME.x + (FRAME.city == "oslo") + (FRAME.shop == "") * 2 + FRAME.code / 30 + FRAME.z.fillna(2)).to_numpy()


def _fresh() -> pd.DataFrame:
    """Rows with categories that were never seen."""
    frame = _frame(1, 200)
    frame.loc[:20, "shop"], frame.loc[15:40, "code"] = "never seen", -7
    return frame


@pytest.mark.parametrize("statistic", ["Borders", "Buckets", "BinarizedTargetMeanValue", "Counter"])
@pytest.mark.parametrize("one_hot_max_size", [2, 255])
@pytest.mark.parametrize("kind", ["two classes", "three classes", "regression"])
def test_categories(same_answers, statistic, one_hot_max_size, kind):
    """Alone and with others, one by one and by statistics of the target (CTR), unseen ones too."""
    options = {"one_hot_max_size": one_hot_max_size, "simple_ctr": [statistic], "combinations_ctr": [statistic]}
    options |= CATEGORIES | SMALL | {"iterations": 5, "depth": 3}
    if kind == "regression":
        source, target = catboost.CatBoostRegressor(**options), TARGET
    else:
        source = catboost.CatBoostClassifier(**options)
        target = np.digitize(TARGET, [1] if kind == "two classes" else [0, 2])
    module = same_answers(source.fit(FRAME, target), _fresh())
    lookup = module.frontend.frontier[0].lookup
    assert lookup.statistics if one_hot_max_size == 2 else lookup.coded


def test_categories_in_combinations_of_all_kinds(same_answers):
    """Statistics over several categories, borders of numbers and single categories at once; in free trees too."""
    both = FRAME.flag ^ (FRAME.code < 15)
    target = np.where(FRAME.city == "oslo", 3.0, 1.0) * both * (FRAME.x > 0) + both
    options = {"one_hot_max_size": 2, "max_ctr_complexity": 4, **CATEGORIES, **SMALL, "depth": 6}
    module = same_answers(catboost.CatBoostRegressor(**options).fit(FRAME, target), _fresh())
    combinations = [part.combination for part in module.frontend.frontier[0].lookup.statistics]
    assert any(len(each.categories) > 1 for each in combinations)
    assert any(each.borders for each in combinations)
    assert any(each.matches for each in combinations)
    for policy in GROWTH[1:]:
        same_answers(catboost.CatBoostRegressor(grow_policy=policy, **options).fit(FRAME, target), _fresh())


def test_categories_are_saved_with_the_model(tmp_path):
    source = catboost.CatBoostClassifier(**CATEGORIES, **SMALL).fit(FRAME, np.digitize(TARGET, [0, 1]))
    module = translate(source)
    for again in (
        load(save(module, tmp_path / "m")),
        load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=["predict", "predict_proba"])),
    ):
        np.testing.assert_array_equal(again.predict(_fresh()), source.predict(_fresh()))
        np.testing.assert_allclose(again.predict_proba(_fresh()), source.predict_proba(_fresh()), atol=1e-12)


def test_cells_that_are_no_category_are_refused_as_the_source_does():
    module = translate(catboost.CatBoostRegressor(**CATEGORIES, **SMALL).fit(FRAME, TARGET))
    for cell in (np.nan, None, 1.5):
        with pytest.raises(InvalidInputError, match=r"column shop holds .* as a category"):
            module.predict(_fresh().assign(shop=pd.Series([cell] * 200, dtype=object)))
    with pytest.raises(InvalidInputError, match="text where numbers belong"):
        module.predict(_fresh().assign(x="many"))


def test_columns_are_taken_by_name(same_answers):
    source = catboost.CatBoostRegressor(**CATEGORIES, **SMALL).fit(FRAME, TARGET)
    fresh = _fresh()
    module = same_answers(source, fresh)
    np.testing.assert_array_equal(module.predict(fresh[fresh.columns[::-1]]), module.predict(fresh))
    assert parse_pipeline(source).columns == tuple(FRAME.columns)
    assert parse_pipeline(catboost.CatBoostRegressor(**SMALL).fit(X, NUMBERS)).columns is None


def test_a_threshold_a_scale_and_a_bias_of_ones_own(same_answers):
    source = catboost.CatBoostClassifier(**SMALL).fit(X, NUMBERS > 0)
    source.set_probability_threshold(0.8)
    module = same_answers(source, FRESH)
    assert (module.predict(FRESH) != (module.predict_proba(FRESH)[:, 1] > 0.5)).any(), "the threshold tells"
    source.set_scale_and_bias(2.0, 0.5)
    same_answers(source, FRESH)


def test_other_inputs_and_pipelines(same_answers):
    x, fresh = np.nan_to_num(X), np.nan_to_num(FRESH)
    source = catboost.CatBoostClassifier(**SMALL).fit(x, PLACES)
    same_answers(source, scipy.sparse.csr_matrix(fresh))
    same_answers(source, fresh.clip(-1e38, 1e38).astype(np.float32))
    same_answers(catboost.CatBoostRegressor(**SMALL).fit(x[:, :1], NUMBERS), fresh[:, :1])
    columns = make_column_transformer((StandardScaler(), ["x", "z"]), ("passthrough", ["code"]))
    same_answers(make_pipeline(columns, catboost.CatBoostRegressor(**SMALL)).fit(FRAME, TARGET), _fresh())
    members = [("c", catboost.CatBoostClassifier(**SMALL)), ("l", LogisticRegression())]
    same_answers(VotingClassifier(members, voting="soft").fit(x, PLACES), fresh.clip(-9, 9))


def test_trees_of_one_leaf(same_answers):
    stumps = catboost.CatBoostRegressor(grow_policy="Lossguide", min_data_in_leaf=290, **SMALL).fit(X, NUMBERS)
    assert set(stumps.get_tree_leaf_counts()) == {1}
    same_answers(stumps, FRESH)


def test_uncovered_operators_are_refused_with_the_reason():
    frame = pd.DataFrame({"t": ["a b c", "d e"] * 50, "x": np.arange(100.0)})
    texts = catboost.CatBoostClassifier(text_features=["t"], **SMALL).fit(frame, frame.x > 50)
    with pytest.raises(
        InvalidInputError, match=r"declines features of text or embeddings \(text_features=\[0\]\).*TfidfVectorizer"
    ):
        translate(texts)
    own = catboost.CatBoostClassifier(loss_function=_Squares(), eval_metric="Logloss", **SMALL)
    with pytest.raises(InvalidInputError, match="declines the loss PythonUserDefinedPerObject"):
        translate(own.fit(frame[["x"]], frame.x > 50))


class _Squares:
    """An objective of the user's own."""

    def calc_ders_range(self, approxes, targets, weights):
        return [(target - approx, -1.0) for approx, target in zip(approxes, targets, strict=True)]
