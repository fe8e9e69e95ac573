"""Pipelines as practitioners write them: ensembles, targets of several kinds, unusual preparation."""

from __future__ import annotations

import numpy as np
import pandas as pd
from lightgbm import LGBMRegressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import (
    TransformedTargetRegressor,
    make_column_transformer,
)
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    BaggingClassifier,
    GradientBoostingRegressor,
    IsolationForest,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.feature_selection import SelectFromModel, VarianceThreshold
from sklearn.impute import KNNImputer, MissingIndicator, SimpleImputer
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression, PoissonRegressor, Ridge
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.multioutput import MultiOutputClassifier, MultiOutputRegressor, RegressorChain
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline, make_union
from sklearn.preprocessing import (
    Binarizer,
    KBinsDiscretizer,
    MinMaxScaler,
    OneHotEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    SplineTransformer,
    StandardScaler,
)
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier

from tests.oracles.windtunnel_strangers.parts import (
    KNOWN,
    NUMBER,
    NUMBERS,
    PAIR,
    TABLE,
    THREE,
    WORDY,
    YES_NO,
    Build,
    mixed,
    mixed_dense,
    numbers,
    trees,
)

CASES: dict[str, Build] = {
    "calibrated": lambda: (
        CalibratedClassifierCV(make_pipeline(mixed(), LinearSVC(random_state=0)), cv=2),
        None,
        THREE,
    ),
    "calibrated by steps": lambda: (
        make_pipeline(mixed(), CalibratedClassifierCV(trees(), method="isotonic", cv=2)),
        None,
        YES_NO,
    ),
    "a threshold": lambda: (
        FixedThresholdClassifier(
            make_pipeline(mixed(), LogisticRegression()),
            threshold=0.3,
            response_method="predict_proba",
            pos_label="yes",
        ),
        None,
        YES_NO,
    ),
    "searched": lambda: (
        GridSearchCV(make_pipeline(mixed(), LogisticRegression()), {"logisticregression__C": [0.1, 1]}, cv=2),
        None,
        YES_NO,
    ),
    "voting of pipelines": lambda: (
        VotingClassifier(
            [("l", make_pipeline(mixed(), LogisticRegression())), ("t", make_pipeline(mixed(), trees()))],
            voting="soft",
        ),
        None,
        YES_NO,
    ),
    "stacking of pipelines": lambda: (
        StackingClassifier(
            [("l", make_pipeline(mixed(), LogisticRegression())), ("t", make_pipeline(mixed(), trees()))], cv=2
        ),
        None,
        THREE,
    ),
    "stacking of regressors": lambda: (
        StackingRegressor([("r", make_pipeline(mixed(), Ridge())), ("k", make_pipeline(mixed(), Lasso(0.1)))], cv=2),
        None,
        NUMBER,
    ),
    "voting of regressors": lambda: (
        make_pipeline(
            mixed(),
            VotingRegressor([("r", Ridge()), ("g", GradientBoostingRegressor(n_estimators=3, random_state=0))]),
        ),
        None,
        NUMBER,
    ),
    "bagged": lambda: (
        make_pipeline(mixed(sparse_threshold=0), BaggingClassifier(GaussianNB(), 3, random_state=0)),
        None,
        YES_NO,
    ),
    "price by its logarithm": lambda: (
        TransformedTargetRegressor(make_pipeline(mixed(), Ridge()), func=np.log1p, inverse_func=np.expm1),
        None,
        np.abs(NUMBER),
    ),
    "target scaled": lambda: (
        TransformedTargetRegressor(
            make_pipeline(mixed(), LGBMRegressor(n_estimators=3, verbose=-1, n_jobs=1)), transformer=StandardScaler()
        ),
        None,
        NUMBER,
    ),
    "counts": lambda: (make_pipeline(mixed(), PoissonRegressor()), None, TABLE.visits.to_numpy()),
    "two targets": lambda: (
        make_pipeline(mixed(), MultiOutputRegressor(LGBMRegressor(n_estimators=3, verbose=-1, n_jobs=1))),
        None,
        PAIR,
    ),
    "two targets by name": lambda: (make_pipeline(mixed(), Ridge()), None, pd.DataFrame(PAIR, columns=["a", "b"])),
    "a chain of targets": lambda: (make_pipeline(mixed(), RegressorChain(ElasticNet(0.1))), None, PAIR),
    "two labels of words": lambda: (
        make_pipeline(mixed(), MultiOutputClassifier(LogisticRegression())),
        None,
        np.stack([YES_NO, THREE], axis=1),
    ),
    "several labels at once": lambda: (
        make_pipeline(mixed(), KNeighborsClassifier(3)),
        None,
        np.stack([YES_NO == "yes", THREE == "top"], axis=1).astype(int),
    ),
    "neighbours": lambda: (make_pipeline(mixed(), KNeighborsRegressor(4, weights="distance")), None, NUMBER),
    "splines and polynomials": lambda: (
        make_pipeline(
            make_column_transformer(
                (make_pipeline(SimpleImputer(), SplineTransformer(n_knots=4)), ["age"]),
                (PolynomialFeatures(2), ["price", "visits"]),
            ),
            Ridge(),
        ),
        None,
        NUMBER,
    ),
    "bins": lambda: (
        make_pipeline(
            make_column_transformer(
                (KBinsDiscretizer(4, quantile_method="averaged_inverted_cdf"), ["price"]),
                (Binarizer(threshold=3), ["visits"]),
            ),
            BernoulliNB(),
        ),
        None,
        YES_NO,
    ),
    "quantiles and powers": lambda: (
        make_pipeline(
            make_column_transformer(
                (QuantileTransformer(n_quantiles=30), ["price"]),
                (PowerTransformer(), ["visits"]),
                (MinMaxScaler(clip=True), ["price"]),
            ),
            LinearDiscriminantAnalysis(),
        ),
        None,
        YES_NO,
    ),
    "chosen by a model": lambda: (
        make_pipeline(mixed(), SelectFromModel(Lasso(0.05)), VarianceThreshold(), Ridge()),
        None,
        NUMBER,
    ),
    "components, then a small net": lambda: (
        make_pipeline(mixed(sparse_threshold=0), PCA(4), MLPClassifier((8,), max_iter=30, random_state=0)),
        None,
        YES_NO,
    ),
    "a forest finds outliers": lambda: (
        make_pipeline(mixed(), IsolationForest(n_estimators=5, random_state=0)),
        None,
        None,
    ),
    "a tree on whole numbers": lambda: (DecisionTreeClassifier(max_depth=4), ["visits", "is_member"], YES_NO),
    "preparation alone": lambda: (mixed(), None, None),
    "preparation alone, in frames": lambda: (mixed_dense().set_output(transform="pandas"), None, None),
    "a union within columns": lambda: (
        make_pipeline(
            make_column_transformer(
                (FeatureUnion([("s", numbers()), ("m", MissingIndicator(features="all"))]), NUMBERS)
            ),
            Ridge(),
        ),
        None,
        NUMBER,
    ),
    "filled by neighbours": lambda: (make_pipeline(KNNImputer(n_neighbors=3), Ridge()), NUMBERS, NUMBER),
    "where cells are missing": lambda: (
        make_pipeline(make_union(SimpleImputer(), MissingIndicator()), LogisticRegression()),
        NUMBERS,
        YES_NO,
    ),
    "imputer that adds columns": lambda: (
        make_pipeline(SimpleImputer(add_indicator=True), StandardScaler(), SVC()),
        NUMBERS,
        YES_NO,
    ),
    "words filled by a word": lambda: (
        make_pipeline(
            make_column_transformer(
                (make_pipeline(SimpleImputer(strategy="constant", fill_value="none"), OneHotEncoder(**KNOWN)), WORDY)
            ),
            LogisticRegression(),
        ),
        None,
        YES_NO,
    ),
}
