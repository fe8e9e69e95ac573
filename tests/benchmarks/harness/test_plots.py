"""Figures of benchmarks: what is drawn, and what is refused."""

import pytest
from mlsys_bench.harness import plots
from mlsys_core import plot
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import LatencySummary, LoadPoint


def point(offered, throughput, latency_s, *, tokens=10, closed=False):
    latency = LatencySummary.of([latency_s, 2 * latency_s])
    return LoadPoint(
        offered_rps=None if closed else offered,
        throughput_rps=throughput,
        latency=latency,
        normalized_latency=LatencySummary.of([latency_s / tokens]) if tokens else None,
    )


SYSTEMS = {
    "orca": [point(4.0, 4.0, 0.2), point(1.0, 1.0, 0.1), point(8.0, 5.0, 0.9)],
    "ft": [point(1.0, 1.0, 0.1), point(4.0, 2.0, 0.8)],
}


def test_throughput_latency_follows_the_load_and_normalises():
    axes = plots.throughput_latency(SYSTEMS).axes[0]
    assert axes.lines[0].get_xdata() == pytest.approx([1.0, 4.0, 5.0])
    assert axes.lines[0].get_ydata() == pytest.approx([10.0, 20.0, 90.0])
    assert axes.get_ylabel() == "median normalised latency (ms/token)"


def test_without_token_counts_throughput_latency_draws_end_to_end_for_all():
    axes = plots.throughput_latency({"a": [point(1.0, 1.0, 0.1)], "b": [point(1.0, 1.0, 0.1, tokens=0)]}).axes[0]
    assert axes.get_ylabel() == "median latency (ms)"
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([150.0, 150.0])


def test_bars_show_speed_ups_and_name_what_is_missing():
    axes = plots.bars({"a": {"x": 2.0, "y": 1.0}, "b": {"x": 3.0, "y": None}}, baseline="x").axes[0]
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert heights == [[1.0, 1.0], [2.0, 0.0]]
    assert [text.get_text() for text in axes.texts] == ["1.00", "1.00", "2.00", "missing"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    assert axes.get_ylabel() == "speed-up over x"


def test_bars_show_values_without_a_baseline():
    axes = plots.bars({"a": {"x": 1234.0, "y": 0.0123}}, ylabel="requests/s (higher is better)").axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.23e+03", "0.0123"]


def test_requests_in_order_are_points_below_a_limit():
    figure = plots.by_request({"a": [0.1, 0.2, 0.3], "b": [0.2]}, steps=[2], limit_s=0.25)
    assert plot.to_svg(figure).startswith("<svg")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.throughput_latency({"a": []}), "nothing to plot"),
        (lambda: plots.bars({}), "nothing to plot"),
        (lambda: plots.bars({"a": {"x": 1.0}}), "ylabel"),
        (lambda: plots.bars({"a": {"x": 1.0}}, baseline="y"), "'a' has no value for the baseline 'y'; it has x"),
        (lambda: plots.bars({"a": {"x": 1.0, "y": 0.0}}, baseline="x"), "duration of 'y' in 'a' is 0.0"),
    ],
)
def test_bad_data_are_refused(draw, message):
    with pytest.raises(InvalidInputError, match=message):
        draw()
