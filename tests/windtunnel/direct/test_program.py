"""The direct form answers as the network does in torch, and follows it when it changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightgbm import LGBMClassifier
from mlsys_windtunnel.backends.direct.program import direct_program
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.module import METHODS, WindTunnelModule
from mlsys_windtunnel.modules.linear.linear import Affine
from sklearn.compose import make_column_transformer
from sklearn.decomposition import PCA
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, OrdinalEncoder, StandardScaler
from sklearn.tree import DecisionTreeRegressor

rng = np.random.default_rng(0)
NUMBERS = rng.normal(size=(90, 3))
FRAME = pd.DataFrame({"a": NUMBERS[:, 0], "b": NUMBERS[:, 1]}).assign(
    c=rng.choice(["x", "y", "z"], 90), d=rng.choice(["u", "v"], 90)
)
TWO = np.where(FRAME.a + (FRAME.c == "x") > 0.5, "high", "low")
THREE = np.where(FRAME.b > 0.5, "other", TWO)


def columns(*, sparse: bool = True) -> Any:
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=sparse)
    return make_column_transformer((StandardScaler(), ["a", "b"]), (encoder, ["c", "d"]))


def small(estimator: type, **options: Any) -> Any:
    return estimator(n_estimators=6, num_leaves=5, min_child_samples=5, verbose=-1, **options)


SOURCES = {
    "logistic regression": (LogisticRegression(), NUMBERS, TWO),
    "softmax": (LogisticRegression(), NUMBERS, THREE),
    "margins of three": (SGDClassifier(random_state=0), NUMBERS, THREE),
    "several outputs": (LinearRegression(), NUMBERS, NUMBERS[:, :2] ** 2),
    "boosted": (small(LGBMClassifier), NUMBERS, TWO),
    "boosted, three": (small(LGBMClassifier), NUMBERS, THREE),
    "boosted, float32": (GradientBoostingClassifier(n_estimators=4), NUMBERS, TWO),
    "boosted, exponential loss": (GradientBoostingClassifier(n_estimators=4, loss="exponential"), NUMBERS, TWO),
    "histogram": (HistGradientBoostingClassifier(max_iter=4), NUMBERS, TWO),
    "forest": (RandomForestClassifier(5, random_state=0), NUMBERS, THREE),
    "tree": (DecisionTreeRegressor(max_depth=4), NUMBERS, NUMBERS[:, 0]),
    "pipeline, linear": (make_pipeline(columns(), LogisticRegression()), FRAME, TWO),
    "pipeline, regression": (make_pipeline(columns(), Ridge()), FRAME, NUMBERS[:, 2]),
    "pipeline, trees": (make_pipeline(columns(sparse=False), small(LGBMClassifier)), FRAME, TWO),
    "one hot alone": (make_pipeline(OneHotEncoder(), LogisticRegression()), FRAME[["c", "d"]], THREE),
    "two scalers": (
        make_pipeline(FeatureUnion([("s", StandardScaler()), ("m", MinMaxScaler())]), LogisticRegression()),
        NUMBERS,
        TWO,
    ),
    "imputed": (
        make_pipeline(SimpleImputer(strategy="median", add_indicator=True), Ridge()),
        np.where(NUMBERS > 1, np.nan, NUMBERS),
        NUMBERS[:, 0],
    ),
    "imputed zeros": (make_pipeline(SimpleImputer(missing_values=0), Ridge()), NUMBERS.round(), NUMBERS[:, 0]),
    "components": (make_pipeline(PCA(2), LogisticRegression()), NUMBERS, TWO),
    "weighted": (
        make_pipeline(
            FeatureUnion([("s", StandardScaler()), ("t", StandardScaler())], transformer_weights={"t": 3.0}), Ridge()
        ),
        NUMBERS,
        NUMBERS[:, 2],
    ),
    "transformer": (columns(sparse=False), FRAME, None),
    "codes": (make_column_transformer((OrdinalEncoder(), ["c"]), ("passthrough", ["b", "a"])), FRAME, None),
}
IN_TORCH = {"components"}  # has an operator without a form


def in_torch(module: WindTunnelModule, x: Any, method: str) -> np.ndarray:
    return module._in_torch(module.frontend.tables(x), method)


@pytest.mark.parametrize("name", SOURCES)
def test_answers_are_those_of_the_network_in_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    source, x, y = SOURCES[name]
    module = translate(source.fit(x, y))
    assert (direct_program(module.network) is None) == (name in IN_TORCH)
    with monkeypatch.context() as patch:
        if name not in IN_TORCH:
            patch.setattr(WindTunnelModule, "_in_torch", None)
        patch.setattr("mlsys_windtunnel.module.ROWS_PER_CHUNK", 40)
        got = {method: getattr(module, method)(x) for method in METHODS if hasattr(module, method)}
        one = {method: getattr(module, method)(x[:1]) for method in got}
    for method, answer in got.items():
        expected = in_torch(module, x, method)
        labels = None if module.predictor is None else module.predictor.classes
        expected = np.asarray(labels)[expected] if method == "predict" and labels else expected
        assert answer.shape == expected.shape
        assert answer.dtype == expected.dtype
        if method == "predict" and labels:
            assert (answer == expected).all()
            assert one[method] == answer[0]
        else:
            np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-13)
            np.testing.assert_allclose(one[method], answer[:1], rtol=0, atol=1e-13)


def test_rows_of_an_embedding_are_summed_where_a_linear_model_reads_them():
    source, x, y = SOURCES["pipeline, linear"]
    module = translate(source.fit(x, y))
    program = direct_program(module.network)
    assert len(program.steps) == 1, "the scaler; neither the one-hot columns nor the whole table are made"


@pytest.mark.parametrize("name", ["pipeline, linear", "pipeline, trees", "forest"])
def test_training_is_noticed(name: str):
    source, x, y = SOURCES[name]
    module = translate(source.fit(x, y))
    before = module.predict_proba(x)
    packed = torch.from_numpy(module.encode(x))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(packed)[:, 0].sum().backward()
    optimizer.step()
    after = module.predict_proba(x)
    assert np.abs(after - before).max() > 1e-6
    np.testing.assert_allclose(after, in_torch(module, x, "predict_proba"), rtol=0, atol=1e-13)
    module.load_state_dict(translate(source).state_dict())
    np.testing.assert_array_equal(module.predict_proba(x), before)


def test_exchanged_parts_and_parameters_are_noticed():
    source, x, y = SOURCES["logistic regression"]
    module = translate(source.fit(x, y))
    module.predict_proba(x)
    module.network.output.body.bias = torch.nn.Parameter(torch.tensor([50.0], dtype=torch.float64))
    assert module.predict_proba(x)[:, 1].min() > 0.99
    module.network.output.body = Affine(np.zeros((1, 3)), 0.0)
    assert (module.predict_proba(x) == 0.5).all()
    module.network.output.body.bias.data = torch.tensor([50.0], dtype=torch.float64)
    assert module.predict_proba(x)[:, 1].min() > 0.99
    module.network.operators[-1] = translate(source).network.output
    np.testing.assert_allclose(module.predict_proba(x), source.predict_proba(x), rtol=0, atol=1e-12)


def test_float32_stays_in_torch():
    source, x, y = SOURCES["logistic regression"]
    module = translate(source.fit(x, y))
    assert direct_program(module.network) is not None
    assert direct_program(module.to(torch.float32).network) is None
    np.testing.assert_allclose(module.predict_proba(x), source.predict_proba(x), atol=1e-6)


def test_copies_have_forms_of_their_own():
    source, x, y = SOURCES["boosted"]
    module = translate(source.fit(x, y))
    expected = module.predict_proba(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            other.network.output.body.leaf_value.zero_()
        assert (other.predict_proba(x) == 0.5).all()
        np.testing.assert_array_equal(module.predict_proba(x), expected)
