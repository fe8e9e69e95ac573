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
from mlsys_bench.workload.results import LoadResult, RequestRecord
from mlsys_bench.workload.tables import overview, progress_bar, result_table, warnings_of
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
    assert one.normalized_latency_s == pytest.approx(0.8 / 3)
    assert one.lateness_s == pytest.approx(0.1)
    assert one.ok


def test_chunks_of_several_tokens_count_by_the_servers_number():
    one = record(num_output_tokens=7)
    assert one.normalized_latency_s == pytest.approx(0.8 / 7)


def test_figures_that_a_record_does_not_have_are_none():
    silent = record(tokens=())
    assert (silent.ttft_s, silent.normalized_latency_s) == (None, None)
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
    assert "test" in text_of(overview(result))
    with pytest.raises(InvalidInputError, match="no successful request"):
        result.point()


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


def test_a_saved_file_holds_all(tmp_path):
    result = full_result()
    result.save(tmp_path / "result.json")
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["summary"]["errors"] == {"http_500": 1}
    assert document["summary"]["latency"]["p50"] == pytest.approx(0.8)
    assert document["environment"] == {"cpu": "any"}
    assert document["records"] == [
        dataclasses.asdict(each) | {"token_s": list(each.token_s)} for each in result.records
    ]


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
    row = next(line for line in text_of(overview(result)).splitlines() if "test" in line)
    assert row.split() == ["test", "0.5", "0.7143", "2.143", "800", "800", "500", "266.7", "0"]


def test_figures_are_not_cut_off_in_a_narrow_terminal():
    result = result_of(record(0), record(1, at=1.0 / 51.92), name="smollm2-135m-instruct")
    text = text_of(overview(result), width=80)
    assert "smollm2-" in text
    assert "51.92" in text
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
