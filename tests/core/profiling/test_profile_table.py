from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import ProfileCache, ProfileKey, ProfileTable, UnitProfile, measure


def table(times: dict[int, float], unit: str = "cell") -> ProfileTable:
    return ProfileTable((UnitProfile(unit, tuple(times), tuple(times.values())),))


class Machine:
    """Runs in time a + b n; the clock moves only while it runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[tuple[str, int]] = []
        self.slow_runs: set[int] = set()

    def run(self, unit: str, batch_size: int) -> None:
        factor = 100.0 if len(self.runs) in self.slow_runs else 1.0
        self.runs.append((unit, batch_size))
        self.now += factor * ((1.0 if unit == "cell" else 2.0) + 0.25 * batch_size)


def test_measure_interleaves_warms_up_and_takes_the_median() -> None:
    machine, seen = Machine(), []
    machine.slow_runs = {0, 1, 2, 3, 4, 5}  # the warm-up, and one run of two units
    profile = measure(
        ["cell", "stage"],
        [1, 4],
        run=machine.run,
        clock=lambda: machine.now,
        warmup=1,
        repeats=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    forth = [("cell", 1), ("cell", 4), ("stage", 1), ("stage", 4)]
    assert machine.runs == forth + forth[::-1] + forth + forth[::-1]
    assert profile["cell"].seconds == pytest.approx((1.25, 2.0))
    assert profile["stage"].seconds == pytest.approx((2.25, 3.0))
    assert profile["stage"].spread == pytest.approx((99.0, 99.0)), "the slow first repeat shows"
    assert profile["cell"].spread == pytest.approx((0.0, 0.0), abs=1e-9)
    assert seen == [(done, 16) for done in range(1, 17)]


def test_the_median_is_kept_of_an_even_number_too() -> None:
    times = iter([1.0, 9.0, 2.0, 4.0])
    now = [0.0]

    def run(unit: str, batch_size: int) -> None:
        now[0] += next(times)

    assert measure(["a"], [1], run=run, clock=lambda: now[0], warmup=0, repeats=4)["a"].seconds == (3.0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": []}, "name one or more units"),
        ({"units": ["a", "a"]}, "each once"),
        ({"batch_sizes": []}, "batch sizes must be"),
        ({"batch_sizes": [0, 1]}, "batch sizes must be"),
        ({"batch_sizes": [2, 1]}, "rising"),
        ({"batch_sizes": [1.5]}, "integers"),
        ({"repeats": 0}, "repeats=0"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments: dict[str, object], message: str) -> None:
    def run(unit: str, batch_size: int) -> None:
        raise AssertionError("nothing may run")

    with pytest.raises(InvalidInputError, match=message):
        measure(**{"units": ["a"], "batch_sizes": [1], **arguments}, run=run)  # type: ignore[arg-type]


def test_a_clock_that_stands_still_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"takes 0\.0 s at batch size 1: .* clock is too coarse"):
        measure(["a"], [1], run=lambda unit, batch_size: None, clock=lambda: 5.0)


def test_between_measured_sizes_time_is_linear() -> None:
    profile = table({1: 1.0, 4: 4.0, 8: 6.0})
    assert [profile.seconds("cell", n) for n in (1, 2, 3, 4, 6, 8)] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert profile.throughput("cell", 8) == pytest.approx(8 / 6)


@pytest.mark.parametrize("batch_size", [1, 9])
def test_outside_the_measured_range_only_when_asked(batch_size: int) -> None:
    profile = table({2: 1.0, 4: 1.5, 8: 3.0})
    with pytest.raises(InvalidInputError, match=f"measured at batch sizes 2 to 8, not at {batch_size}"):
        profile.seconds("cell", batch_size)
    assert profile.seconds("cell", 1, extrapolate=True) == pytest.approx(0.75)
    assert profile.seconds("cell", 12, extrapolate=True) == pytest.approx(4.5)


def test_extrapolation_keeps_to_what_batching_allows() -> None:
    steep = table({4: 1.0, 5: 3.0})  # drawn on, it would be negative at 1
    assert steep.seconds("cell", 1, extrapolate=True) == 0.25
    falling = table({2: 3.0, 4: 2.0})  # noise
    assert falling.seconds("cell", 1, extrapolate=True) == 3.0
    assert falling.seconds("cell", 100, extrapolate=True) == 2.0
    single = table({4: 2.0})
    assert (single.seconds("cell", 1, extrapolate=True), single.seconds("cell", 8, extrapolate=True)) == (2.0, 4.0)


profiles = st.dictionaries(st.integers(1, 64), st.floats(1e-6, 10), min_size=1, max_size=8).map(
    lambda times: dict(sorted(times.items()))
)


@given(profiles, st.integers(1, 100))
def test_times_are_positive_and_between_their_neighbours(times: dict[int, float], batch_size: int) -> None:
    seconds = table(times).seconds("cell", batch_size, extrapolate=True)
    assert seconds > 0
    below = [time for size, time in times.items() if size <= batch_size]
    above = [time for size, time in times.items() if size >= batch_size]
    if below and above:
        low, high = sorted((below[-1], above[0]))
        assert low * (1 - 1e-9) <= seconds <= high * (1 + 1e-9)


@given(profiles, st.floats(0.05, 1.0))
def test_the_knee_is_the_smallest_size_good_enough(times: dict[int, float], fraction: float) -> None:
    knee = table(times).knee("cell", fraction=fraction)
    best = max(size / time for size, time in times.items())
    assert knee / times[knee] >= fraction * best
    assert all(size / time < fraction * best for size, time in times.items() if size < knee)


def test_the_knee_of_a_device_that_saturates() -> None:
    profile = table({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.1, 16: 2.0, 32: 4.0})
    assert profile.knee("cell") == 8 or profile.knee("cell") == 16
    assert profile.knee("cell", fraction=1.0) == 16
    assert profile.knee("cell", fraction=0.5) == 4
    for fraction in (0.0, 1.1):
        with pytest.raises(InvalidInputError, match="above 0 and at most 1"):
            profile.knee("cell", fraction=fraction)


def test_unknown_units_and_sizes() -> None:
    profile = table({1: 1.0})
    with pytest.raises(InvalidInputError, match="no profile of unit 'other'; there are cell"):
        profile.seconds("other", 1)
    with pytest.raises(InvalidInputError, match="must be 1 or more"):
        profile.seconds("cell", 0, extrapolate=True)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((1, 2), (1.0,), "2 batch sizes, 1 times"),
        ((2, 1), (1.0, 1.0), "rising"),
        ((1,), (float("nan"),), "finite and positive"),
        ((1,), (-1.0,), "finite and positive"),
        ((), (), "at least one"),
    ],
)
def test_impossible_profiles_are_refused(sizes: tuple[int, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        UnitProfile("cell", sizes, seconds)


def test_a_table_has_units_each_once() -> None:
    profile = UnitProfile("cell", (1,), (1.0,))
    for units in ((), (profile, profile)):
        with pytest.raises(InvalidInputError, match="one or more units, each once"):
            ProfileTable(units)


@given(profiles, profiles)
def test_json_and_pickle_keep_every_bit(left: dict[int, float], right: dict[int, float]) -> None:
    profile = ProfileTable((*table(left, "a").units, *table(right, "b").units))
    assert ProfileTable.from_json(profile.to_json()) == profile
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert hash(pickle.loads(pickle.dumps(profile))) == hash(profile)


@pytest.mark.parametrize(
    "change", [{"format": "other"}, {"version": 99}, {"units": []}, {"units": [{}]}, {"units": 3}, {"units": None}]
)
def test_other_json_is_refused(change: dict[str, object]) -> None:
    document = json.loads(table({1: 1.0}).to_json()) | change
    with pytest.raises(InvalidInputError, match="no profile table of version 1"):
        ProfileTable.from_json(json.dumps(document))


def test_a_table_with_numbers_without_bound_is_refused():
    table = measure(["a"], [1], run=lambda unit, size: None)
    document = json.loads(table.to_json())
    document["units"][0]["seconds"] = [10**400]
    with pytest.raises(InvalidInputError, match="measure it again"):
        ProfileTable.from_json(json.dumps(document))


KEY = ProfileKey.of("cpu: 2 cores", {"torch": "2.11", "mlsys-core": "0.1"}, "lstm-1024-float32")
TABLE = ProfileTable((UnitProfile("cell", (1, 2), (0.1, 0.30000000000000004), (0.01, 0.02)),))


def never() -> ProfileTable:
    raise AssertionError("must not be measured")


def test_measured_once_and_then_read(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "deep" / "profiles")
    assert cache.get(KEY) is None
    assert cache.get_or_measure(KEY, lambda: TABLE) == TABLE
    assert ProfileCache(cache.cache_dir).get_or_measure(KEY, never) == TABLE
    assert [path.suffix for path in cache.cache_dir.iterdir()] == [".json"], "no temporary file is left"


@pytest.mark.parametrize(
    "other",
    [
        ProfileKey.of("cpu: 4 cores", dict(KEY.versions), KEY.content),
        ProfileKey.of(KEY.device, {"torch": "2.12", "mlsys-core": "0.1"}, KEY.content),
        ProfileKey.of(KEY.device, dict(KEY.versions), "lstm-2048-float32"),
    ],
)
def test_another_device_version_or_content_is_another_table(other: ProfileKey, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    assert cache.get(other) is None
    assert cache.path(other) != cache.path(KEY)


def test_the_order_of_versions_does_not_matter() -> None:
    assert (
        ProfileKey.of("cpu", {"a": "1", "b": "2"}, "x").digest()
        == ProfileKey.of("cpu", {"b": "2", "a": "1"}, "x").digest()
    )


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"key": {}, "table": {}}', "\x00"])
def test_a_damaged_file_is_ignored_with_a_warning_and_rebuilt(content: str, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    cache.path(KEY).write_text(content)
    with pytest.warns(RuntimeWarning, match="ignoring the profile"):
        assert cache.get_or_measure(KEY, lambda: TABLE) == TABLE
    assert cache.get_or_measure(KEY, never) == TABLE


def test_a_file_cut_short_and_one_with_a_bad_table_are_ignored(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    whole = cache.path(KEY).read_text()
    document = json.loads(whole)
    document["table"]["units"][0]["seconds"] = [0.1]
    for text in (whole[: len(whole) // 2], json.dumps(document)):
        cache.path(KEY).write_text(text)
        with pytest.warns(RuntimeWarning, match="will be measured again"):
            assert cache.get(KEY) is None


def test_the_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TABLE)
    other = ProfileKey.of("cpu", {}, "x")
    cache.path(KEY).rename(cache.path(other))
    with pytest.warns(RuntimeWarning, match="another key"):
        assert cache.get(other) is None


def test_a_folder_that_cannot_be_written_to_does_not_cost_the_table(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    cache = ProfileCache(tmp_path / "taken")
    with pytest.warns(RuntimeWarning, match="cannot keep profiles in"):
        assert cache.get_or_measure(KEY, lambda: TABLE) == TABLE
