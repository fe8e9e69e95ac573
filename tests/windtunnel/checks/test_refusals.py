"""Whatever the source refuses, its translation refuses: however it answers, and wherever in the pipeline it shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from mlsys_windtunnel.checks.table import InputRules, check_container
from mlsys_windtunnel.export import artifact
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.impute import SimpleImputer
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Lasso, LinearRegression, LogisticRegression, Ridge
from sklearn.multioutput import RegressorChain
from sklearn.naive_bayes import CategoricalNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    PolynomialFeatures,
    PowerTransformer,
    StandardScaler,
)
from sklearn.semi_supervised import LabelSpreading
from sklearn.tree import DecisionTreeClassifier

RNG = np.random.default_rng(0)
X = RNG.uniform(0.5, 2, size=(60, 2))
Y = (X[:, 0] > X[:, 1]).astype(int)
FRAME = pd.DataFrame(X, columns=["a", "b"])

LINEAR = {
    "linear": LogisticRegression(),
    "three classes": make_pipeline(StandardScaler(), LogisticRegression()),
    "scaled": make_pipeline(MinMaxScaler(), StandardScaler(), LogisticRegression()),
    "polynomials": make_pipeline(PolynomialFeatures(), LogisticRegression()),
    "unused column": Lasso(0.1),
    "many outputs": PCA(1),
    "union": make_pipeline(make_union(StandardScaler(), MaxAbsScaler()), Ridge()),
    "imputed": make_pipeline(StandardScaler(), SimpleImputer(), LogisticRegression()),
    "neighbours": KNeighborsClassifier(),
    "calibrated": CalibratedClassifierCV(LogisticRegression(), cv=2),
    "boosted": AdaBoostClassifier(HistGradientBoostingClassifier(max_iter=2), n_estimators=2),
    "bagged": BaggingClassifier(DecisionTreeClassifier(), n_estimators=2),
    "tree": DecisionTreeClassifier(),
    "forest": make_pipeline(StandardScaler(), RandomForestClassifier(3)),
    "histograms": HistGradientBoostingClassifier(max_iter=2),
    "logarithm": make_pipeline(FunctionTransformer(np.log), LogisticRegression()),
    "powers": make_pipeline(PowerTransformer("box-cox"), Ridge()),
    "target": TransformedTargetRegressor(make_pipeline(FunctionTransformer(np.log), Ridge())),
    "overflow": make_pipeline(FunctionTransformer(np.square), LogisticRegression()),
}
CELLS = [np.nan, np.inf, -np.inf, 1e39, -1e39, 1e200, 0.0, -1.0, 1.0]


def _outcome(function, x):
    try:
        return np.asarray(function(x))
    except ValueError as error:
        return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_refused_where_the_source_refuses_them_and_answered_elsewhere(name, column):
    target = np.digitize(X[:, 0], [1, 1.5]) if name == "three classes" else Y
    source = LINEAR[name].fit(X, target)
    module = translate(source)
    for method in ("predict", "predict_proba", "decision_function", "transform"):
        if not hasattr(module, method):
            continue
        for cell in CELLS:
            x = X[:3].copy()
            x[1, column] = cell
            wanted, got = _outcome(getattr(source, method), x), _outcome(getattr(module, method), x)
            if isinstance(wanted, ValueError):
                assert isinstance(got, InvalidInputError), (method, cell, got)
            elif not isinstance(got, InvalidInputError) or cell in (0.0, -1.0, 1.0):
                np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9, err_msg=f"{method} {cell}")


def test_the_case_of_the_issue():
    module = translate(LogisticRegression().fit(X, Y))
    with pytest.raises(InvalidInputError, match=r"^Input X contains NaN\. LogisticRegression does not accept"):
        module.predict([[np.nan, 1]])
    with pytest.raises(InvalidInputError, match=r"^Input X contains infinity"):
        module.predict_proba([[np.inf, 1]])


def test_one_bad_row_among_many_is_found_in_each_chunk():
    x = np.tile(X, (200, 1))
    for source in (LogisticRegression(), DecisionTreeClassifier(), make_pipeline(PCA(2), LogisticRegression())):
        module = translate(source.fit(X, Y))
        for row in (0, 4_095, 4_096, len(x) - 1):
            bad = x.copy()
            bad[row, 1] = np.inf
            with pytest.raises(InvalidInputError, match="infinity"):
                module.predict(bad)


def test_saturated_probabilities_are_no_sign_of_bad_input():
    source = LogisticRegression(C=1e6).fit(X * 1e3, Y)
    module = translate(source)
    np.testing.assert_array_equal(module.predict_proba(X * 1e6), source.predict_proba(X * 1e6))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_artifacts_and_exports_refuse_as_well(tmp_path, bad):
    source = make_pipeline(StandardScaler(), LogisticRegression()).fit(FRAME, Y)
    module = translate(source)
    artifact.save(module, tmp_path / "folder")
    export_pt2(module, tmp_path / "program.pt2", methods=["predict", "predict_proba"])
    export_onnx(module, tmp_path / "program.onnx", methods=["predict", "predict_proba"])
    x = FRAME[:3].copy()
    for answering in (
        artifact.load(tmp_path / "folder"),
        load_pt2(tmp_path / "program.pt2"),
        load_onnx(tmp_path / "program.onnx"),
    ):
        np.testing.assert_allclose(answering.predict_proba(x), source.predict_proba(x), atol=1e-9)
        for method in ("predict", "predict_proba"):
            with pytest.raises(InvalidInputError, match="Input X contains"):
                getattr(answering, method)(x.assign(b=[1.0, bad, 2.0]))
        with pytest.raises(InvalidInputError, match="same order"):
            answering.predict(x[["b", "a"]])


def test_forward_takes_tables_of_the_packed_width_alone():
    module = translate(LogisticRegression().fit(X, Y))
    assert module(torch.ones(2, 2, dtype=torch.float64)).shape == (2, 2)
    for shape in ((2, 3), (2, 1), (2,), (1, 2, 2)):
        with pytest.raises(InvalidInputError, match=r"\[rows, 2 columns\] is needed"):
            module(torch.ones(shape, dtype=torch.float64))


def test_a_float32_module_refuses_what_is_infinite_only_there():
    module = translate(LogisticRegression().fit(X, Y), dtype=torch.float32)
    assert module.predict([[1e30, 1.0]]).shape == (1,)
    with pytest.raises(InvalidInputError, match="float32"):
        module.predict([[1e39, 1.0]])


def test_names_are_those_of_the_fit_in_their_order():
    module = translate(LogisticRegression().fit(FRAME, Y))
    module.predict(FRAME)
    module.predict(X)
    module.predict({"b": X[:, 1], "a": X[:, 0], "more": X[:, 0]})
    for frame, words in (
        (FRAME[["b", "a"]], "must be in the same order as they were in fit"),
        (FRAME.assign(z=1.0), r"unseen at fit time: \['z'\]"),
        (FRAME[["a"]], r"yet now missing: \['b'\]"),
        (FRAME.rename(columns={"b": "c"}), r"unseen at fit time: \['c'\]"),
        (FRAME.set_axis(["a", "a"], axis=1), "Expected unique column names"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            module.predict(frame)


def test_columns_chosen_by_name_are_asked_for_by_name():
    columns = ColumnTransformer([("s", StandardScaler(), ["b"])])
    source = make_pipeline(columns, LogisticRegression()).fit(FRAME, Y)
    module = translate(source)
    for frame in (FRAME, FRAME[["b", "a"]], FRAME[["b"]], FRAME.assign(z="text")):
        np.testing.assert_array_equal(module.predict(frame), source.predict(frame))
    for x in (X, X.tolist(), FRAME.set_axis([0, 1], axis=1), scipy.sparse.csr_matrix(X)):
        with pytest.raises(InvalidInputError, match="only supported for dataframes"):
            module.predict(x)
    with pytest.raises(InvalidInputError, match="lacks the columns"):
        module.predict(FRAME[["a"]])


def test_a_union_of_both_kinds_wants_the_names_in_order():
    union = FeatureUnion([("named", ColumnTransformer([("s", StandardScaler(), ["b"])])), ("all", StandardScaler())])
    source = make_pipeline(union, LogisticRegression()).fit(FRAME, Y)
    module = translate(source)
    module.predict(FRAME)
    for x in (FRAME[["b", "a"]], X):
        with pytest.raises(ValueError, match=r"."):
            source.predict(x)
        with pytest.raises(InvalidInputError):
            module.predict(x)


def test_sparse_data_is_taken_where_each_operator_takes_it():
    sparse = scipy.sparse.csr_matrix(X)
    for source in (LogisticRegression(), make_pipeline(MaxAbsScaler(), LinearRegression()), DecisionTreeClassifier()):
        source.fit(X, Y)
        np.testing.assert_allclose(translate(source).predict(sparse), source.predict(sparse), atol=1e-9)
    for source in (StandardScaler(), make_pipeline(MaxAbsScaler(), MinMaxScaler(), LogisticRegression())):
        source.fit(X, Y)
        module = translate(source)
        ask = module.predict if hasattr(module, "predict") else module.transform
        with pytest.raises(InvalidInputError, match="dense data is required"):
            ask(sparse)


def test_neighbours_of_a_tree_refuse_sparse_data_and_numbers_too_far():
    by_neighbours = LabelSpreading(kernel="knn", n_neighbors=5).fit(X, Y)
    by_neighbours_module, by_kernel_module = translate(by_neighbours), translate(LabelSpreading().fit(X, Y))
    with pytest.raises(InvalidInputError, match="dense data is required by LabelSpreading"):
        by_neighbours_module.predict(scipy.sparse.csr_matrix(X))
    with pytest.raises(InvalidInputError, match="no numbers above"):
        by_neighbours_module.predict([[1e300, 0.0]])
    np.testing.assert_array_equal(by_kernel_module.predict(scipy.sparse.csr_matrix(X)), by_kernel_module.predict(X))


def test_an_identity_that_looks_at_its_input_refuses_what_it_would():
    module = translate(make_pipeline(FunctionTransformer(validate=True), Ridge()).fit(X, Y))
    with pytest.raises(InvalidInputError, match="dense data is required by FunctionTransformer"):
        module.predict(scipy.sparse.csr_matrix(X))
    with pytest.raises(InvalidInputError, match="FunctionTransformer"):
        module.predict([[np.nan, 0.0]])


def test_a_source_of_lists_alone_refuses_tuples_and_sparse_arrays():
    rules = InputRules("CatBoostClassifier", takes_tuples=False)
    for refused in (((1.0, 2.0),), iter([[1.0, 2.0]]), scipy.sparse.csr_array(X)):
        with pytest.raises(InvalidInputError, match="CatBoostClassifier takes no"):
            check_container(refused, rules)
    for taken in ([[1.0, 2.0]], X, FRAME, {"a": [1.0]}, scipy.sparse.csr_matrix(X)):
        check_container(taken, rules)


def test_a_chain_looks_at_its_input_whatever_its_members_take():
    from sklearn.ensemble import HistGradientBoostingRegressor

    source = RegressorChain(HistGradientBoostingRegressor(max_iter=2)).fit(X, np.stack([Y, X[:, 1]], axis=1))
    with pytest.raises(InvalidInputError, match="RegressorChain does not accept missing values"):
        translate(source).predict([[np.nan, 1.0]])


def test_codes_out_of_range_are_refused():
    module = translate(CategoricalNB().fit([[0, 1], [1, 2], [2, 0]], [0, 1, 1]))
    assert module.predict([[2, 2]]).shape == (1,)
    for row in ([3, 0], [0, 3], [-1, 0], [np.nan, 0]):
        with pytest.raises(InvalidInputError):
            module.predict([row])


def test_numbers_beyond_the_fit_are_refused_where_isotonic_regression_raises():
    module = translate(IsotonicRegression(out_of_bounds="raise").fit([1.0, 2.0, 3.0], [1.0, 2.0, 2.5]))
    assert module.predict([[1.5]]).shape == (1,)
    for cell in (0.9, 3.1):
        with pytest.raises(InvalidInputError, match="takes no numbers"):
            module.predict([[cell]])


def test_infinite_cells_of_number_columns_are_no_unknown_categories():
    x = np.array([[1.0], [2.0], [np.nan]])
    source = make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression()).fit(x, [0, 1, 1])
    module = translate(source)
    assert module.predict([[5.0]]).shape == (1,)
    for rows in (1, 100):
        with pytest.raises(InvalidInputError, match="infinity"):
            module.predict(np.full((rows, 1), np.inf))


def test_a_fallback_operators_refusal_is_one_line():
    source = make_pipeline(StandardScaler(), FunctionTransformer(np.rint, validate=True), LogisticRegression())
    module = translate(source.fit(X, Y), X[:2])
    with pytest.raises(InvalidInputError) as caught:
        module.predict([[1.0, np.inf]])
    assert "\n" not in str(caught.value)
