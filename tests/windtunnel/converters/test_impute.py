"""Imputers fill in and flag what scikit-learn does."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.compose import ColumnTransformer
from sklearn.impute import KNNImputer, MissingIndicator, SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

pytestmark = pytest.mark.filterwarnings("ignore:Skipping features")

NAN = np.nan
X = np.array([[1, NAN, 3, NAN], [NAN, NAN, 3, 0], [4, NAN, -1, 0.5], [4, NAN, 0.1, NAN], [0.1, NAN, 3, 0]])
FRESH = np.array([[NAN, 2, NAN, 1], [NAN, NAN, NAN, NAN], [1, 1, 1, 1], [0.1, -1, 1e30, NAN]])

STRATEGIES = [
    {"strategy": "mean"},
    {"strategy": "median"},
    {"strategy": "most_frequent"},
    {"strategy": "constant"},
    {"strategy": "constant", "fill_value": -7.5},
    {"strategy": np.max},
]


@pytest.mark.parametrize("options", STRATEGIES)  # no ids of functions: they hold addresses
@pytest.mark.parametrize("keep_empty_features", [True, False])
@pytest.mark.parametrize("add_indicator", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numbers(same_answers, options, keep_empty_features, add_indicator, dtype):
    x, fresh = X.astype(dtype), FRESH.astype(dtype)
    if callable(options["strategy"]):  # which scikit-learn does not ask about empty columns
        x, fresh = x[:, [0, 2, 3]], fresh[:, [0, 2, 3]]
    imputer = SimpleImputer(**options, keep_empty_features=keep_empty_features, add_indicator=add_indicator)
    source = imputer.fit(x)
    assert same_answers(source, fresh).frontend.is_trivial
    same_answers(source, x)
    same_answers(source, fresh[:1])
    same_answers(source, fresh.astype(np.float64))
    same_answers(source, scipy.sparse.csc_matrix(fresh))


@pytest.mark.parametrize("marker", [-1, 0.1, np.float32(0.1)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_missing_values_that_are_numbers(same_answers, marker, dtype):
    x = np.nan_to_num(X, nan=marker).astype(dtype)
    same_answers(SimpleImputer(missing_values=marker, add_indicator=True).fit(x), x)


def test_a_statistic_that_is_nan_is_kept_or_dropped_as_told(same_answers):
    for keeps in (True, False):
        source = SimpleImputer(strategy=_mean_of_positive, keep_empty_features=keeps).fit(X[:, [0, 2]] - 2)
        assert same_answers(source, FRESH[:, [0, 2]]).transform(FRESH[:, [0, 2]]).shape[1] == 1 + keeps


def _mean_of_positive(values):
    return values[values > 1.5].mean() if (values > 1.5).any() else NAN


def test_whole_numbers(same_answers):
    x = np.array([[1, -1], [2, 3], [-1, 3]])
    for strategy in ("mean", "most_frequent", "constant"):
        same_answers(SimpleImputer(missing_values=-1, strategy=strategy).fit(x), x)


def test_frames(same_answers):
    frame = pd.DataFrame(X, columns=list("abcd"))
    same_answers(SimpleImputer(add_indicator=True).fit(frame), frame)
    nullable = frame[["a", "d"]].round().astype("Int64")
    same_answers(SimpleImputer().fit(nullable), nullable)
    same_answers(SimpleImputer(missing_values=pd.NA).fit(nullable), nullable)
    same_answers(SimpleImputer().fit(frame[["a"]]), frame[["a"]][1:2])


def test_filled_in_values_are_trained(same_answers):
    source = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler(), LogisticRegression())
    module = same_answers(source.fit(X, [0, 1, 0, 1, 1]), FRESH[:3])
    fill = module.network.operators[0].fill
    assert fill.tolist() == pytest.approx([2.275, 1.62, 0.5 / 3])
    assert (fill.grad.abs() > 0).all()


def test_an_imputer_is_exported():
    module = translate(SimpleImputer(add_indicator=True).fit(X))
    exported = torch.export.export(module, (torch.from_numpy(X),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert torch.equal(exported.module()(torch.from_numpy(FRESH)), module(torch.from_numpy(FRESH)))


def test_text_is_imputed_on_the_host_before_its_encoder(same_answers):
    frame = pd.DataFrame({"t": ["a", None, "b", "a"], "n": [1.0, NAN, 2.0, 0.0]})
    text = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder())
    columns = ColumnTransformer([("t", text, ["t"]), ("n", SimpleImputer(), ["n"])])
    source = make_pipeline(columns, LogisticRegression()).fit(frame, [0, 1, 1, 0])
    module = same_answers(source, frame)
    assert module.frontend.fallbacks == (), "it is kept as data"
    assert [type(part).__name__ for part in module.network.operators][:2] == ["CategoryEmbedding", "Impute"]


def test_text_alone_is_refused():
    with pytest.raises(InvalidInputError, match="SimpleImputer declines columns of text"):
        translate(SimpleImputer(strategy="most_frequent").fit(np.array([["a"], [NAN]], dtype=object)))


def test_an_imputer_that_looks_at_neighbours_stays_as_it_is(same_answers):
    source = make_pipeline(KNNImputer(n_neighbors=2), LogisticRegression()).fit(X, [0, 1, 0, 1, 1])
    assert same_answers(source, X).frontend.fallbacks == ("sklearn.impute.KNNImputer",)


@pytest.mark.parametrize("options", [{}, {"features": "all"}, {"error_on_new": False}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, object])
def test_indicators(same_answers, options, dtype):
    source = MissingIndicator(**options).fit(X.astype(dtype))
    same_answers(source, X.astype(dtype), trained=False)
    same_answers(source, X[:1].astype(dtype), trained=False)
    if options in ({"features": "all"}, {"error_on_new": False}):
        same_answers(source, FRESH.astype(dtype), trained=False)


@pytest.mark.parametrize(
    ("marker", "x"), [(0, [[0, 1], [2, 3]]), ("?", [["?", "a"], ["b", "c"]]), (None, [[None, "a"]])]
)
def test_indicators_of_other_markers(same_answers, marker, x):
    array = np.array(x, dtype=object if marker != 0 else None)
    same_answers(MissingIndicator(missing_values=marker).fit(array), array, trained=False)


def test_indicators_refuse_new_missing_values_as_the_source_does():
    frame = pd.DataFrame({"a": [1.0, NAN], "b": [1.0, 2.0]})
    module = translate(MissingIndicator().fit(frame))
    with pytest.raises(InvalidInputError, match=r"columns \['b'\] have missing values and had none"):
        module.transform(frame.assign(b=NAN))


def test_indicators_beside_an_imputer_are_used_in_a_pipeline(same_answers):
    union = FeatureUnion([("values", SimpleImputer()), ("flags", MissingIndicator())])
    source = make_pipeline(union, LogisticRegression()).fit(X, [0, 1, 0, 1, 1])
    same_answers(source, X)
