"""CUDA devices over ``torch.cuda``: streams are torch's pooled streams, work is the kernels that ``fn`` launches.

torch is imported when a device is made, and only then. Order against torch's own current stream is the caller's affair,
as always with torch: wrap it with :meth:`CudaDevice.stream` (``torch_stream=``), record an event on it, wait for that.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mlsys_core.device.protocols import (
    DeviceTimeoutError,
    ErrorLatch,
    Event,
    MemoryInfo,
    check_timeout,
    close_after,
    raise_oldest,
)
from mlsys_core.errors import DeviceError, InvalidInputError, MissingDependencyError

if TYPE_CHECKING:
    import torch

_POLL_S = 50e-6  # torch's event has no timeout, so a wait with one asks again and again, this long apart


def _check_cuda(index: int) -> None:
    """Raise an error with the reason and the remedy if ``cuda:index`` cannot be used."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"cuda:{index} needs torch, which cannot be imported ({error}): pip install torch"
        ) from error
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            reason = "is built without CUDA: install a CUDA build of torch, or use 'cpu'"
        else:
            reason = "finds no usable GPU: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES, or use 'cpu'"
        raise DeviceError(f"cuda:{index} is not available: torch {torch.__version__} {reason}")
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        names = ", ".join(f"cuda:{number}" for number in range(count))
        raise DeviceError(f"cuda:{index} does not exist: there are {count} CUDA devices: {names}")


@contextmanager
def _kernel_errors(index: int) -> Iterator[None]:
    """Turn torch's report of a failed kernel, raised by some later call, into a :class:`DeviceError`."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        advice = "start the process again; CUDA_LAUNCH_BLOCKING=1 shows where it failed"
        raise DeviceError(f"a kernel on cuda:{index} failed: {first_line}: {advice}") from error


class CudaEvent:
    """An event of a :class:`CudaDevice`; see :class:`~mlsys_core.device.protocols.Event`."""

    def __init__(self, index: int, *, timing: bool) -> None:
        import torch

        self.index = index  # the device it is recorded on
        self.timing = timing
        self.torch_event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
        self._is_recorded = False

    def query(self) -> bool:
        """Return whether the work before the latest recording is done; True if there is none."""
        with _kernel_errors(self.index):
            return not self._is_recorded or bool(self.torch_event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until :meth:`query` is True; raise :class:`DeviceTimeoutError` after ``timeout_s`` seconds."""
        timeout_s = check_timeout(timeout_s)
        if timeout_s is None:
            with _kernel_errors(self.index):
                if self._is_recorded:
                    self.torch_event.synchronize()
            return
        end = time.monotonic() + timeout_s
        while not self.query():
            if time.monotonic() >= end:
                raise DeviceTimeoutError(
                    f"the event was not passed within {timeout_s} s; cuda:{self.index} is still at work"
                )
            time.sleep(_POLL_S)

    def elapsed_ms(self, end: Event) -> float:
        """Return milliseconds of device time from this event to ``end``; both need timing and must have been passed."""
        last = _cuda_event(end)
        self._check_passed("the start event")
        last._check_passed("the end event")
        if last.index != self.index:
            raise DeviceError(f"no common clock: the events were recorded on cuda:{self.index} and cuda:{last.index}")
        return float(self.torch_event.elapsed_time(last.torch_event))

    def _check_passed(self, which: str) -> None:
        if not self.timing:
            raise DeviceError(f"{which} has no timing: make it with device.event(timing=True)")
        if not self._is_recorded:
            raise DeviceError(f"{which} was never recorded: call stream.record(event) first")
        if not self.query():
            raise DeviceError(f"{which} has not been passed yet: call its synchronize() first")

    def _record(self, stream: torch.cuda.Stream) -> None:
        self.torch_event.record(stream)
        self._is_recorded = True


def _cuda_event(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise InvalidInputError(
            f"got a {type(event).__name__} where a CUDA event is needed: make it with the event() of a cuda device"
        )
    return event


class CudaStream:
    """One CUDA stream; see :class:`~mlsys_core.device.protocols.Stream`. Made by :class:`CudaDevice`.

    torch hands out 32 streams per device in turn: the 33rd is the first again, which costs concurrency only.
    """

    def __init__(self, number: int, index: int, torch_stream: torch.cuda.Stream) -> None:
        self.number = number  # streams of a device count from 0, in the order made
        self.index = index
        self.torch_stream = torch_stream
        self.errors = ErrorLatch()
        self._closed = False

    def __repr__(self) -> str:
        return f"<CudaStream {self.number} of cuda:{self.index}>"

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        """Call ``fn(*args)`` now, with this stream as torch's current one; the kernels it launches run in order.

        Memory of tensors among ``args`` is not reused before they are done; tensors inside other arguments, or that
        ``fn`` knows by itself, are for the caller to keep.
        """
        import torch

        self._check_open()
        if self.errors.is_set:
            return
        try:
            with torch.cuda.stream(self.torch_stream):
                for arg in args:
                    if isinstance(arg, torch.Tensor) and arg.is_cuda:
                        arg.record_stream(self.torch_stream)
                fn(*args)
        except Exception as error:  # noqa: BLE001 - the work's own; synchronize() and close() raise it
            self.errors.keep(error)

    def record(self, event: Event) -> None:
        """Let ``event`` stand for all work submitted so far; it must come from the same device."""
        event = _cuda_event(event)
        self._check_open()
        if event.index != self.index:
            raise InvalidInputError(f"an event of cuda:{event.index} cannot be recorded on cuda:{self.index}")
        event._record(self.torch_stream)

    def wait(self, event: Event) -> None:
        """Hold later work until ``event``, as recorded now, is passed; it may come from another CUDA device."""
        event = _cuda_event(event)
        self._check_open()
        if event._is_recorded:
            self.torch_stream.wait_event(event.torch_event)

    def synchronize(self) -> None:
        """Block until the work submitted so far is done, then raise the first error it raised, once.

        Raises:
            DeviceError: a kernel failed. The device's context is lost then, and with it every stream of the process.
        """
        if not self._closed:
            self.drain()
        self.errors.raise_kept()

    def drain(self) -> None:
        """Block until the work submitted so far is done; errors of the calls stay kept."""
        with _kernel_errors(self.index):
            self.torch_stream.synchronize()

    def close(self) -> None:
        """Drain the stream and raise an error not yet reported; torch returns the stream to its pool."""
        if not self._closed:
            self._closed = True
            self.drain()
        self.errors.raise_kept()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_after(self, error)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"{self!r} is closed: make another with device.stream()")


class CudaDevice:
    """One CUDA device of this process; see :class:`~mlsys_core.device.protocols.Device`.

    Args:
        index: its number among those ``CUDA_VISIBLE_DEVICES`` shows.

    Raises:
        DeviceError: there is no such device; the message says why and what to do.
        MissingDependencyError: torch cannot be imported.

    Example (needs a GPU):
        device = CudaDevice(0)
        with device.stream() as stream:
            stream.submit(torch.mm, a, b)  # enqueued; a and b were ready before
            stream.synchronize()
    """

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        _check_cuda(index)
        self.index = index
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the set: a WeakSet must not grow while another thread walks it
        self._streams: weakref.WeakSet[CudaStream] = weakref.WeakSet()
        self._current: dict[int, CudaStream] = {}  # by the driver's handle; torch has few streams

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}>"

    @property
    def name(self) -> str:
        """``"cuda:index"``."""
        return f"{self.kind}:{self.index}"

    @property
    def torch_name(self) -> str:
        """``"cuda:index"``."""
        return self.name

    def stream(self, *, torch_stream: torch.cuda.Stream | None = None) -> CudaStream:
        """Return a new stream, or one over ``torch_stream`` (``torch.cuda.current_stream()``), which stays torch's.

        Raises:
            InvalidInputError: ``torch_stream`` is on another device.
        """
        import torch

        if torch_stream is None:
            torch_stream = torch.cuda.Stream(device=self.index)  # type: ignore[no-untyped-call]
        elif torch_stream.device_index != self.index:
            raise InvalidInputError(f"a stream of cuda:{torch_stream.device_index} was given to {self.name}")
        stream = CudaStream(next(self._numbers), self.index, torch_stream)
        with self._lock:
            self._streams.add(stream)
        return stream

    def current_stream(self) -> CudaStream:
        """Return torch's current stream of this device; the same object as long as it is the same stream."""
        import torch

        torch_stream = torch.cuda.current_stream(self.index)
        known = self._current.get(torch_stream.cuda_stream)
        if known is None:
            known = self._current[torch_stream.cuda_stream] = self.stream(torch_stream=torch_stream)
        return known

    def event(self, *, timing: bool = False) -> CudaEvent:
        """Return a new event, not recorded."""
        return CudaEvent(self.index, timing=timing)

    def synchronize(self) -> None:
        """Block until the whole device is idle, then raise the oldest stream's kept error, if any."""
        import torch

        with self._lock:
            streams = list(self._streams)
        with _kernel_errors(self.index):
            torch.cuda.synchronize(self.index)
        raise_oldest(streams)

    def memory_info(self) -> MemoryInfo:
        """Return the device's memory as the driver sees it; the reserve of torch's allocator counts as taken."""
        import torch

        free, total = torch.cuda.mem_get_info(self.index)
        return MemoryInfo(total_nbytes=total, available_nbytes=free)
