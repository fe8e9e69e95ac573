import asyncio
import os
import signal
import threading

import pytest
from mlsys_bench.workload.arrivals import ClosedLoop
from mlsys_bench.workload.loadgen import LoadOptions, run_load, run_load_blocking
from mlsys_bench.workload.targets import InProcessTarget, Outcome
from mlsys_bench.workload.trace import Trace, TraceItem
from mlsys_core.errors import InvalidInputError


def trace_of(*arrivals_s, num_output_tokens=3):
    return Trace(tuple(TraceItem(time_s, 8, num_output_tokens, index=i) for i, time_s in enumerate(arrivals_s)))


def every(interval_s, n):
    return trace_of(*(index * interval_s for index in range(n)))


class Recorder:
    """A target that takes ``service_s`` for each request, at most ``capacity`` at once (None: any number)."""

    def __init__(self, service_s, *, capacity=None):
        self.service_s = service_s
        self.capacity = asyncio.Semaphore(capacity) if capacity else None
        self.indices = []
        self.sent_at = []
        self.num_outstanding = self.max_outstanding = 0
        self.is_closed = False

    async def send(self, item, on_token):
        self.indices.append(item.index)
        self.sent_at.append(asyncio.get_running_loop().time())
        self.num_outstanding += 1
        self.max_outstanding = max(self.max_outstanding, self.num_outstanding)
        try:
            if self.capacity:
                async with self.capacity:
                    await asyncio.sleep(self.service_s)
            else:
                await asyncio.sleep(self.service_s)
            return Outcome()
        finally:
            self.num_outstanding -= 1

    async def aclose(self):
        self.is_closed = True


def test_a_stalled_server_does_not_slow_the_arrivals(run_virtual):
    target = Recorder(1000.0)
    result = run_virtual(run_load(every(0.1, 50), target, options=LoadOptions(timeout_s=20.0)))
    assert [record.sent_s for record in result.records] == pytest.approx([index * 0.1 for index in range(50)])
    assert target.max_outstanding == 50
    assert result.errors == {"timeout": 50}
    assert result.num_generator_limited == 0


def test_queueing_at_a_slow_server_shows_in_the_latencies(run_virtual):
    result = run_virtual(run_load(every(1.0, 5), Recorder(3.0, capacity=1)))
    assert [record.latency_s for record in result.records] == pytest.approx([3.0, 5.0, 7.0, 9.0, 11.0])
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert result.duration_s == pytest.approx(15.0)
    assert result.throughput_rps == pytest.approx(5 / 15)
    assert result.offered_rps == pytest.approx(1.0)


def test_times_count_from_the_start_and_bursts_go_out_together(run_virtual):
    result = run_virtual(run_load(trace_of(2.0, 2.0, 2.0, 7.5), Recorder(0.25)))
    assert [record.sent_s for record in result.records] == pytest.approx([2.0, 2.0, 2.0, 7.5])
    assert [record.done_s for record in result.records] == pytest.approx([2.25, 2.25, 2.25, 7.75])


def test_token_times_are_recorded_as_they_come(run_virtual):
    async def tokens(item):
        for delay_s in (0.5, 0.1, 0.2):
            await asyncio.sleep(delay_s)
            yield "x"

    result = run_virtual(run_load(trace_of(0.0, 1.0), InProcessTarget(tokens)))
    first, second = result.records
    assert first.token_s == pytest.approx((0.5, 0.6, 0.8))
    assert second.token_s == pytest.approx((1.5, 1.6, 1.8))
    assert second.num_output_tokens == 3
    assert second.ttft_s == pytest.approx(0.5)
    assert second.normalized_latency_s == pytest.approx(0.8 / 3)
    assert result.itl.count == 4


def test_the_connection_bound_holds_and_is_reported(run_virtual):
    target = Recorder(10.0)
    result = run_virtual(run_load(every(1.0, 4), target, options=LoadOptions(max_connections=2)))
    assert target.max_outstanding == 2
    assert [record.waited_for_connection for record in result.records] == [False, False, True, True]
    assert result.num_generator_limited == 2
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 1.0, 10.0, 11.0])
    assert result.records[2].latency_s == pytest.approx(18.0)  # from due (2.0) to done (20.0): the wait is not hidden
    assert result.lateness.max == pytest.approx(0.0)  # the waiting ones are reported apart


def test_a_blocking_target_shows_as_lateness(run_virtual):
    async def hog(item):
        if item.index == 0:
            asyncio.get_running_loop().now_s += 5.0  # computes without awaiting, as it should not

    result = run_virtual(run_load(every(1.0, 3), InProcessTarget(hog)))
    assert [record.lateness_s for record in result.records] == pytest.approx([0.0, 4.0, 3.0])
    assert result.lateness.max == pytest.approx(4.0)


def test_closed_loop_keeps_n_requests_outstanding_and_thinks_between(run_virtual):
    target = Recorder(2.0)
    options = LoadOptions(closed_loop=ClosedLoop(2, think_time_s=1.0))

    async def main():
        result = await run_load(every(0.0, 5), target, options=options)
        return result, asyncio.get_running_loop().time()

    result, ended_at = run_virtual(main())
    assert ended_at == pytest.approx(108.0)  # nobody thinks after the last request
    assert target.max_outstanding == 2
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 0.0, 3.0, 3.0, 6.0])
    assert [record.latency_s for record in result.records] == pytest.approx([2.0] * 5)
    assert result.duration_s == pytest.approx(8.0)
    assert result.offered_rps is None


def test_warm_up_runs_first_one_by_one_and_counts_nowhere(run_virtual):
    target = Recorder(1.0)
    result = run_virtual(run_load(every(0.5, 4), target, options=LoadOptions(num_warmup=2)))
    assert target.indices == [-1, -2, 0, 1, 2, 3]
    assert target.sent_at == pytest.approx([100.0, 101.0, 102.0, 102.5, 103.0, 103.5])
    assert [record.index for record in result.warmup] == [-1, -2]
    assert [record.index for record in result.records] == [0, 1, 2, 3]
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 0.5, 1.0, 1.5])


def test_a_record_keeps_the_error_of_its_target(run_virtual):
    async def fails(item):
        if item.index == 1:
            raise ValueError("bad shape")
        if item.index == 2:
            raise TimeoutError("upstream is slow")
        return Outcome(error="http_429", detail="queue full", http_status=429) if item.index == 3 else None

    result = run_virtual(run_load(every(1.0, 5), InProcessTarget(fails)))
    kinds = [(record.error, record.detail, record.http_status) for record in result.records]
    assert kinds == [
        (None, "", None),
        ("ValueError", "bad shape", None),
        ("timeout", "upstream is slow", None),
        ("http_429", "queue full", 429),
        (None, "", None),
    ]
    assert result.errors == {"ValueError": 1, "timeout": 1, "http_429": 1}


def test_a_timeout_cancels_its_request_alone(run_virtual):
    target = Recorder(0.0)

    async def send(item):
        await asyncio.sleep(100.0 if item.index == 0 else 1.0)

    result = run_virtual(run_load(every(1.0, 3), InProcessTarget(send), options=LoadOptions(timeout_s=5.0)))
    assert [record.error for record in result.records] == ["timeout", None, None]
    assert result.records[0].done_s == pytest.approx(5.0)
    assert "5 s" in result.records[0].detail
    assert target.num_outstanding == 0


def test_stop_keeps_what_there_is_and_cancels_the_rest(run_virtual):
    target = Recorder(3.0)

    async def main():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(4.5, stop.set)
        return await run_load(every(1.0, 10), target, options=LoadOptions(), stop=stop)

    result = run_virtual(main())
    assert result.interrupted
    assert result.num_planned == 10
    assert [record.error for record in result.records] == [None, None, "cancelled", "cancelled", "cancelled"]
    assert result.records[-1].done_s == pytest.approx(4.5)
    assert target.num_outstanding == 0


def test_stop_records_requests_still_waiting_for_a_connection(run_virtual):
    target = Recorder(100.0)

    async def main():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(2.5, stop.set)
        return await run_load(every(1.0, 9), target, options=LoadOptions(max_connections=1), stop=stop)

    result = run_virtual(main())
    assert len(target.indices) == 1
    assert [(record.error, record.waited_for_connection) for record in result.records] == [
        ("cancelled", False),
        ("cancelled", True),
        ("cancelled", True),
    ]


def test_stop_during_warm_up_runs_nothing(run_virtual):
    target = Recorder(3.0)

    async def main():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        return await run_load(every(1.0, 5), target, options=LoadOptions(num_warmup=3), stop=stop)

    result = run_virtual(main())
    assert result.interrupted
    assert result.records == ()
    assert [record.error for record in result.warmup] == ["cancelled"]


def test_cancelling_the_run_itself_cancels_the_requests_and_is_not_swallowed(run_virtual):
    target = Recorder(100.0)

    async def main():
        async with asyncio.timeout(2.5):
            await run_load(every(1.0, 5), target)

    with pytest.raises(TimeoutError):
        run_virtual(main())
    assert len(target.indices) == 3
    assert target.num_outstanding == 0


def test_progress_counts_up(run_virtual):
    seen = []

    async def main(on_progress):
        async def half_fail(item):
            await asyncio.sleep(1.5)
            assert item.index % 2

        await run_load(every(1.0, 3), InProcessTarget(half_fail), on_progress=on_progress)

    run_virtual(main(lambda state: seen.append((state.num_planned, state.num_sent, state.num_done, state.num_failed))))
    assert seen == [(3, 1, 0, 0), (3, 2, 0, 0), (3, 2, 1, 1), (3, 3, 1, 1), (3, 3, 2, 1), (3, 3, 3, 2)]


def test_bad_input_is_refused_before_anything_is_sent(run_virtual):
    target = Recorder(1.0)
    with pytest.raises(InvalidInputError, match="empty"):
        run_virtual(run_load(Trace(()), target))
    with pytest.raises(InvalidInputError, match="3 warm-up requests asked for, the trace has 2"):
        run_virtual(run_load(every(1.0, 2), target, options=LoadOptions(num_warmup=3)))
    assert target.indices == []


@pytest.mark.parametrize("bad", [{"num_warmup": -1}, {"max_connections": 0}, {"timeout_s": 0.0}])
def test_bad_options_are_refused(bad):
    with pytest.raises(InvalidInputError):
        LoadOptions(**bad)


def test_blocking_run_closes_its_target_and_uses_real_time():
    target = Recorder(0.001)
    result = run_load_blocking(every(0.01, 5), target)
    assert target.is_closed
    assert len(result.successes) == 5
    assert all(record.sent_s >= record.scheduled_s for record in result.records)
    assert all(record.latency_s >= 0.001 for record in result.records)


def test_blocking_run_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(run_load_blocking(every(0.0, 2), Recorder(0.0))))
    thread.start()
    thread.join()
    assert len(results[0].successes) == 2


def test_ctrl_c_gives_the_partial_result_and_restores_the_handler():
    before = signal.getsignal(signal.SIGINT)

    async def send(item):
        if item.index == 2:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30.0)

    result = run_load_blocking(every(0.01, 500), InProcessTarget(send))
    assert result.interrupted
    assert [record.error for record in result.records[:3]] == [None, None, "cancelled"]
    assert len(result.records) < 500
    assert signal.getsignal(signal.SIGINT) == before


@pytest.fixture
def listens_to_ctrl_c():
    """Python's own handler, also where the tests were started in the background, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_a_second_ctrl_c_is_not_caught():
    class Stubborn(Recorder):
        async def send(self, item, on_token):
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.sleep(30.0)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(30.0)

    target = Stubborn(0.0)
    with pytest.raises(KeyboardInterrupt):
        run_load_blocking(every(0.0, 1), target)
    assert target.is_closed
