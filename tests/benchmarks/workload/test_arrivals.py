import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_bench.workload.arrivals import ClosedLoop, ConstantRate, Replay, Stepping
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson

rates = st.floats(0.01, 1e4)
seconds = st.floats(0.01, 100.0)
processes = st.one_of(
    st.builds(Poisson, rates),
    st.builds(ConstantRate, rates),
    st.builds(ClosedLoop, st.integers(1, 9)),
    st.lists(st.tuples(seconds, st.one_of(st.just(0.0), rates)), min_size=1, max_size=5)
    .filter(lambda steps: any(rate for _, rate in steps))
    .map(lambda steps: Stepping(tuple(steps))),
    st.lists(st.floats(0, 1e3), min_size=60, max_size=60).map(lambda times: Replay(tuple(sorted(times)), speed=2.0)),
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


@pytest.mark.parametrize(
    "process",
    [
        Poisson(8.0),
        ConstantRate(8.0),
        Stepping(((2.0, 4.0), (1.0, 0.0), (1.0, 24.0))),  # (2*4 + 0 + 24) / 4 = 8
    ],
)
def test_mean_rate_is_kept(process):
    n = 40_000
    assert n / process.times(n, rng())[-1] == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("process", [Poisson, ConstantRate])
def test_twice_the_rate_is_the_same_pattern_twice_as_fast(process):
    assert process(2.0).times(50, rng()) * 2.0 == pytest.approx(process(1.0).times(50, rng()))


def test_poisson_gaps_are_exponential():
    gaps = np.diff(Poisson(1.0).times(40_000, rng()))
    assert gaps.std() == pytest.approx(1.0, rel=0.03)
    assert (gaps > 1.0).mean() == pytest.approx(np.exp(-1), abs=0.01)


def test_steps_have_their_own_rates_and_pauses_are_silent():
    times = Stepping(((10.0, 5.0), (5.0, 0.0), (10.0, 50.0))).times(30_000, rng())
    within = times % 25.0
    assert not ((within > 10.0) & (within < 15.0)).any()
    cycles = times[-1] / 25.0
    assert (within <= 10.0).sum() / (10.0 * cycles) == pytest.approx(5.0, rel=0.05)
    assert (within >= 15.0).sum() / (10.0 * cycles) == pytest.approx(50.0, rel=0.05)


def test_first_step_may_be_a_pause():
    assert Stepping(((3.0, 0.0), (1.0, 100.0))).times(5, rng())[0] >= 3.0


def test_replay_scales_and_refuses_more_than_recorded():
    replay = Replay((0.0, 1.0, 4.0), speed=4.0)
    assert replay.times(2, rng()).tolist() == [0.0, 0.25]
    with pytest.raises(InvalidInputError, match="4 arrivals asked for, 3 recorded"):
        replay.times(4, rng())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "arrival rate is 0.0"),
        (lambda: Poisson(float("nan")), "arrival rate is nan"),
        (lambda: ConstantRate(-1.0), "arrival rate is -1.0"),
        (lambda: Stepping(()), "nothing would ever arrive"),
        (lambda: Stepping(((1.0, 0.0),)), "nothing would ever arrive"),
        (lambda: Stepping(((0.0, 1.0),)), "duration of a step is 0.0"),
        (lambda: Stepping(((1.0, -1.0),)), "rate of a step is -1.0"),
        (lambda: ClosedLoop(0), "concurrency is 0"),
        (lambda: ClosedLoop(1, -1.0), "think time is -1.0"),
        (lambda: Replay((1.0, 0.5)), "time 1 lies before"),
        (lambda: Replay((-1.0,)), "none below 0"),
        (lambda: Replay((float("inf"),)), "finite"),
        (lambda: Replay((1.0,), speed=0.0), "speed is 0.0"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()
