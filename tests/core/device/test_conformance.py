"""Promises of every device (mlsys_core/device/protocols.py), on the CPU and on CUDA alike."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from mlsys_core.device import Device, DeviceTimeoutError, MemoryInfo
from mlsys_core.errors import DeviceError, InvalidInputError


def fail(message: str) -> None:
    raise ValueError(message)


def test_name_is_kind_and_index_and_torch_knows_it(device: Device) -> None:
    import torch

    assert device.name == f"{device.kind}:{device.index}"
    assert torch.device(device.name).type == device.kind


def test_memory_info_is_plausible(device: Device) -> None:
    info = device.memory_info()
    assert isinstance(info, MemoryInfo)
    assert 0 <= info.available_nbytes <= info.total_nbytes
    assert info.total_nbytes > 2**26


def test_a_stream_runs_its_work_in_order(device: Device, bench: Any) -> None:
    with device.stream() as stream:
        cell = bench.cell()
        release = bench.block(stream)
        for value in range(100):
            stream.submit(bench.write, cell, float(value))
        release()
        stream.synchronize()
        assert cell.item() == 99.0


def test_two_streams_run_concurrently(device: Device, bench: Any) -> None:
    with device.stream() as busy, device.stream() as free:
        cell = bench.cell()
        release = bench.block(busy)
        done = device.event()
        busy.record(done)
        free.submit(bench.write, cell, 1.0)
        free.synchronize()
        assert not done.query()  # the free stream is through while the busy one is not
        release()
        done.synchronize()
        assert done.query()


def test_wait_orders_work_across_streams(device: Device, bench: Any) -> None:
    source, target = bench.cell(), bench.cell()
    with device.stream() as producer, device.stream() as consumer:
        release = bench.block(producer)
        producer.submit(bench.write, source, 7.0)
        written = device.event()
        producer.record(written)
        consumer.wait(written)
        consumer.submit(bench.copy, target, source)
        copied = device.event()
        consumer.record(copied)
        with pytest.raises(
            DeviceTimeoutError
        ):  # wait() has not blocked the caller; it holds the copy, given every chance
            copied.synchronize(timeout_s=0.05)
        release()
        consumer.synchronize()
    assert target.item() == 7.0


def test_an_event_captures_only_the_work_before_it(device: Device, bench: Any) -> None:
    with device.stream() as stream:
        event = device.event()
        stream.record(event)
        release = bench.block(stream)
        event.synchronize()
        later = device.event()
        stream.record(later)
        assert event.query()
        assert not later.query()
        release()


def test_an_event_never_recorded_holds_nothing(device: Device, bench: Any) -> None:
    event, cell = device.event(), bench.cell()
    assert event.query()
    event.synchronize()
    event.synchronize(timeout_s=0)
    with device.stream() as stream:
        stream.wait(event)
        stream.submit(bench.write, cell, 3.0)
    assert cell.item() == 3.0


def test_recording_again_moves_the_event(device: Device, bench: Any) -> None:
    with device.stream() as stream:
        event = device.event()
        stream.record(event)
        event.synchronize()
        release = bench.block(stream)
        stream.record(event)
        assert not event.query()
        release()
        event.synchronize()
        assert event.query()


def test_wait_takes_the_recording_in_force_when_it_is_called(device: Device, bench: Any) -> None:
    with device.stream() as busy, device.stream() as free:
        event = device.event()
        busy.record(event)
        free.wait(event)
        release = bench.block(busy)
        busy.record(event)  # moved: the wait above must not follow
        free.synchronize()
        assert not event.query()
        release()


def test_event_timeout_leaves_the_work_running(device: Device, bench: Any) -> None:
    with device.stream() as stream:
        release = bench.block(stream)
        event = device.event()
        stream.record(event)
        with pytest.raises(DeviceTimeoutError, match="still at work") as caught:
            event.synchronize(timeout_s=0.001)
        assert isinstance(caught.value, TimeoutError)
        release()
        event.synchronize()
        assert event.query()


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_event_refuses_a_senseless_timeout(device: Device, timeout_s: float) -> None:
    with pytest.raises(InvalidInputError, match="timeout_s is"):
        device.event().synchronize(timeout_s)


def test_elapsed_time_of_ordered_events(device: Device, bench: Any) -> None:
    start, end = device.event(timing=True), device.event(timing=True)
    cell = bench.cell()
    with device.stream() as stream:
        stream.record(start)
        for _ in range(20):
            stream.submit(bench.write, cell, 1.0)
        stream.record(end)
        stream.synchronize()
        assert start.elapsed_ms(end) > 0


def test_elapsed_time_says_what_it_lacks(device: Device, bench: Any) -> None:
    timed, untimed = device.event(timing=True), device.event()
    with device.stream() as stream:
        with pytest.raises(DeviceError, match="never recorded"):
            timed.elapsed_ms(timed)
        stream.record(timed)
        stream.record(untimed)
        stream.synchronize()
        with pytest.raises(DeviceError, match="end event has no timing"):
            timed.elapsed_ms(untimed)
        release = bench.block(stream)
        late = device.event(timing=True)
        stream.record(late)
        with pytest.raises(DeviceError, match="end event has not been passed"):
            timed.elapsed_ms(late)
        release()


def test_the_first_error_is_raised_once_and_work_after_it_is_skipped(device: Device, bench: Any) -> None:
    cell = bench.cell()
    with device.stream() as stream:
        stream.submit(fail, "first")
        stream.submit(fail, "second")
        stream.submit(bench.write, cell, 1.0)
        with pytest.raises(ValueError, match="first"):
            stream.synchronize()
        assert cell.item() == 0.0
        stream.synchronize()
        stream.submit(bench.write, cell, 2.0)  # as good as new
        stream.synchronize()
        assert cell.item() == 2.0


def test_events_pass_while_work_is_skipped(device: Device, bench: Any) -> None:
    cell = bench.cell()
    with device.stream() as failed, device.stream() as other:
        failed.submit(fail, "broken")
        event = device.event()
        failed.record(event)
        other.wait(event)
        other.submit(bench.write, cell, 5.0)
        other.synchronize()
        event.synchronize()
        assert cell.item() == 5.0
        with pytest.raises(ValueError, match="broken"):
            failed.synchronize()


def test_waits_hold_while_work_is_skipped(device: Device, bench: Any) -> None:
    with device.stream() as busy, device.stream() as failed:
        failed.submit(fail, "broken")
        release = bench.block(busy)
        gate, after = device.event(), device.event()
        busy.record(gate)
        failed.wait(gate)
        failed.record(after)
        with pytest.raises(DeviceTimeoutError):
            after.synchronize(timeout_s=0.05)
        release()
        with pytest.raises(ValueError, match="broken"):
            failed.synchronize()
        assert after.query()


def test_device_synchronize_waits_for_all_and_raises_each_error(device: Device, bench: Any) -> None:
    cell = bench.cell()
    with device.stream() as first, device.stream() as second, device.stream() as third:
        second.submit(fail, "second")
        first.submit(fail, "first")
        third.submit(bench.write, cell, 4.0)
        with pytest.raises(ValueError, match="first"):
            device.synchronize()
        assert cell.item() == 4.0
        with pytest.raises(ValueError, match="second"):
            device.synchronize()
        device.synchronize()


def test_close_drains_and_refuses_more(device: Device, bench: Any) -> None:
    cell, event = bench.cell(), device.event()
    stream = device.stream()
    release = bench.block(stream)
    stream.submit(bench.write, cell, 6.0)
    release()
    stream.close()
    assert cell.item() == 6.0
    stream.close()
    stream.synchronize()
    device.synchronize()
    with pytest.raises(DeviceError, match="is closed"):
        stream.submit(fail, "x")
    with pytest.raises(DeviceError, match="is closed"):
        stream.record(event)
    with pytest.raises(DeviceError, match="is closed"):
        stream.wait(event)


def test_close_raises_an_error_not_yet_reported(device: Device) -> None:
    stream = device.stream()
    stream.submit(fail, "late")
    with pytest.raises(ValueError, match="late"):
        stream.close()
    stream.close()


def test_the_error_of_the_with_block_goes_first(device: Device) -> None:
    def block() -> None:
        with device.stream() as stream:
            stream.submit(fail, "work")
            raise KeyError("block")

    with pytest.raises(KeyError, match="block") as caught:
        block()
    assert any("work" in note for note in caught.value.__notes__)


def test_events_of_another_kind_are_refused(device: Device) -> None:
    class Stray:
        timing = False

        def query(self) -> bool:
            return True

        def synchronize(self, timeout_s: float | None = None) -> None: ...

        def elapsed_ms(self, end: object) -> float:
            return 0.0

    with device.stream() as stream:
        for use in (stream.record, stream.wait, device.event(timing=True).elapsed_ms):
            with pytest.raises(InvalidInputError, match="got a Stray"):
                use(Stray())


def test_arguments_are_let_go_when_the_work_is_done(device: Device) -> None:
    class Big:
        pass

    with device.stream() as stream:
        big = Big()
        gone = weakref.ref(big)
        stream.submit(id, big)
        event = device.event()
        stream.record(event)
        del big
        event.synchronize()
        gc.collect()
        assert gone() is None


def test_a_raised_error_keeps_nothing_alive(device: Device) -> None:
    class Big:
        pass

    def use(big: object) -> None:
        raise ValueError("with a big argument")

    with device.stream() as stream:
        big = Big()
        gone = weakref.ref(big)
        stream.submit(use, big)
        del big
        with pytest.raises(ValueError, match="big argument"):
            stream.synchronize()
        gc.disable()
        try:
            assert gone() is None  # by counting alone: no cycle through the error's traceback
        finally:
            gc.enable()
