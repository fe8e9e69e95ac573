"""Write docs/windtunnel-coverage.md from the table of converters, beside two peers; run it after adding one.

What the page says of exports is tested for every line by ``tests/windtunnel/test_coverage.py``. The peers' lists are
facts of the releases named, read from their registries; containers (pipelines, column transformers, searches) are left
out.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from mlsys_windtunnel.convert.registry import Entry, combiners, converters
from mlsys_windtunnel.parse.members import _RULES
from mlsys_windtunnel.parse.questions import WRAPPERS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "windtunnel-coverage.md"
_WHERE_INSTALLED = "tested by `make test-peers`"
NOT_IN_LOCK = {
    "xgboost.core.Booster",
    *(f"xgboost.sklearn.XGB{kind}" for kind in ("Classifier", "Ranker", "Regressor", "RFClassifier", "RFRegressor")),
}
NOT_IN_ONNX: dict[str, str] = {}  # operator: what is missing
METHODS_NOT_IN_ONNX = {
    "sklearn.decomposition.FactorAnalysis": "score_samples",
    "sklearn.decomposition.PCA": "score_samples",
}

# hummingbird-ml 0.4.12: the operator lists of hummingbird/ml/supported.py, the meta-estimators of its _parse.py.
_HUMMINGBIRD = """
    BaggingClassifier BaggingRegressor BayesianGaussianMixture BernoulliNB Binarizer DecisionTreeClassifier
    DecisionTreeRegressor ElasticNet ExtraTreesClassifier ExtraTreesRegressor FastICA FunctionTransformer
    GammaRegressor GaussianNB GradientBoostingClassifier GradientBoostingRegressor
    HistGradientBoostingClassifier HistGradientBoostingRegressor IsolationForest KBinsDiscretizer KMeans
    KNeighborsClassifier KNeighborsRegressor KernelPCA LGBMClassifier LGBMRanker LGBMRegressor LabelEncoder
    Lasso LinearRegression LinearSVC LinearSVR LogisticRegression LogisticRegressionCV MLPClassifier
    MLPRegressor MaxAbsScaler MeanShift MinMaxScaler MissingIndicator MultiOutputRegressor MultinomialNB
    Normalizer NuSVC OneHotEncoder PCA PLSRegression PoissonRegressor PolynomialFeatures RandomForestClassifier
    RandomForestRegressor RegressorChain Ridge RidgeCV RobustScaler SGDClassifier SVC SelectKBest
    SelectPercentile SimpleImputer StackingClassifier StackingRegressor StandardScaler TruncatedSVD
    TweedieRegressor VarianceThreshold XGBClassifier XGBRanker XGBRegressor
"""
# skl2onnx 1.20.0 with scikit-learn 1.9.1: skl2onnx/_supported_operators.py, sklearn_operator_name_map.
_SKL2ONNX = """
    ARDRegression AdaBoostClassifier AdaBoostRegressor BaggingClassifier BaggingRegressor
    BayesianGaussianMixture BayesianRidge BernoulliNB Binarizer CalibratedClassifierCV CategoricalNB
    ComplementNB CountVectorizer DecisionTreeClassifier DecisionTreeRegressor DictVectorizer ElasticNet
    ElasticNetCV ExtraTreeClassifier ExtraTreeRegressor ExtraTreesClassifier ExtraTreesRegressor FeatureHasher
    FunctionTransformer GammaRegressor GaussianMixture GaussianNB GaussianProcessClassifier
    GaussianProcessRegressor GaussianRandomProjection GenericUnivariateSelect GradientBoostingClassifier
    GradientBoostingRegressor HistGradientBoostingClassifier HistGradientBoostingRegressor HuberRegressor
    IncrementalPCA IsolationForest KBinsDiscretizer KMeans KNNImputer KNeighborsClassifier KNeighborsRegressor
    KNeighborsTransformer KernelCenterer KernelPCA LabelBinarizer LabelEncoder Lars LarsCV Lasso LassoCV
    LassoLars LassoLarsCV LassoLarsIC LinearDiscriminantAnalysis LinearRegression LinearSVC LinearSVR
    LocalOutlierFactor LogisticRegression LogisticRegressionCV MLPClassifier MLPRegressor MaxAbsScaler
    MinMaxScaler MiniBatchKMeans MultiOutputClassifier MultiOutputRegressor MultiTaskElasticNet
    MultiTaskElasticNetCV MultiTaskLasso MultiTaskLassoCV MultinomialNB NearestNeighbors
    NeighborhoodComponentsAnalysis Normalizer NuSVC NuSVR OneClassSVM OneHotEncoder OneVsOneClassifier
    OneVsRestClassifier OrdinalEncoder OrthogonalMatchingPursuit OrthogonalMatchingPursuitCV PCA PLSRegression
    PassiveAggressiveClassifier PassiveAggressiveRegressor Perceptron PoissonRegressor PolynomialFeatures
    PowerTransformer QuadraticDiscriminantAnalysis QuantileRegressor QuantileTransformer RANSACRegressor RFE
    RFECV RadiusNeighborsClassifier RadiusNeighborsRegressor RandomForestClassifier RandomForestRegressor
    RandomTreesEmbedding Ridge RidgeCV RidgeClassifier RidgeClassifierCV RobustScaler SGDClassifier
    SGDOneClassSVM SGDRegressor SVC SVR SelectFdr SelectFpr SelectFromModel SelectFwe SelectKBest
    SelectPercentile SimpleImputer StackingClassifier StackingRegressor StandardScaler TargetEncoder
    TfidfTransformer TfidfVectorizer TheilSenRegressor TruncatedSVD TunedThresholdClassifierCV TweedieRegressor
    VarianceThreshold VotingClassifier VotingRegressor
"""
HUMMINGBIRD, SKL2ONNX = frozenset(_HUMMINGBIRD.split()), frozenset(_SKL2ONNX.split())

_HEAD = """# WindTunnel: what is covered

Made by `scripts/windtunnel_coverage.py` from the table of converters; do not edit by hand.

- **exact**: each method answers within 1e-6 of the source in float64 (most within 1e-12), labels equal, as a test per
  operator says. An option that a converter cannot reproduce leaves that operator on the host as it is.
- **trainable**: a gradient reaches its parameters, or passes through it.
- **.pt2**, **ONNX**: exported in float64 and compared with the source on rows by a test; ONNX through onnxruntime.
- **Hummingbird** 0.4.12 and **skl2onnx** 1.20.0 (with scikit-learn 1.9.1): whether their registries name the class; it
  says nothing of options or accuracy. Both are for inference only. skl2onnx takes LightGBM and XGBoost through another
  package, onnxmltools, which is not counted here.

{count} operators. Pipelines, column transformers, feature unions and parameter searches are taken apart, so they are
no operators. CatBoost's four models are converted by a plugin: `pip install mlsys-windtunnel-catboost`.
"""


def name_of(entry: Entry) -> str:
    """Return the name of the class alone."""
    return entry.source.rpartition(".")[2]


def covered() -> list[Entry]:
    """Return all lines: converters, joins of meta-estimators' members, and those that need no join of their own."""
    apart = [
        Entry(source, lambda _: None, note="taken apart: its members are operators") for source in (*_RULES, *WRAPPERS)
    ]
    lines = {entry.source: entry for entry in (*apart, *combiners(), *converters())}
    public = [entry for entry in lines.values() if "._" not in entry.source]
    return sorted(public, key=lambda entry: entry.source.lower())


def page() -> str:
    """Return the page as Markdown text."""
    entries = covered()
    parts = [_HEAD.format(count=len(entries))]
    for package, group in groupby(entries, key=lambda entry: entry.source.rpartition(".")[0]):
        parts.append(f"\n## {package}\n\n{_table(list(group))}")
    ours = {name_of(entry) for entry in entries}
    for peer, theirs in (("Hummingbird", HUMMINGBIRD), ("skl2onnx", SKL2ONNX)):
        missing = ", ".join(f"`{name}`" for name in sorted(theirs - ours))
        parts.append(f"\n## Covered by {peer} and not here\n\n{missing or 'Nothing.'}\n")
    return "".join(parts)


def _table(entries: list[Entry]) -> str:
    rows = ["| operator | exact | trainable | .pt2 | ONNX | Hummingbird | skl2onnx | note |", "|" + " --- |" * 8]
    rows += [f"| {' | '.join(_cells(entry))} |" for entry in entries]
    return "\n".join(rows) + "\n"


def _cells(entry: Entry) -> list[str]:
    name = name_of(entry)
    notes = [entry.note, _WHERE_INSTALLED if entry.source in NOT_IN_LOCK else "", NOT_IN_ONNX.get(entry.source, "")]
    if entry.source in METHODS_NOT_IN_ONNX:
        notes.append(f"ONNX without {METHODS_NOT_IN_ONNX[entry.source]}")
    return [
        f"`{name}`",
        "yes",
        _yes(entry.is_trainable),
        "yes",
        _yes(entry.source not in NOT_IN_ONNX),
        _yes(name in HUMMINGBIRD),
        _yes(name in SKL2ONNX),
        "; ".join(filter(None, notes)),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "-"


def main() -> None:
    """Write the page and print its path."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")


if __name__ == "__main__":
    main()
