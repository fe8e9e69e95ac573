import dataclasses
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_bench.workload.arrivals import ClosedLoop
from mlsys_bench.workload.loadgen import LoadProgress
from mlsys_bench.workload.results import LatencyBounds, LoadResult, RequestRecord, load_result
from mlsys_bench.workload.tables import comparison_table, progress_bar, result_table, warnings_of
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import LatencySummary
from rich.console import Console


def record(index=0, *, at=0.0, late=0.0, tokens=(0.5, 0.6, 0.8), took=0.8, **fields):
    """Due at ``at``; tokens and end are relative to that."""
    defaults = {
        "num_input_tokens": 10,
        "num_output_tokens": len(tokens) or None,
        "num_planned_tokens": len(tokens) or 1,
        "token_s": tuple(at + token_s for token_s in tokens),
    }
    return RequestRecord(index=index, scheduled_s=at, sent_s=at + late, done_s=at + took, **{**defaults, **fields})


def result_of(*records, **fields):
    defaults = {"name": "test", "num_planned": len(records), "max_connections": 512}
    return LoadResult(records=records, **{**defaults, **fields})


def text_of(renderable, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_figures_of_one_record():
    one = record(at=2.0, late=0.1)
    assert one.latency_s == pytest.approx(0.8)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.mean_itl_s == pytest.approx(0.15)
    assert one.normalized_latency_s == pytest.approx(0.8 / 3)
    assert one.lateness_s == pytest.approx(0.1)
    assert one.ok


def test_chunks_of_several_tokens_count_by_the_servers_number():
    one = record(num_output_tokens=7)
    assert one.mean_itl_s == pytest.approx(0.3 / 6)
    assert one.normalized_latency_s == pytest.approx(0.8 / 7)


def test_figures_that_a_record_does_not_have_are_none():
    silent = record(tokens=())
    assert (silent.ttft_s, silent.mean_itl_s, silent.normalized_latency_s) == (None, None, None)
    assert record(tokens=(0.5,)).mean_itl_s is None
    assert record(tokens=(), num_output_tokens=0).normalized_latency_s is None


@settings(max_examples=100)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_summary_orders_and_matches_a_reference(values):
    summary = LatencySummary.of(values)
    assert summary.count == len(values)
    assert min(values) <= summary.p50 <= summary.p90 <= summary.p99 <= summary.max == max(values)
    assert summary.p90 == pytest.approx(float(np.quantile(values, 0.9)))
    assert summary.mean == pytest.approx(sum(values) / len(values))


def test_summary_of_nothing_is_none():
    assert LatencySummary.of([None]) is None


def test_throughput_counts_successes_only():
    result = result_of(
        record(0, at=1.0), record(1, at=2.0, took=9.0), record(2, at=3.0, error="http_500", detail="x", took=0.1)
    )
    assert result.duration_s == pytest.approx(10.0)  # first due at 1, last done at 11
    assert result.throughput_rps == pytest.approx(0.2)
    assert result.throughput_tokens_per_s == pytest.approx(0.6)
    assert result.offered_rps == pytest.approx(1.0)
    assert result.latency.count == 2
    assert result.itl.count == 4
    assert result.errors == {"http_500": 1}


def test_an_empty_result_has_no_figures_and_no_crash():
    result = result_of(num_planned=5, interrupted=True)
    assert result.duration_s == 0.0
    assert result.throughput_rps == 0.0
    assert result.latency is None
    assert result.offered_rps is None
    assert result.goodput(LatencyBounds(latency_s=1.0)).share == 0.0
    assert "test" in text_of(comparison_table([result], bounds=LatencyBounds(latency_s=1.0)))
    with pytest.raises(InvalidInputError, match="no successful request"):
        result.point()


def test_goodput_counts_failures_as_bad_and_cancelled_ones_not_at_all():
    result = result_of(
        record(0, took=1.0),
        record(1, took=2.0),
        record(2, took=0.1, error="http_500"),
        record(3, took=10.0, error="cancelled"),
    )
    goodput = result.goodput(LatencyBounds(latency_s=1.0))
    assert goodput.num_good == 1
    assert goodput.share == pytest.approx(1 / 3)
    assert goodput.rps == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({"latency_s": 0.8}, True),
        ({"latency_s": 0.79}, False),
        ({"ttft_s": 0.5}, True),
        ({"ttft_s": 0.49}, False),
        ({"itl_s": 0.16}, True),
        ({"itl_s": 0.14}, False),
        ({"normalized_latency_s": 0.27}, True),
        ({"normalized_latency_s": 0.26}, False),
        ({"ttft_s": 0.5, "itl_s": 0.14}, False),
        ({"ttft_s": 0.49, "itl_s": 0.16}, False),
        ({"ttft_s": 0.5, "itl_s": 0.16, "latency_s": 1.0}, True),
    ],
)
def test_every_bound_must_be_met(bounds, good):
    assert LatencyBounds(**bounds).met_by(record()) is good


def test_bounds_on_missing_figures_are_not_met_but_one_token_has_no_gap_to_miss():
    assert not LatencyBounds(ttft_s=9.0).met_by(record(tokens=()))
    assert not LatencyBounds(itl_s=9.0).met_by(record(tokens=()))
    assert LatencyBounds(itl_s=1e-6).met_by(record(tokens=(0.5,)))


@pytest.mark.parametrize("bad", [{}, {"latency_s": 0.0}, {"ttft_s": -1.0}])
def test_bad_bounds_are_refused(bad):
    with pytest.raises(InvalidInputError):
        LatencyBounds(**bad)


def test_point_takes_the_figures_along():
    point = result_of(record(0, at=0.0), record(1, at=2.0)).point()
    assert point.offered_rps == pytest.approx(0.5)
    assert point.latency.p50 == pytest.approx(0.8)
    assert point.normalized_latency.p50 == pytest.approx(0.8 / 3)
    closed = result_of(record(0), record(1, at=1.0), closed_loop=ClosedLoop(2)).point()
    assert closed.offered_rps is None


def full_result():
    return result_of(
        record(0, output="hé\u2028"),
        record(1, at=1.0, error="http_500", detail="boom", http_status=500, waited_for_connection=True, tokens=()),
        closed_loop=ClosedLoop(2, 0.5),
        warmup=(record(-1),),
        interrupted=True,
        num_planned=9,
        environment={"cpu": "any"},
        made_by={"seed": 3, "arrivals": {"kind": "Poisson"}},
    )


def test_a_saved_file_is_loaded(tmp_path):
    result = full_result()
    result.save(tmp_path / "result.json")
    assert load_result(tmp_path / "result.json") == result
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["summary"]["errors"] == {"http_500": 1}
    assert document["summary"]["latency"]["p50"] == pytest.approx(0.8)
    assert document["environment"] == {"cpu": "any"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(format="other"), "no mlsys-load-result file"),
        (lambda document: document.update(version=2), "version 2"),
        (lambda document: document.pop("records"), "malformed at records"),
        (lambda document: document["records"][1].update(sent_s="soon"), r"malformed at records.1.sent_s"),
        (lambda document: document["records"][0].pop("index"), r"malformed at records.0.index"),
        (lambda document: document["closed_loop"].update(concurrency=0), "malformed at closed_loop|concurrency is 0"),
    ],
)
def test_malformed_results_are_refused(tmp_path, change, message):
    path = tmp_path / "result.json"
    full_result().save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidInputError, match=message):
        load_result(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(InvalidInputError, match=r"result\.json"):
        load_result(tmp_path / "result.json")


def test_unsavable_results_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be written"):
        full_result().save(tmp_path / "nowhere" / "result.json")
    with pytest.raises(InvalidInputError, match="JSON cannot"):
        dataclasses.replace(full_result(), environment={"x": object()}).save(tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_tables_show_milliseconds():
    result = result_of(record(0, at=0.0), record(1, at=2.0))
    text = text_of(result_table(result))
    assert "time to first token (ms)" in text
    assert " 500 " in text
    row = next(line for line in text_of(comparison_table([result])).splitlines() if "test" in line)
    assert row.split() == ["test", "0.5", "0.7143", "2.143", "800", "800", "500", "266.7", "0"]


def test_comparison_with_bounds_shows_goodput():
    result = result_of(record(0, took=0.8), record(1, at=1.0, took=2.0))
    row = next(
        line
        for line in text_of(comparison_table([result], bounds=LatencyBounds(latency_s=1.0))).splitlines()
        if "test" in line
    )
    assert row.split()[-2:] == ["50.0%", "0.3333"]


def test_figures_are_not_cut_off_in_a_narrow_terminal():
    result = result_of(record(0), record(1, at=1.0 / 51.92), name="smollm2-135m-instruct")
    text = text_of(comparison_table([result], bounds=LatencyBounds(latency_s=1.0)), width=80)
    assert "smollm2-" in text
    assert "51.92" in text
    assert "100.0%" in text
    assert "…" not in text


def test_a_clean_run_has_no_warnings():
    assert warnings_of(result_of(record(0), record(1, at=1.0, late=0.001))) == []


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (result_of(record(), interrupted=True, num_planned=7), "interrupted after 1 of 7"),
        (result_of(record(), record(1, error="http_500", detail="boom")), r"1 of 2 requests failed: http_500 \(boom\)"),
        (result_of(record(), warmup=(record(-1, error="connect"),)), "1 of 1 warm-up requests failed.*connect"),
        (result_of(record(), record(1, waited_for_connection=True)), "1 of 2 requests were limited.*all 512"),
        (result_of(record(late=0.06)), "generator itself was late: p99 60 ms"),
        (result_of(record(late=0.003, took=0.01, tokens=())), "generator itself was late: p99 3 ms"),
        (result_of(record(num_planned_tokens=9)), "1 of 1 answers have fewer tokens"),
    ],
)
def test_each_doubt_has_its_warning(result, words):
    (warning,) = warnings_of(result)
    assert re.search(words, warning)


def test_progress_bar_draws_on_its_console():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress_bar(console, "orca") as on_progress:
        on_progress(LoadProgress(10, num_sent=5, num_done=3, num_failed=1))
    drawn = console.file.getvalue()
    assert "orca" in drawn
    assert "3/10" in drawn
    assert "2 outstanding, 1 failed" in drawn
