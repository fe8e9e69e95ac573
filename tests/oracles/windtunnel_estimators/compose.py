"""Pipelines, unions and column transformers composed at random, and what may be handed to them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import strategies as st
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from sklearn import cluster, ensemble, linear_model, naive_bayes, neighbors, preprocessing, svm, tree
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, make_pipeline

from tests.oracles.tally import Tally

from .compare import METHODS, compare
from .inputs import of_frame, of_numbers

RNG = np.random.default_rng(0)
X = RNG.uniform(0.5, 4, size=(60, 3))
FRAME = pd.DataFrame(X, columns=["a", "b", "c"]).assign(word=RNG.choice(["red", "green", "blue"], 60))
Y = (X[:, 0] * X[:, 1] > X[:, 2] * 1.5).astype(int)

STEPS = (
    preprocessing.StandardScaler(),
    preprocessing.MinMaxScaler(),
    preprocessing.MinMaxScaler(clip=True),
    preprocessing.RobustScaler(),
    preprocessing.MaxAbsScaler(),
    preprocessing.Normalizer(),
    preprocessing.Binarizer(threshold=1.0),
    preprocessing.PolynomialFeatures(2),
    preprocessing.PowerTransformer(),
    preprocessing.QuantileTransformer(n_quantiles=20),
    preprocessing.KBinsDiscretizer(3, encode="ordinal"),
    preprocessing.SplineTransformer(n_knots=3),
    preprocessing.FunctionTransformer(np.log),
    preprocessing.FunctionTransformer(np.exp),
    preprocessing.FunctionTransformer(np.sqrt, validate=True),
    SimpleImputer(),
    SimpleImputer(strategy="median", add_indicator=True),
    PCA(1),
    SelectKBest(k=1),
)
ENDS = (
    linear_model.LogisticRegression(),
    linear_model.Ridge(),
    linear_model.Lasso(0.01),
    tree.DecisionTreeClassifier(max_depth=3),
    ensemble.RandomForestClassifier(3, max_depth=3),
    ensemble.HistGradientBoostingClassifier(max_iter=3),
    ensemble.GradientBoostingRegressor(n_estimators=3),
    ensemble.AdaBoostClassifier(linear_model.LogisticRegression(), n_estimators=2),
    ensemble.BaggingClassifier(naive_bayes.GaussianNB(), n_estimators=2),
    ensemble.VotingClassifier([("l", linear_model.LogisticRegression()), ("t", tree.DecisionTreeClassifier())]),
    ensemble.StackingClassifier([("g", naive_bayes.GaussianNB())], passthrough=True, cv=2),
    naive_bayes.GaussianNB(),
    neighbors.KNeighborsClassifier(3),
    neighbors.KNeighborsClassifier(4, weights="distance", algorithm="brute"),
    neighbors.KNeighborsRegressor(2, weights="distance", p=1, algorithm="ball_tree"),
    neighbors.NearestCentroid(),
    cluster.KMeans(4, n_init=1, random_state=0),
    svm.SVC(),
    LGBMClassifier(n_estimators=3, min_child_samples=2, verbose=-1, n_jobs=1),
    None,
)
ENCODERS = (
    preprocessing.OneHotEncoder(),
    preprocessing.OneHotEncoder(handle_unknown="ignore"),
    preprocessing.OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
)


@st.composite
def chains(draw: Any) -> Any:
    """Numeric steps one after another, or side by side."""
    steps = [clone(draw(st.sampled_from(STEPS))) for _ in range(draw(st.integers(1, 3)))]
    if len(steps) > 1 and draw(st.booleans()):
        return FeatureUnion([(str(index), step) for index, step in enumerate(steps)])
    return make_pipeline(*steps)


@st.composite
def programs(draw: Any) -> tuple[Any, Any]:
    """A pipeline that is not fitted, and the table that it is to be fitted on."""
    end = clone(draw(st.sampled_from(ENDS)), safe=False)
    kind = draw(st.sampled_from(["array", "named", "columns", "places"]))
    first = draw(chains())
    data: Any = X
    if kind == "named":
        data = FRAME[["a", "b", "c"]]
    elif kind in ("columns", "places"):
        data = FRAME
        numbers: Any = ["a", "c"] if kind == "columns" else [0, 2]
        words: Any = ["word"] if kind == "columns" else [3]
        parts = [("numbers", first, numbers), ("words", clone(draw(st.sampled_from(ENCODERS))), words)]
        first = ColumnTransformer(parts, sparse_threshold=0, remainder="drop")
    middle = [draw(chains())] if draw(st.booleans()) else []
    return make_pipeline(first, *middle, *([] if end is None else [end])), data


def fit_and_compare(program: Any, data: Any, tally: Tally, *, seed: int, most: int) -> None:
    """Fit, translate, and compare on so many of the inputs; where the source decides ties, without its help too."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            source = program.fit(data, Y)
        except ValueError:  # the logarithm of a negative number: nothing to translate
            return
        try:
            module = translate(source, data[:5])
        except InvalidInputError as error:
            tally.add("refused", repr(source)[:80], str(error)[:100])
            return
    alone = None
    if module.reference is not None:
        alone = copy.deepcopy(module)
        alone.reference = None
    rng = np.random.default_rng(seed)
    if data is FRAME:
        cases = list(of_frame(FRAME[:8], rng))
    else:
        cases = list(of_numbers(X[:8], ["a", "b", "c"] if data is not X else None, rng))
    methods = [method for method in METHODS if hasattr(module, method)]
    text = " ".join(repr(source).split())
    for index in rng.permutation(len(cases))[:most]:
        label, x = cases[index]
        for method in methods[:2]:
            if label != "generator":
                compare(source, module, method, x, f"{text}.{method}, {label}", tally)
                if alone is not None:
                    compare(source, alone, method, x, f"{text}.{method} without the source, {label}", tally)
