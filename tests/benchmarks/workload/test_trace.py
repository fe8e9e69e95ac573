"""Lengths and traces: what is drawn, written, read and refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_bench.workload.arrivals import ClosedLoop, ConstantRate, Replay
from mlsys_bench.workload.lengths import (
    ORCA_OUTPUTS,
    ORCA_PROMPTS,
    WMT_SENTENCES,
    Constant,
    Empirical,
    LogNormal,
    Uniform,
)
from mlsys_bench.workload.trace import Trace, TraceItem, make_trace, read_trace, write_trace
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson


def orca_trace(*, rate=4.0, seed=0, num_items=40):
    return make_trace(Poisson(rate), prompts=ORCA_PROMPTS, outputs=ORCA_OUTPUTS, num_items=num_items, seed=seed)


def test_same_seed_gives_the_same_bytes_another_seed_others(tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_trace(orca_trace(seed=seed), tmp_path / name)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a.split(b"\n")[1:] != c.split(b"\n")[1:]
    assert a.endswith(b"}\n")
    assert not list(tmp_path.glob("*.partial"))


def test_another_rate_brings_the_same_requests_in_the_same_order():
    slow, fast = orca_trace(rate=1.0), orca_trace(rate=4.0)
    assert [(item.num_input_tokens, item.num_output_tokens) for item in slow] == [
        (item.num_input_tokens, item.num_output_tokens) for item in fast
    ]
    assert [item.arrival_s for item in fast.at_speed(0.25)] == pytest.approx([i.arrival_s for i in slow], abs=1e-5)


def test_another_arrival_process_brings_the_same_requests():
    def lengths(arrivals):
        trace = make_trace(arrivals, prompts=ORCA_PROMPTS, outputs=ORCA_OUTPUTS, num_items=20, seed=5)
        return [(item.num_input_tokens, item.num_output_tokens) for item in trace]

    assert lengths(Poisson(4.0)) == lengths(ConstantRate(4.0)) == lengths(ClosedLoop(2))


def test_header_says_how_the_trace_was_made(tmp_path):
    write_trace(orca_trace(seed=3), tmp_path / "trace")
    header = json.loads((tmp_path / "trace").read_text().split("\n")[0])
    assert header["format"] == "mlsys-trace"
    assert header["version"] == 1
    assert header["num_items"] == 40
    assert header["made_by"] == {
        "arrivals": {"kind": "Poisson", "rate": 4.0},
        "prompts": {"kind": "Uniform", "low": 32, "high": 512},
        "outputs": {"kind": "Uniform", "low": 1, "high": 128},
        "seed": 3,
    }


def test_header_leaves_recorded_data_out():
    trace = make_trace(
        Replay((0.0, 1.0), speed=2.0), prompts=Empirical((1, 2)), outputs=Empirical((3,)), num_items=2, seed=0
    )
    assert trace.made_by["arrivals"] == {"kind": "Replay", "speed": 2.0}
    assert trace.made_by["prompts"] == {"kind": "Empirical"}


items = st.builds(
    TraceItem,
    st.floats(0, 1e6),
    st.integers(1, 4096),
    st.integers(1, 4096),
    prompt=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    extra=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers() | st.text("aé\n\u2028")),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(items, max_size=8))
def test_written_values_are_read_back(tmp_path, drawn):
    from dataclasses import replace

    ordered = sorted(drawn, key=lambda item: item.arrival_s)
    trace = Trace(tuple(replace(item, index=index) for index, item in enumerate(ordered)), {"by": "hand"})
    write_trace(trace, tmp_path / "trace")
    assert read_trace(tmp_path / "trace") == trace


def test_closed_loop_survives_the_file(tmp_path):
    mode = ClosedLoop(3, think_time_s=0.5)
    write_trace(make_trace(mode, prompts=ORCA_PROMPTS, outputs=ORCA_OUTPUTS, num_items=2, seed=0), tmp_path / "trace")
    assert read_trace(tmp_path / "trace").closed_loop == mode
    assert orca_trace().closed_loop is None


HEADER = '{"format":"mlsys-trace","version":1,"num_items":1}\n'
LINE = '{"arrival_s":1.0,"num_input_tokens":3,"num_output_tokens":4}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: not JSON"),
        ("[]\n", "line 1: expected a JSON object"),
        ("{}\n", "no mlsys-trace header"),
        ('{"format":"mlsys-trace","version":2}\n', "version 2"),
        (HEADER, "holds 0 requests, its header says 1"),
        (HEADER + LINE + LINE, "holds 2 requests, its header says 1"),
        (HEADER + LINE[:20], "line 2: not JSON"),
        (HEADER + LINE + "\n", "line 3: not JSON"),
        (HEADER + LINE + LINE.replace("1.0", "0.5"), "line 3: arrival_s 0.5 lies before"),
        (HEADER + LINE.replace("1.0", "-1"), "line 2: arrival_s is -1"),
        (HEADER + LINE.replace("1.0", "NaN"), "line 2: arrival_s is nan"),
        (HEADER + LINE.replace("1.0", "1" + "0" * 400), "line 2: "),
        (HEADER + LINE.replace("1.0", '"1"'), "line 2: arrival_s is '1'"),
        (HEADER + LINE.replace("3", "0"), "line 2: num_input_tokens is 0"),
        (HEADER + LINE.replace("3", "true"), "line 2: num_input_tokens is True"),
        (HEADER + LINE.replace("3", "3.5"), "line 2: num_input_tokens is 3.5"),
        (HEADER + LINE.replace(',"num_output_tokens":4', ""), "line 2: 'num_output_tokens' is missing"),
        (HEADER + LINE.replace("}", ',"colour":1}'), "line 2: unknown field 'colour'"),
        (HEADER + LINE.replace("}", ',"extra":[]}'), r"line 2: extra is \[\]"),
        (HEADER.replace("}", ',"made_by":3}') + LINE, "line 1: made_by"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_handwritten_file_without_made_by_is_fine(tmp_path):
    (tmp_path / "trace").write_text(HEADER + LINE)
    assert read_trace(tmp_path / "trace").items == (TraceItem(1.0, 3, 4),)


def test_unwritable_traces_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be written"):
        write_trace(orca_trace(), tmp_path / "nowhere" / "trace")
    with pytest.raises(InvalidInputError, match="JSON cannot"):
        write_trace(Trace((TraceItem(0.0, 1, 1, extra={"a": float("nan")}),)), tmp_path / "trace")
    with pytest.raises(InvalidInputError, match="JSON cannot"):
        write_trace(Trace((TraceItem(0.0, 1, 1, extra={"a": object()}),)), tmp_path / "trace")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("num_items", "seed"), [(0, 0), (-1, 0), (1, -1), (2.0, 0)])
def test_bad_counts_and_seeds_are_refused(num_items, seed):
    with pytest.raises(InvalidInputError):
        make_trace(ConstantRate(1.0), prompts=ORCA_PROMPTS, outputs=ORCA_OUTPUTS, num_items=num_items, seed=seed)


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
