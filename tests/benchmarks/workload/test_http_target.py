import os
import signal
import socket
import threading

import pytest
from mlsys_bench.workload.http_target import HttpTarget
from mlsys_bench.workload.loadgen import LoadOptions, run_load_blocking
from mlsys_bench.workload.targets import Outcome
from mlsys_bench.workload.trace import Trace, TraceItem
from mlsys_core.errors import InvalidInputError


def trace_of(n, *, interval_s=0.0, num_output_tokens=4, **fields):
    return Trace(tuple(TraceItem(i * interval_s, 6, num_output_tokens, index=i, **fields) for i in range(n)))


def run(server, model, *, n=1, interval_s=0.0, options=None, **target_options):
    target = HttpTarget.openai(server.url, model=model, **target_options)
    return run_load_blocking(trace_of(n, interval_s=interval_s), target, options=options)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_normal_stream(server, api):
    result = run(server, "normal", n=3, api=api, keep_output=True)
    assert result.errors == {}
    for record in result.records:
        assert record.http_status == 200
        assert len(record.token_s) == 4  # neither the chat's role chunk nor the usage chunk counts
        assert record.num_output_tokens == 4
        assert record.num_input_tokens == 7  # the server's count, not the trace's 6
        assert record.output == "t0 t1 t2 t3 "
        assert record.scheduled_s <= record.sent_s <= record.token_s[0] <= record.token_s[-1] <= record.done_s
    assert server.num_abandoned == 0


def test_the_requests_body(server):
    target = HttpTarget.openai(server.url + "/", model="normal", api_key="secret", ignore_eos=True)
    items = (
        TraceItem(0.0, 6, 2, index=0),
        TraceItem(0.0, 6, 2, prompt="say hi", extra={"temperature": 0.5, "max_tokens": 3}, index=1),
    )
    run_load_blocking(Trace(items), target)
    made, given = sorted(server.bodies, key=lambda body: body["max_tokens"])
    assert len(made["prompt"].split()) == 6
    assert made == {
        "model": "normal",
        "prompt": made["prompt"],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert given["prompt"] == "say hi"
    assert given["temperature"] == 0.5
    assert given["max_tokens"] == 3  # extra wins
    assert all(headers["authorization"] == "Bearer secret" for headers in server.headers)


def test_chat_wraps_the_prompt_in_one_message(server):
    target = HttpTarget.openai(server.url, model="normal", api="chat")
    run_load_blocking(trace_of(1, prompt="hi"), target)
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in body
    assert "authorization" not in server.headers[0]


def test_synthetic_prompts_differ_and_warm_up_gets_its_own(server):
    run(server, "normal", n=4, options=LoadOptions(num_warmup=2))
    assert len({body["prompt"] for body in server.bodies}) == 6


def test_connections_are_used_again(server):
    target = HttpTarget.openai(server.url, model="normal")
    run_load_blocking(trace_of(5), target, options=LoadOptions(max_connections=1))
    assert len(server.bodies) == 5
    assert len(set(server.client_ports)) == 1


def test_slow_tokens_are_timed_one_by_one(server):
    (record,) = run(server, "slow").records
    for number, token_s in enumerate(record.token_s, start=1):  # the server sleeps 0.05 s before each
        assert token_s - record.sent_s >= number * 0.049
    assert record.ttft_s < record.latency_s


def test_slow_answers_do_not_delay_later_requests(server):
    result = run(server, "slow", n=6, interval_s=0.02)
    first_done_s = min(record.done_s for record in result.records)
    assert result.records[0].latency_s >= 0.2
    assert sum(record.sent_s < first_done_s for record in result.records) >= 2
    assert result.errors == {}


@pytest.mark.parametrize(
    ("model", "kind", "detail", "num_tokens", "status"),
    [
        ("error500", "http_500", "CUDA error: out of memory", 0, 500),
        ("cut", "disconnect", "peer closed connection", 2, 200),
        ("vanish", "disconnect", "without finish_reason", 2, 200),
        ("fail-late", "server", "out of blocks", 2, 200),
        ("garbage", "protocol", "Expecting property name", 2, 200),
        ("list", "protocol", "expected a JSON object", 2, 200),
        ("plain", "protocol", "text/event-stream", 0, 200),
    ],
)
def test_failures_are_named_and_kept(server, model, kind, detail, num_tokens, status):
    (record,) = run(server, model).records
    assert record.error == kind
    assert detail in record.detail
    assert len(record.token_s) == num_tokens
    assert record.http_status == status


def test_failures_do_not_touch_other_requests(server):
    result = run(server, "busy", n=6, options=LoadOptions(max_connections=1))
    assert result.errors == {"http_429": 3}
    assert len(result.successes) == 3


def test_a_finish_reason_ends_a_stream_without_done(server):
    (record,) = run(server, "no-done").records
    assert record.ok
    assert record.num_output_tokens == 4


def test_a_stalled_server_times_out_and_is_left(server):
    (record,) = run(server, "stall", options=LoadOptions(timeout_s=2.0)).records
    assert record.error == "timeout"
    assert record.http_status is None
    wait_until(lambda: server.num_abandoned == 1)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        target = HttpTarget.openai(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", model="any")
        (record,) = run_load_blocking(trace_of(1), target).records
    assert record.error == "connect"
    assert record.detail


def test_a_server_that_hangs_up_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        target = HttpTarget.openai(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", model="any")
        (record,) = run_load_blocking(trace_of(1), target).records
        thread.join()
    assert record.error == "disconnect"


def test_ctrl_c_disconnects_from_the_server(server):
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def start_timer(state):
        if state.num_sent == 3 and state.num_done == 0 and timer.ident is None:
            timer.start()

    target = HttpTarget.openai(server.url, model="stall")
    result = run_load_blocking(trace_of(3), target, on_progress=start_timer)
    timer.join()
    assert result.interrupted
    assert result.errors == {"cancelled": 3}
    wait_until(lambda: server.num_abandoned == 3)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_without_stream_there_is_one_document(server, api):
    (record,) = run(server, "normal", api=api, stream=False, keep_output=True).records
    assert record.ok
    assert record.token_s == ()
    assert record.ttft_s is None
    assert (record.num_input_tokens, record.num_output_tokens) == (7, 4)
    assert record.output == "hello"
    assert "stream_options" not in server.bodies[0]


def test_any_json_endpoint(server):
    target = HttpTarget(
        server.url.replace("/v1", "/predict"),
        lambda item: {"length": item.num_input_tokens},
        read_answer=lambda document: Outcome(output=str(document["doubled"])),
    )
    (record,) = run_load_blocking(trace_of(1), target).records
    assert server.bodies == [{"length": 6}]
    assert record.output == "12"
    assert record.normalized_latency_s is None


def test_a_json_endpoint_that_answers_something_else(server):
    target = HttpTarget(server.url + "/completions", lambda item: {"model": "normal", "max_tokens": 1, "stream": True})
    (record,) = run_load_blocking(trace_of(1), target).records
    assert record.error == "protocol"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "", "http://host:port/v1", "http://[::1"]
)
def test_bad_urls_are_refused(url):
    with pytest.raises(InvalidInputError, match="is no URL"):
        HttpTarget.openai(url, model="any")


def test_a_bad_api_is_refused():
    with pytest.raises(InvalidInputError, match="allowed are 'completions' and 'chat'"):
        HttpTarget.openai("http://127.0.0.1/v1", model="any", api="responses")


def wait_until(condition):
    """Wait: the server notices a client's leaving a little later."""
    waiting = threading.Event()
    while not condition():
        waiting.wait(0.01)
