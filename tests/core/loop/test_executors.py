import threading
from collections.abc import Callable

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import InlineExecutor, ThreadExecutor

from tests.processes import FAULT_S, until


def fail_on_odd(batch: int) -> int:
    if batch % 2:
        raise ValueError(f"odd: {batch}")
    return batch * 10


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_batches_complete_in_order_with_output_or_error(make: Callable[..., ThreadExecutor[int, int]]) -> None:
    executor = make(fail_on_odd, max_in_flight=4)
    try:
        for batch in (2, 3, 4):
            executor.submit(batch)
        assert executor.wait(None) == (2, 20)
        done = executor.wait(None)
        assert done is not None
        assert done[0] == 3
        assert isinstance(done[1], ValueError)
        assert executor.wait(None) == (4, 40)
        assert executor.wait(0.0) is None
    finally:
        executor.close()


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_interrupt_ends_a_wait_in_progress_and_the_next_one(make: Callable[..., ThreadExecutor[int, int]]) -> None:
    executor = make(fail_on_odd)
    try:
        executor.interrupt()
        assert executor.wait(None) is None
        timer = threading.Timer(0.02, executor.interrupt)
        timer.start()
        assert executor.wait(None) is None  # would block for ever without the interrupt
        timer.join()
    finally:
        executor.close()


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_closed_executors_take_nothing_and_close_again(make: Callable[..., ThreadExecutor[int, int]]) -> None:
    executor = make(fail_on_odd)
    executor.close()
    executor.close()
    with pytest.raises(ServingError, match="closed"):
        executor.submit(2)
    with pytest.raises(InvalidInputError, match="max_in_flight=0"):
        make(fail_on_odd, max_in_flight=0)


def test_inline_runs_in_the_waiting_thread_and_lets_ctrl_c_through() -> None:
    executor = InlineExecutor[None, int](lambda _: threading.get_ident())
    executor.submit(None)
    assert executor.wait(None) == (None, threading.get_ident())

    def interrupted(_: None) -> None:
        raise KeyboardInterrupt

    executor_of_ctrl_c = InlineExecutor[None, None](interrupted)
    executor_of_ctrl_c.submit(None)
    with pytest.raises(KeyboardInterrupt):
        executor_of_ctrl_c.wait(None)


def test_thread_runs_all_on_one_other_thread() -> None:
    with ThreadExecutor[int, int](lambda _: threading.get_ident(), max_in_flight=3) as executor:
        for batch in range(3):
            executor.submit(batch)
        idents = {output for _, output in (executor.wait(None) or (0, None) for _ in range(3))}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_thread_survives_a_batch_that_exits() -> None:
    def leave(batch: int) -> int:
        if batch == 0:
            raise SystemExit(3)
        return batch

    with ThreadExecutor(leave, max_in_flight=2) as executor:
        executor.submit(0)
        executor.submit(1)
        done = executor.wait(None)
        assert done is not None
        assert isinstance(done[1], SystemExit)
        assert executor.wait(None) == (1, 1)


def test_close_finishes_the_running_batch_and_drops_the_rest() -> None:
    started, release, ran = threading.Event(), threading.Event(), []

    def work(batch: int) -> int:
        started.set()
        release.wait()
        ran.append(batch)
        return batch

    executor = ThreadExecutor(work, max_in_flight=2, close_timeout_s=FAULT_S)
    executor.submit(1)
    executor.submit(2)
    assert started.wait()
    releasing = threading.Thread(target=lambda: (until(lambda: executor._closed), release.set()))
    releasing.start()
    executor.close()
    releasing.join()
    assert ran == [1]
    assert not any(thread.name == "executor" and thread.is_alive() for thread in threading.enumerate())


def test_close_gives_up_on_a_batch_that_hangs() -> None:
    release = threading.Event()
    executor = ThreadExecutor[None, bool](lambda _: release.wait(), close_timeout_s=0.01, name="hangs")
    executor.submit(None)
    executor.close()
    assert not release.is_set()  # close came back although the batch has not
    release.set()
    until(lambda: not any(thread.name == "hangs" for thread in threading.enumerate()))
