import pytest
from mlsys_bench.workload.arrivals import ClosedLoop
from mlsys_bench.workload.lengths import ORCA_PROMPTS, Constant, Uniform
from mlsys_bench.workload.parse import parse_arrivals, parse_lengths
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson


@pytest.mark.parametrize(
    ("text", "rate", "expected"),
    [("poisson", 4.0, Poisson(4.0)), ("closed:8", None, ClosedLoop(8)), ("closed:8:0.5", None, ClosedLoop(8, 0.5))],
)
def test_arrivals(text, rate, expected):
    assert parse_arrivals(text, rate=rate) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("uniform:32:512", Uniform(32, 512)), ("constant:7", Constant(7)), ("orca-prompts", ORCA_PROMPTS)],
)
def test_lengths(text, expected):
    assert parse_lengths(text) == expected


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ("poison", 4.0, "no arrival process 'poison': allowed are poisson, closed:CLIENTS"),
        ("", 4.0, "no arrival process ''"),
        ("poisson", None, "need a rate: add --rate"),
        ("poisson", -1.0, "rate is -1.0"),
        ("poisson:3", 4.0, "has 1 parameters: write poisson"),
        ("closed:8", 4.0, "leave --rate out"),
        ("closed:1:2:3", None, "has 3 parameters"),
        ("closed:1.5", None, "'1.5' is not a whole number"),
        ("closed:1:x", None, "'x' is not a number"),
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
        ("orca-prompts:3", "has 1 parameters: write orca-prompts"),
    ],
)
def test_bad_lengths_are_refused(text, message):
    with pytest.raises(InvalidInputError, match=message):
        parse_lengths(text)
