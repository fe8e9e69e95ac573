import pytest
from mlsys_bench.workload.arrivals import ClosedLoop, ConstantRate, Replay, Stepping
from mlsys_bench.workload.lengths import ORCA_PROMPTS, Constant, Empirical, LogNormal, Uniform
from mlsys_bench.workload.parse import ARRIVAL_FORMS, LENGTH_FORMS, parse_arrivals, parse_bounds, parse_lengths
from mlsys_bench.workload.results import LatencyBounds
from mlsys_bench.workload.trace import Trace, TraceItem, write_trace
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson


@pytest.mark.parametrize(
    ("text", "rate", "expected"),
    [
        ("poisson", 4.0, Poisson(4.0)),
        ("constant", 4.0, ConstantRate(4.0)),
        ("steps:10@2,20@8", None, Stepping(((10.0, 2.0), (20.0, 8.0)))),
        ("closed:8", None, ClosedLoop(8)),
        ("closed:8:0.5", None, ClosedLoop(8, 0.5)),
    ],
)
def test_arrivals(text, rate, expected):
    assert parse_arrivals(text, rate=rate) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uniform:32:512", Uniform(32, 512)),
        ("constant:7", Constant(7)),
        ("lognormal:24:97", LogNormal.from_mean_p99(24, 97)),
        ("lognormal:24:97:330", LogNormal.from_mean_p99(24, 97, high=330)),
        ("orca-prompts", ORCA_PROMPTS),
    ],
)
def test_lengths(text, expected):
    assert parse_lengths(text) == expected


def test_files_may_have_colons_in_their_names(tmp_path):
    (tmp_path / "a:b").write_text("3\n4\n")
    assert parse_lengths(f"file:{tmp_path}/a:b") == Empirical((3, 4))
    write_trace(Trace((TraceItem(1.5, 1, 1), TraceItem(2.5, 1, 1))), tmp_path / "c:d")
    assert parse_arrivals(f"replay:{tmp_path}/c:d", rate=None) == Replay((1.5, 2.5))


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ("poison", 4.0, "no arrival process 'poison': allowed are poisson, constant"),
        ("", 4.0, "no arrival process ''"),
        ("poisson", None, "need a rate: add --rate"),
        ("poisson", -1.0, "rate is -1.0"),
        ("poisson:3", 4.0, "has 1 parameters: write poisson"),
        ("closed", None, "has 0 parameters: write closed:CLIENTS"),
        ("closed:1:x", None, "'x' is not a number"),
        ("closed:8", 4.0, "leave --rate out"),
        ("closed:1:2:3", None, "has 3 parameters"),
        ("closed:1.5", None, "'1.5' is not a whole number"),
        ("steps:10", None, "write SECONDS@RATE"),
        ("steps:10@x", None, "'x' is not a number"),
        ("replay:nowhere", None, "nowhere"),
    ],
)
def test_bad_arrivals_are_refused(text, rate, message):
    with pytest.raises(InvalidInputError, match=message):
        parse_arrivals(text, rate=rate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gauss:3:4", "no length distribution 'gauss:3:4': allowed are uniform:LOW:HIGH"),
        ("uniform:3", "has 1 parameters: write uniform:LOW:HIGH"),
        ("uniform:3:x", "'x' is not a whole number"),
        ("uniform:9:3", "the smaller one"),
        ("wmt:3", "has 1 parameters: write wmt"),
        ("file:", "has 0 parameters: write file:PATH"),
    ],
)
def test_bad_lengths_are_refused(text, message):
    with pytest.raises(InvalidInputError, match=message):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500", LatencyBounds(latency_s=0.5)),
        ("latency=500", LatencyBounds(latency_s=0.5)),
        ("ttft=200, itl=50", LatencyBounds(ttft_s=0.2, itl_s=0.05)),
        ("normalized=40", LatencyBounds(normalized_latency_s=0.04)),
    ],
)
def test_bounds(text, expected):
    assert parse_bounds(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tft=3", "no latency bound 'tft': allowed are latency, ttft, itl, normalized"),
        ("ttft=x", "'x' is not a number"),
        ("", "'' is not a number"),
        ("0", "bound on latency_s is 0.0"),
    ],
)
def test_bad_bounds_are_refused(text, message):
    with pytest.raises(InvalidInputError, match=message):
        parse_bounds(text)


def test_forms_name_every_kind():
    assert ARRIVAL_FORMS.startswith("poisson, constant, steps:SECONDS@RATE,..., ")
    assert LENGTH_FORMS.startswith("uniform:LOW:HIGH, constant:LENGTH, ")
