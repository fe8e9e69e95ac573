import json
import os
import re
import signal
import subprocess
import sys

import pytest
from mlsys_bench.workload.cli import app
from mlsys_bench.workload.results import load_result
from mlsys_bench.workload.trace import read_trace
from mlsys_core.errors import InvalidInputError, ServingError
from typer.testing import CliRunner

from tests.processes import until


def invoke(*args):
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(arg) for arg in args])


def done(*args):
    result = invoke(*args)
    assert result.exception is None, result.output
    assert result.exit_code == 0
    return result.output


def generate(path, *args):
    arguments = args or ("--rate", 50, "--prompts", "uniform:3:9", "--outputs", "uniform:2:4", "-n", 6)
    done("generate", *arguments, "-o", path)
    return path


def test_generate_writes_the_trace_of_the_papers(tmp_path):
    output = done(
        "generate",
        *("--arrivals", "poisson", "--rate", 4, "--prompts", "uniform:32:512", "--outputs", "uniform:1:128"),
        *("-n", 200, "--seed", 0, "-o", tmp_path / "trace.jsonl"),
    )
    assert "200 requests over" in output
    trace = read_trace(tmp_path / "trace.jsonl")
    assert len(trace) == 200
    assert trace.made_by["prompts"] == {"kind": "Uniform", "low": 32, "high": 512}
    done("generate", "--rate", 4, "-n", 200, "-o", tmp_path / "defaults.jsonl")  # the papers' are the defaults
    assert (tmp_path / "defaults.jsonl").read_bytes() == (tmp_path / "trace.jsonl").read_bytes()


def test_run_reports_saves_and_plots(tmp_path, server):
    trace = generate(tmp_path / "trace.jsonl")
    output = done(
        *("run", trace, "--url", server.url, "--model", "normal", "--name", "mine", "--warmup", 1),
        *("--output", tmp_path / "result.json", "--plot", tmp_path / "out.svg", "--goodput-ms", "60000"),
    )
    assert "mine" in output
    assert "100.0%" in output
    assert "time to first token" in output
    assert "requests failed" not in output
    result = load_result(tmp_path / "result.json")
    assert len(result.successes) == 6
    assert len(result.warmup) == 1
    assert "python" in result.environment
    assert result.made_by["seed"] == 0
    assert [record.num_output_tokens for record in result.records] == [i.num_output_tokens for i in read_trace(trace)]
    svg = (tmp_path / "out.svg").read_text()
    assert "first token" in svg
    assert "mine" in svg


def test_run_speed_and_closed_loop(tmp_path, server):
    trace = generate(tmp_path / "trace.jsonl")
    done("run", trace, "--url", server.url, "--model", "normal", "--speed", 4, "-o", tmp_path / "fast.json")
    fast = load_result(tmp_path / "fast.json")
    assert fast.records[-1].scheduled_s == pytest.approx(read_trace(trace).items[-1].arrival_s / 4, abs=1e-5)
    closed = generate(tmp_path / "closed.jsonl", "--arrivals", "closed:2", "--outputs", "constant:2", "-n", 5)
    output = done("run", closed, "--url", server.url, "--model", "normal", "--api", "chat", "-o", tmp_path / "c.json")
    assert "closed" in output
    assert load_result(tmp_path / "c.json").closed_loop.concurrency == 2
    assert "messages" in server.bodies[-1]


def test_run_shows_failures_and_still_succeeds_on_the_rest(tmp_path, server):
    output = done("run", generate(tmp_path / "trace.jsonl"), "--url", server.url, "--model", "busy", "--no-progress")
    assert "3 of 6 requests failed: http_429 (" in output


def test_run_without_any_success_fails_but_keeps_the_records(tmp_path, server):
    trace = generate(tmp_path / "trace.jsonl")
    args = ("--model", "error500", "-o", tmp_path / "result.json", "--plot", tmp_path / "out.svg")
    result = invoke("run", trace, "--url", server.url, *args)
    assert isinstance(result.exception, ServingError)
    assert "none of 6 requests succeeded" in str(result.exception)
    assert load_result(tmp_path / "result.json").errors == {"http_500": 6}
    assert not (tmp_path / "out.svg").exists()


def test_plot_and_show_compare_runs(tmp_path, server):
    trace = generate(tmp_path / "trace.jsonl")
    results = []
    for name, speed in (("a", 1), ("a", 2), ("b", 1)):
        results.append(tmp_path / f"{name}{speed}.json")
        done(
            "run", trace, "--url", server.url, "--model", "normal", "--name", name, "--speed", speed, "-o", results[-1]
        )
    output = done("show", *results, "--goodput-ms", "ttft=60000")
    assert output.count("100.0%") == 3
    for kind, label in (
        ("auto", "median normalised latency (ms/token)"),
        ("throughput", "throughput (requests/s)"),
        ("load", "offered load (requests/s)"),
        ("cdf", "share of samples"),
    ):
        done("plot", *results, "--kind", kind, "-o", tmp_path / "out.svg")
        assert label in (tmp_path / "out.svg").read_text()
    assert "cdf of 1 results" in done("plot", results[0], "-o", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "-o", "t"], "need a rate"),
        (["generate", "--rate", "0", "-o", "t"], "rate is 0.0"),
        (["generate", "--rate", "1", "--arrivals", "sometimes", "-o", "t"], "no arrival process"),
        (["generate", "--rate", "1", "--prompts", "uniform:9:1", "-o", "t"], "the smaller one"),
        (["generate", "--rate", "1", "-n", "0", "-o", "t"], "number of requests is 0"),
        (["generate", "--rate", "1", "-o", "nowhere/t"], "cannot be written"),
        (["run", "nowhere", "--url", "http://x", "--model", "m"], "nowhere"),
        (["run", "TRACE", "--url", "x", "--model", "m"], "no URL"),
        (["run", "TRACE", "--url", "http://x", "--model", "m", "--plot", "a.gif"], "end the name in .svg"),
        (["run", "TRACE", "--url", "http://x", "--model", "m", "-o", "nowhere/a"], "folder nowhere does not exist"),
        (["run", "TRACE", "--url", "http://x", "--model", "m", "--goodput-ms", "x=1"], "no latency bound 'x'"),
        (
            ["run", "TRACE", "--url", "http://x", "--model", "m", "--goodput-ms", "ttft=1", "--no-stream"],
            "no-stream out",
        ),
        (["run", "TRACE", "--url", "http://x", "--model", "m", "--speed", "0"], "speed is 0.0"),
        (["run", "TRACE", "--url", "http://x", "--model", "m", "--timeout", "0"], "timeout is 0.0"),
        (["run", "TRACE", "--url", "http://x", "--model", "m", "--warmup", "7"], "7 warm-up requests"),
        (["plot", "TRACE", "-o", "a.svg"], "TRACE|not JSON"),
        (["plot", "TRACE", "-o", "a.txt"], "end the name in"),
        (["show", "nowhere"], "nowhere"),
    ],
)
def test_bad_values_are_one_clear_error(tmp_path, args, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generate(tmp_path / "TRACE")
    result = invoke(*args)
    assert isinstance(result.exception, InvalidInputError), result.output
    assert re.search(message, str(result.exception))
    assert "\n" not in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["TRACE"]


@pytest.mark.parametrize("command", [[], ["generate"], ["run"], ["show"], ["plot"]])
def test_help_teaches_with_an_example(command):
    assert f"Example: mlsys workload {command[0] if command else 'generate'}" in done(*command, "--help")


def test_ctrl_c_saves_the_partial_result(tmp_path, server):
    trace = generate(
        tmp_path / "trace.jsonl", "--arrivals", "constant", "--rate", 5, "--outputs", "constant:2", "-n", 500
    )
    code = "import sys; from mlsys_bench.workload.cli import app; sys.exit(app(standalone_mode=False))"
    args = ["run", trace, "--url", server.url, "--model", "normal", "-o", tmp_path / "result.json"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: server.num_finished >= 2 or process.poll() is not None)
        num_seen = len(server.bodies)  # when more come, the command has read the two
        until(lambda: len(server.bodies) > num_seen + 2 or process.poll() is not None)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert "interrupted after" in errors
    result = load_result(tmp_path / "result.json")
    assert result.interrupted
    assert 2 <= len(result.successes) < 500
    assert json.loads((tmp_path / "result.json").read_text())["summary"]["num_planned"] == 500


def test_commands_import_nothing_heavy():
    code = (
        "import sys, mlsys_bench.workload.cli, mlsys_core.workload, mlsys_core.plot;"
        "print([name for name in ('torch', 'fastapi', 'matplotlib', 'sklearn', 'httpx') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
