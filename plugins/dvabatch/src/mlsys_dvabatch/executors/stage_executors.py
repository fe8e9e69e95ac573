"""Stage executors: streams of the host with pinned cores, streams and events of other devices (DVABatch, section 6.3).

All executors of a loop share one queue of completions, so the loop is woken once for each task and no thread stands in
between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from mlsys_core.device import CpuDevice, Device, Event
from mlsys_core.device.cpu import CpuStream
from mlsys_core.loop.many_workers import QueuedWorkers
from mlsys_core.loop.protocols import Clock, WorkerId
from mlsys_core.loop.workers import Completion, Workers, take
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask

_Done = Completion[StageTask, StageOutput]
_CLOSE_TIMEOUT_S = 10.0


class StageExecutor:
    """Executor of one stage's tasks on a stream of the host: a thread of its own.

    With ``num_ahead`` there are more threads, and tasks take turns: one computes while another is made ready or gives
    its answers out. Tasks complete in order; the model sees to it that one computes at a time.

    Args:
        stage: which; its number as a worker.
        run: runs a task; what it raises is the task's failure.
        core: the core its thread stays on; None lets it float.
        num_threads: threads torch may use inside an operator, for this thread; None leaves torch's default.
        num_ahead: tasks that may be made ready behind the one at work.
    """

    def __init__(
        self,
        stage: int,
        run: Callable[[StageTask], StageOutput],
        *,
        core: int | None = None,
        num_threads: int | None = None,
        num_ahead: int = 0,
    ) -> None:
        self.max_in_flight = 1 + num_ahead
        self.stage = stage
        self._run = run
        self._core = core
        self._num_threads = num_threads
        self._hosts: list[CpuStream] = []  # each opened by its first task
        self._num_submitted = 0
        self._last = _set_event()  # is set when the task submitted last has completed
        self.worker = WorkerId(stage)
        self.completed: SimpleQueue[_Done | None] = SimpleQueue()  # replaced by the loop's own

    @staticmethod
    def as_workers(executors: Sequence[StageExecutor], clock: Clock) -> Workers[StageTask, StageOutput]:
        """Return all stages as workers behind one queue."""
        return QueuedWorkers(executors, clock)

    def submit(self, batch: StageTask) -> None:
        """Hand ``batch`` to the thread."""
        place = self._num_submitted % self.max_in_flight
        self._num_submitted += 1
        if place == len(self._hosts):
            device = CpuDevice(spin_s=0)  # a stage waits for milliseconds, and others want the core: no spinning
            name = f"stage-{self.stage}" + (f".{place}" if place else "")
            host = device.stream(core=self._core, name=name)
            if self._num_threads is not None:
                host.submit(torch.set_num_threads, self._num_threads)  # OpenMP's count is the thread's own
            self._hosts.append(host)
        before, self._last = self._last, threading.Event()
        self._hosts[place].submit(self._work, batch, before, self._last)

    def wait(self, timeout_s: float | None) -> tuple[StageTask, StageOutput | BaseException] | None:
        """Return the oldest completed task, for use without :meth:`as_workers`; None after the timeout."""
        done = take(self.completed, timeout_s)
        return None if done is None else (done.batch, done.output)

    def interrupt(self) -> None:
        """Make a wait return."""
        self.completed.put(None)

    def close(self) -> None:
        """Stop the thread after the task that is running; one that hangs is left behind (it is a daemon)."""
        for host in self._hosts:
            host.leave(_CLOSE_TIMEOUT_S)

    def _work(self, task: StageTask, before: threading.Event, done: threading.Event) -> None:
        output: StageOutput | BaseException
        try:
            output = self._run(task)
        except BaseException as error:  # noqa: BLE001 - a request boundary: reported to the scheduler
            output = error
        before.wait()
        self.completed.put(Completion(self.worker, task, output))
        done.set()


class StreamExecutor(StageExecutor):
    """Executor of one stage's tasks on a stream of its own.

    A task waits, on the device, for the event of the pair it reads from and of the pair it overwrites, and records its
    own when it is launched. All but the last stage complete at the launch, so the host schedules while the device
    works; the last completes when its results are there.

    Args:
        stage: which.
        run: launches a task.
        device: makes the stream; as ``mlsys_core.device.get_device("cuda")`` gives it.
        events: event of every (stage, pair), shared by all executors of the model.
        waits_always: complete only when the device is done, for policies that look at results.
    """

    def __init__(
        self,
        stage: int,
        run: Callable[[StageTask], StageOutput],
        *,
        device: Device,
        events: dict[tuple[int, int], Event],
        waits_always: bool = False,
    ) -> None:
        super().__init__(stage, self._launch)
        self._launch_task = run
        self._stream = device.stream()
        self._device = device
        self._events = events
        self._waits_always = waits_always

    def _launch(self, task: StageTask) -> StageOutput:
        outputs: list[StageOutput] = []
        for neighbour in (task.stage - 1, task.last_stage + 1):  # writer of the input; reader of the output
            event = self._events.get((neighbour, task.pair))
            if event is not None:
                self._stream.wait(event)
        self._stream.submit(lambda: outputs.append(self._launch_task(task)))
        for stage in range(task.stage, task.last_stage + 1):
            self._stream.record(self._events.setdefault((stage, task.pair), self._device.event()))
        if task.is_last or self._waits_always or not outputs:
            self._stream.synchronize()
        return outputs[0]

    def close(self) -> None:
        """Stop the thread and the stream."""
        super().close()
        self._stream.close()


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
