import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_bench.workload.lengths import (
    ORCA_OUTPUTS,
    ORCA_PROMPTS,
    WMT_SENTENCES,
    Constant,
    Empirical,
    LogNormal,
    Uniform,
)
from mlsys_core.errors import InvalidInputError


def rng(seed=0):
    return np.random.default_rng(seed)


counts = st.integers(1, 2000)
distributions = st.one_of(
    st.tuples(counts, counts).map(lambda pair: Uniform(min(pair), max(pair))),
    st.builds(Constant, counts),
    st.builds(LogNormal, st.floats(-5, 50), st.floats(0, 5)),
    st.builds(Empirical, st.lists(counts, min_size=1).map(tuple)),
)


@settings(max_examples=100)
@given(distribution=distributions, n=st.integers(0, 50), seed=st.integers(0, 2**32))
def test_samples_are_positive_integers_and_reproducible(distribution, n, seed):
    sample = distribution.sample(n, rng(seed))
    assert sample.shape == (n,)
    assert sample.dtype == np.int64
    assert (sample >= 1).all()
    assert sample.tolist() == distribution.sample(n, rng(seed)).tolist()


@settings(max_examples=50)
@given(mean=st.floats(2.0, 1e4), ratio=st.floats(1.0, 14.9))
def test_log_normal_has_the_mean_and_p99_it_was_made_from(mean, ratio):
    made = LogNormal.from_mean_p99(mean, mean * ratio)
    assert np.exp(made.mu + made.sigma**2 / 2) == pytest.approx(mean)
    assert np.exp(made.mu + 2.3263478740408408 * made.sigma) == pytest.approx(mean * ratio)


def test_orca_distributions_reach_both_ends():
    prompts, outputs = ORCA_PROMPTS.sample(50_000, rng()), ORCA_OUTPUTS.sample(50_000, rng())
    assert (prompts.min(), prompts.max()) == (32, 512)
    assert (outputs.min(), outputs.max()) == (1, 128)
    assert prompts.mean() == pytest.approx(272, rel=0.02)


def test_wmt_sentences_match_the_paper():
    sample = WMT_SENTENCES.sample(100_000, rng())
    assert sample.mean() == pytest.approx(24, rel=0.03)
    assert np.percentile(sample, 99) == pytest.approx(97, rel=0.05)
    assert sample.max() <= 330
    assert sample.min() >= 1


def test_log_normal_is_clipped_at_both_ends():
    sample = LogNormal(mu=3.0, sigma=1.0, low=10, high=40).sample(5_000, rng())
    assert (sample.min(), sample.max()) == (10, 40)


def test_empirical_draws_with_the_observed_frequencies():
    sample = Empirical((5, 5, 5, 9)).sample(20_000, rng())
    assert set(sample.tolist()) == {5, 9}
    assert (sample == 5).mean() == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("text", ["# lengths\n3\n\n 7 \n3\n", "[3, 7, 3]", "\n [3,\n7, 3]"])
def test_empirical_from_file(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert tuple(Empirical.from_file(path).observed) == (3, 7, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3\nx\n", "line 2: 'x'"),
        ("3\n\n0\n", "line 3: '0'"),
        ("3.5", "line 1: '3.5'"),
        ("", "at least one observed length"),
        ("[3, ", "no JSON list|is none"),
        ("[3, 0]", "observed length is 0"),
        ("[true]", "observed length is True"),
    ],
)
def test_malformed_length_files_are_refused(tmp_path, text, message):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        Empirical.from_file(path)


def test_missing_and_binary_length_files_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="nowhere"):
        Empirical.from_file(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="binary"):
        Empirical.from_file(tmp_path / "binary")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(5, 4), "upper bound is the smaller"),
        (lambda: Uniform(0, 4), "lower bound of a length is 0"),
        (lambda: Uniform(1.5, 4), "lower bound of a length is 1.5"),
        (lambda: Constant(0), "length is 0"),
        (lambda: LogNormal(float("inf"), 1.0), "mu is inf"),
        (lambda: LogNormal(1.0, -1.0), "sigma is -1.0"),
        (lambda: LogNormal(1.0, 1.0, low=5, high=4), "upper bound of a length is 4"),
        (lambda: LogNormal.from_mean_p99(10, 9), "give a p99 from 10 to 149"),
        (lambda: LogNormal.from_mean_p99(10, 160), "give a p99 from 10 to 149"),
        (lambda: LogNormal.from_mean_p99(0, 1), "mean length is 0"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()
