"""Our own estimators keep scikit-learn's contract and answer what they promise."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.estimators import (
    BinaryEncoder,
    FactorizationMachineClassifier,
    FactorizationMachineRegressor,
    HashEncoder,
    MatrixFactorizationRegressor,
    TwoHotEncoder,
)
from mlsys_windtunnel.host.lookup import bucket
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import parametrize_with_checks

FACTORIZATIONS = [FactorizationMachineClassifier, FactorizationMachineRegressor, MatrixFactorizationRegressor]
ENCODERS = [HashEncoder, BinaryEncoder, TwoHotEncoder]


@pytest.mark.some_cases(98)
@parametrize_with_checks([estimator() for estimator in ENCODERS + FACTORIZATIONS])
@pytest.mark.filterwarnings("ignore")
def test_the_contract_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3", None])
def test_parameters_out_of_range_are_refused_before_work_starts(encoder, bad):
    (name,) = encoder().get_params()
    with pytest.raises(InvalidInputError, match=f"{name} is .*; a whole number from 1"):
        encoder(**{name: bad}).fit("no table")


@settings(max_examples=40)
@given(st.integers(1, 200))
def test_codes_of_categories_are_distinct_and_of_the_least_width(num_categories):
    x = np.arange(num_categories)[:, None]
    binary, two_hot = BinaryEncoder().fit_transform(x), TwoHotEncoder().fit_transform(x)
    assert len(np.unique(binary, axis=0)) == len(np.unique(two_hot, axis=0)) == num_categories
    assert binary.any(axis=1).all(), "all zeros is for what is unseen"
    assert 2 ** (binary.shape[1] - 1) <= num_categories < 2 ** binary.shape[1]
    assert (two_hot.sum(axis=1) == 2).all()
    side = math.isqrt(num_categories - 1) + 1
    assert two_hot.shape[1] == side + -(-num_categories // side), "a row and a column of the least square"
    assert (two_hot[:, -side:].sum(axis=1) == 1).all()


def test_binary_digits_come_highest_first():
    assert BinaryEncoder().fit_transform([["b"], ["a"], ["d"], ["c"]]).tolist() == [
        [0.0, 1.0, 0.0],
        [0.0, 0.0, 1.0],
        [1.0, 0.0, 0.0],
        [0.0, 1.0, 1.0],
    ]


@pytest.mark.parametrize("encoder", [BinaryEncoder, TwoHotEncoder])
def test_infrequent_and_unseen_categories_are_zeros(encoder):
    x = [["a"]] * 3 + [["b"]] * 2 + [["c"]]
    source = encoder(min_frequency=2).fit(x)
    assert source.transform([["c"], ["new"]]).any() == False  # noqa: E712
    assert source.transform([["a"], ["b"]]).any(axis=1).all()
    assert source.transform([["a"]]).shape[1] == encoder().fit([["a"], ["b"]]).transform([["a"]]).shape[1]


def test_missing_values_are_categories():
    x = pd.DataFrame({"c": pd.Series(["a", None, np.nan, "a"], dtype=object)})
    answer = BinaryEncoder().fit_transform(x)
    assert answer.tolist() == [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_names_of_features_and_frames_out(encoder):
    frame = pd.DataFrame({"colour": ["r", "g", "b"], "size": [1, 2, 1]})
    source = encoder().set_output(transform="pandas").fit(frame)
    answer = source.transform(frame)
    assert list(answer.columns) == list(source.get_feature_names_out())
    assert answer.columns[0] == "colour_0"
    assert len(set(answer.columns)) == answer.shape[1]


def test_the_hash_is_the_same_in_every_process_and_for_equal_values():
    values = ["red", "", "é\ud800", 1, 1.5, None]
    script = "from mlsys_windtunnel.host.lookup import bucket; print([bucket(v, 1000) for v in eval(input())])"
    printed = subprocess.run(
        [sys.executable, "-c", script], input=repr(values), capture_output=True, text=True, check=True
    )
    assert eval(printed.stdout) == [bucket(value, 1000) for value in values]
    for equal in [
        (1, 1.0, True, np.int8(1), np.float32(1), np.True_),
        ("a", np.str_("a")),
        (np.nan, np.float32("nan")),
    ]:
        assert len({bucket(value, 10_000) for value in equal}) == 1
    assert bucket(10**400, 7) in range(7)


def test_the_hash_spreads_categories_over_its_buckets():
    counts = HashEncoder(10).fit_transform([[f"category {number}"] for number in range(2000)]).sum(axis=0)
    assert counts.sum() == 2000
    assert counts.min() > 140  # 200 expected, standard deviation 13
    assert counts.max() < 260


def test_unseen_categories_fall_to_their_bucket():
    seen = HashEncoder(5).fit([["a"], ["b"]])
    both = HashEncoder(5).fit([["a"], ["b"], ["new"], [None]])
    x = np.array([["new"], ["a"], [None]], dtype=object)
    assert np.array_equal(seen.transform(x), both.transform(x))


def test_the_package_of_estimators_is_imported_light():
    script = (
        "import sys, mlsys_windtunnel.estimators as e\n"
        "assert not {'torch', 'sklearn', 'pandas'} & set(sys.modules)\n"
        "e.HashEncoder\n"
        "assert 'torch' not in sys.modules, 'encoders need no torch'\n"
        "assert [getattr(e, name).__name__ for name in e.__all__] == e.__all__\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 4))


@pytest.fixture
def ratings() -> tuple[pd.DataFrame, np.ndarray]:
    """Ratings of rank two, with biases, of text and numbered ids."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 30, 900), rng.integers(0, 12, 900)
    affinity = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 12))
    values = 3 + rng.normal(size=30)[users] + rng.normal(size=12)[items] + affinity[users, items]
    return pd.DataFrame({"user": [f"u{user}" for user in users], "item": items}), values


def test_machines_learn_interactions_that_linear_models_cannot(numbers):
    product = numbers[:, 0] * numbers[:, 1] - numbers[:, 2]
    options = {"random_state": 0, "max_iter": 60}
    assert FactorizationMachineRegressor(4, **options).fit(numbers, product).score(numbers, product) > 0.95
    assert FactorizationMachineRegressor(0, **options).fit(numbers, product).score(numbers, product) < 0.7
    signs = np.sign(numbers[:, 0] * numbers[:, 1])
    assert FactorizationMachineClassifier(4, **options).fit(numbers, signs).score(numbers, signs) > 0.95


def test_machines_answer_as_the_formula_over_all_pairs_says(numbers):
    source = FactorizationMachineClassifier(3, max_iter=5, random_state=1).fit(numbers, np.arange(300) % 3)
    expected = numbers @ source.coef_.T + source.intercept_
    for output, factors in enumerate(source.factors_):
        for one in range(4):
            for other in range(one):
                expected[:, output] += factors[one] @ factors[other] * numbers[:, one] * numbers[:, other]
    np.testing.assert_allclose(source.decision_function(numbers), expected, atol=1e-12)
    probabilities = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(source.predict_proba(numbers), probabilities, atol=1e-12)


def test_machines_take_sparse_rows_and_learn_the_same_from_them(numbers):
    x = np.where(np.abs(numbers) > 1, numbers, 0.0)
    x[7] = 0
    target = x[:, 0] * x[:, 1]
    options = {"random_state": 0, "max_iter": 10}
    dense = FactorizationMachineRegressor(**options).fit(x, target)
    sparse = FactorizationMachineRegressor(**options).fit(scipy.sparse.csr_array(x), target)
    np.testing.assert_allclose(sparse.factors_, dense.factors_, atol=1e-4)
    np.testing.assert_allclose(dense.predict(scipy.sparse.csc_matrix(x)), dense.predict(x), atol=1e-12)


def test_targets_of_any_scale_are_learnt_alike(numbers, ratings):
    for make, x, y in [
        (FactorizationMachineRegressor, numbers, numbers[:, 0] * numbers[:, 1]),
        (MatrixFactorizationRegressor, *ratings),
    ]:
        small = make(max_iter=20, random_state=0).fit(x, y).predict(x)
        large = make(max_iter=20, random_state=0).fit(x, y * 1e6 - 3).predict(x)
        np.testing.assert_allclose(large, small * 1e6 - 3, rtol=1e-2, atol=1e3)


@pytest.mark.parametrize("make", FACTORIZATIONS)
def test_seeds_decide(make, numbers):
    x, y = numbers.round(), (numbers[:, 0] > 0).astype(int)
    fitted = [make(max_iter=2, random_state=seed).fit(x, y).predict(x + 0) for seed in (0, 0, 1)]
    scores = [make(max_iter=2, random_state=seed).fit(x, y) for seed in (0, 0, 1)]
    kept = [getattr(model, "factors_", getattr(model, "tables_", [None])[0]) for model in scores]
    assert np.array_equal(fitted[0], fitted[1])
    assert np.array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[0], kept[2])


@pytest.mark.parametrize("make", FACTORIZATIONS)
def test_progress_is_shown_only_when_asked_for(make, numbers, capfd):
    make(max_iter=2).fit(numbers.round(), [0, 1] * 150)
    assert capfd.readouterr() == ("", "")
    make(max_iter=2, verbose=True).fit(numbers.round(), [0, 1] * 150)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert make.__name__ in captured.err
    assert "100%" in captured.err


@pytest.mark.parametrize("make", FACTORIZATIONS)
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("n_factors", -1),
        ("n_factors", 1.5),
        ("max_iter", 0),
        ("max_iter", "9"),
        ("batch_size", True),
        ("learning_rate", 0),
        ("learning_rate", np.nan),
        ("alpha", -1e-9),
        ("tol", None),
        ("init_std", np.inf),
    ],
)
def test_parameters_of_factorisations_are_refused_before_work_starts(make, name, bad):
    with pytest.raises(InvalidInputError, match=f"^{name} is .* is needed"):
        make(**{name: bad}).fit("no table", "no target")


@pytest.mark.parametrize("make", FACTORIZATIONS)
def test_divergence_is_an_error(make, numbers):
    with pytest.raises(InvalidInputError, match="learning_rate below"):
        make(learning_rate=1e25, max_iter=50).fit(numbers.round(), [0, 1] * 150)


def test_one_class_is_refused(numbers):
    with pytest.raises(InvalidInputError, match=r"one class, \['a'\]"):
        FactorizationMachineClassifier().fit(numbers, ["a"] * 300)


def test_training_stops_when_the_loss_has_settled(numbers):
    source = FactorizationMachineRegressor(max_iter=1000, random_state=0).fit(numbers, numbers[:, 0])
    assert 5 < source.n_iter_ < 300


def test_matrix_factorisation_fills_in_what_was_not_rated(ratings):
    ids, values = ratings
    options = {"random_state": 0, "alpha": 1e-3}
    full = MatrixFactorizationRegressor(3, **options).fit(ids[:700], values[:700])
    assert full.score(ids[700:], values[700:]) > 0.8
    biases = MatrixFactorizationRegressor(0, **options).fit(ids[:700], values[:700])
    assert biases.score(ids[700:], values[700:]) < 0.6


def test_unseen_ids_have_no_bias(ratings):
    ids, values = ratings
    source = MatrixFactorizationRegressor(2, max_iter=3, random_state=0).fit(ids, values)
    nobody = pd.DataFrame({"user": ["nobody"], "item": [-1]})
    assert source.predict(nobody)[0] == pytest.approx(values.mean())
    known = pd.DataFrame({"user": ["nobody"], "item": [3]})
    assert source.predict(known)[0] == pytest.approx(values.mean() + source.tables_[1][3, 0])


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_translated_classifiers(same_answers, numbers, num_classes, dtype):
    x = numbers.astype(dtype)
    labels = np.array(["d", "b", "c", "a"])[(np.abs(x[:, 0] * x[:, 1] * 5).astype(int)) % num_classes]
    source = FactorizationMachineClassifier(max_iter=20, random_state=0).fit(x, labels)
    same_answers(source, x * 2)
    same_answers(source, x[:1])
    same_answers(source, scipy.sparse.csr_matrix(x))
    same_answers(source.fit(x[:, :1], labels), x[:, :1])


def test_translated_regressors(same_answers, numbers):
    frame = pd.DataFrame(numbers, columns=list("abcd"))
    source = FactorizationMachineRegressor(max_iter=20, random_state=0).fit(frame, 100 + 9 * frame.a * frame.b)
    same_answers(source, frame * 2)
    same_answers(source, frame[:1])
    same_answers(FactorizationMachineRegressor(0).fit(frame[["a"]], frame.b), frame[["a"]])


def test_a_machine_over_one_hot_categories_is_translated_whole(same_answers, ratings):
    ids, values = ratings
    machine = FactorizationMachineRegressor(2, max_iter=3, random_state=0)
    source = make_pipeline(OneHotEncoder(handle_unknown="ignore"), machine).fit(ids, values)
    module = same_answers(source, ids)
    assert module.frontend.fallbacks == ()
    same_answers(source, pd.DataFrame({"user": ["nobody", "u1"], "item": [3, -4]}))


@pytest.mark.parametrize("num_columns", [1, 2, 3])
def test_translated_matrix_factorisation(same_answers, ratings, num_columns):
    ids, values = ratings
    x = ids.assign(day=np.where(values > 3, np.nan, 1.0))[["user", "item", "day"][:num_columns]]
    source = MatrixFactorizationRegressor(2, max_iter=3, random_state=0).fit(x, values)
    same_answers(source, x)
    same_answers(source, x[:1])
    same_answers(source, x.assign(user=["nobody", "u1", "u2"] * 300))
