import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_bench.workload.arrivals import AtOnce, ClosedLoop
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson

rates = st.floats(0.01, 1e4)
processes = st.one_of(
    st.builds(Poisson, rates),
    st.builds(ClosedLoop, st.integers(1, 9)),
    st.just(AtOnce()),
)


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=150)
@given(process=processes, n=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_times_are_sorted_finite_and_reproducible(process, n, seed):
    times = process.times(n, rng(seed))
    assert times.shape == (n,)
    assert times.dtype == np.float64
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= 0).all()
    assert times.tolist() == process.times(n, rng(seed)).tolist()


def test_mean_rate_is_kept():
    n = 40_000
    assert n / Poisson(8.0).times(n, rng())[-1] == pytest.approx(8.0, rel=0.05)


def test_twice_the_rate_is_the_same_pattern_twice_as_fast():
    assert Poisson(2.0).times(50, rng()) * 2.0 == pytest.approx(Poisson(1.0).times(50, rng()))


def test_poisson_gaps_are_exponential():
    gaps = np.diff(Poisson(1.0).times(40_000, rng()))
    assert gaps.std() == pytest.approx(1.0, rel=0.03)
    assert (gaps > 1.0).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "arrival rate is 0.0"),
        (lambda: Poisson(float("nan")), "arrival rate is nan"),
        (lambda: ClosedLoop(0), "concurrency is 0"),
        (lambda: ClosedLoop(1, -1.0), "think time is -1.0"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()
