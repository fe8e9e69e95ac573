"""Our own estimators keep scikit-learn's contract and answer what they promise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.estimators import BinaryEncoder, HashEncoder, TwoHotEncoder
from mlsys_windtunnel.lookup import bucket
from sklearn.utils.estimator_checks import parametrize_with_checks

ENCODERS = [HashEncoder, BinaryEncoder, TwoHotEncoder]


@parametrize_with_checks([encoder() for encoder in ENCODERS])
@pytest.mark.filterwarnings("ignore")
def test_the_contract_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3", None])
def test_parameters_out_of_range_are_refused_before_work_starts(encoder, bad):
    (name,) = encoder().get_params()
    with pytest.raises(InvalidInputError, match=f"{name} is .*; a whole number from 1"):
        encoder(**{name: bad}).fit("no table")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200))
def test_codes_of_categories_are_distinct_and_of_the_least_width(num_categories):
    x = np.arange(num_categories)[:, None]
    binary, two_hot = BinaryEncoder().fit_transform(x), TwoHotEncoder().fit_transform(x)
    assert len(np.unique(binary, axis=0)) == len(np.unique(two_hot, axis=0)) == num_categories
    assert binary.any(axis=1).all(), "all zeros is for what is unseen"
    assert 2 ** (binary.shape[1] - 1) <= num_categories < 2 ** binary.shape[1]
    assert (two_hot.sum(axis=1) == 2).all()
    width = two_hot.shape[1]
    assert (width - 1) * (width - 2) // 2 < num_categories <= width * (width - 1) // 2


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
    script = "from mlsys_windtunnel.lookup import bucket; print([bucket(v, 1000) for v in eval(input())])"
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
        "assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules), set(sys.modules)\n"
        "assert [getattr(e, name).__name__ for name in e.__all__] == e.__all__\n"
        "assert 'torch' not in sys.modules, 'encoders need no torch'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
