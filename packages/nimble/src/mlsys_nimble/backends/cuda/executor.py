"""The CUDA executor: replays captured schedules on the caller's stream (sections 3.3.1 and 3.3.2).

A schedule reads its inputs at their addresses of the capture. An input that later comes from another address is from
then on copied to memory of the schedule: a batch is copied, parameters are not. Results are copied to memory of the
allocator's, so ``record_stream`` holds for them. What a forward pass saves is returned in place; while the caller holds
it, another capture runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mlsys_core.device import CudaDevice
from mlsys_core.device.cuda_graphs import current_device, is_usable
from mlsys_core.errors import InvalidInputError
from mlsys_nimble.backends.cuda.captured import CapturedSchedule, Location, Recorder, is_result, location_of
from mlsys_nimble.backends.cuda.convolutions import fastest, layouts_of
from mlsys_nimble.backends.cuda.driver import CoreDriver, Driver, Handle
from mlsys_nimble.backends.cuda.functions import is_kept_out, make_functions
from mlsys_nimble.backends.cuda.plan import plan_streams
from mlsys_nimble.ir.program import Program, ValueId
from torch import Tensor

_LOG = logging.getLogger("mlsys_nimble")
MAX_CAPTURES = 4  # captures of one program; when the caller holds all results, a call runs without a graph


class CudaExecutor:
    """Executor of CUDA graphs; see :class:`mlsys_nimble.backends.executor.Executor`.

    Args:
        program: Program after the passes.
        use_multi_stream: True runs independent operators concurrently.
        device: Device of its tensors; None: the current CUDA device.
        kernels: ``"triton"`` (our own for elementwise chains) or ``"aten"``.
        shares_pool: True puts the schedule's memory in a pool shared with others, which do not run at the same time.
        returns_in_place: False copies results out of the schedule's memory. True, for results as large as all that a
            forward pass saves, copies nothing and needs a pool of its own.
        driver: Driver that carries out the plan; None: core's CUDA device.

    Raises:
        InvalidInputError: torch sees no GPU.
    """

    def __init__(
        self,
        program: Program,
        *,
        use_multi_stream: bool = True,
        device: torch.device | None = None,
        kernels: str = "triton",
        shares_pool: bool = True,
        returns_in_place: bool = False,
        driver: Driver | None = None,
        **_: Any,
    ) -> None:
        if driver is None and not is_usable():
            raise InvalidInputError(
                "executor='cuda' wants a GPU, and torch sees none; executor='auto' takes what there is"
            )
        self._driver = driver or CoreDriver(current_device() if device is None else CudaDevice(device.index or 0))
        assert not (shares_pool and returns_in_place)
        self._pool = shared_pool(self._driver) if shares_pool else Pool(self._driver)
        self._returns_in_place = returns_in_place
        self._program = program = _with_scalars_on(program, self._driver.device)
        self.copies = frozenset(program.constants)  # convolutions may keep theirs in another layout
        self.plan = plan_streams(program.graph(), use_multi_stream=use_multi_stream)
        self._recorders = {
            layout: Recorder(
                program,
                self.plan,
                make_functions(program, kernels, layout=layout),
                self._driver,
                returns_in_place=returns_in_place,
            )
            for layout in layouts_of(program)
        }
        self.layout = next(iter(self._recorders))  # layout of images between convolutions; measured by the first call
        self._copied: set[int] = set()  # inputs that came from several addresses
        self._captures: list[CapturedSchedule] = []
        self._runs_alone = any(is_kept_out(operator.kind) for operator in program.operators)  # without a graph
        self.reserved_nbytes = 0  # bytes that the allocator added for all captures

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run as an :class:`~mlsys_nimble.backends.executor.Executor`; return when all is on the caller's stream."""
        # Memory made in inference mode cannot be written to outside it.
        with torch.inference_mode(False), torch.no_grad(), self._pool.turn():
            capture = self._capture_for(inputs)
            if capture is None:
                device = self._driver.device
                results = self._recorders[self.layout].run_now([tensor.to(device) for tensor in inputs])
            else:
                for number, own in capture.copies.items():
                    if own.data_ptr() != inputs[number].data_ptr():
                        self._driver.copy(own, inputs[number])
                self._driver.replay(capture.graph)
                results = capture.results
            copies_results = capture is not None and not self._returns_in_place
            outputs = self._outputs(inputs, self._copied_out(results) if copies_results else results)
            self._write_back(inputs, results)
            return outputs

    def _capture_for(self, inputs: Sequence[Tensor]) -> CapturedSchedule | None:
        """Return a capture that reads these inputs and whose results are free; None if none can be made."""
        locations = [location_of(tensor) for tensor in inputs]
        fitting = [capture for capture in self._captures if capture.fits(locations)]
        free = next((capture for capture in fitting if capture.is_free), None)
        if free is not None:
            return free
        if self._runs_alone:
            return None
        self._copied |= {number for number, tensor in enumerate(inputs) if tensor.device != self._driver.device}
        if not fitting and self._captures:
            self._learn(locations, inputs)
        if len(self._captures) >= MAX_CAPTURES:
            _LOG.warning("results of %d captures are held: a call runs without a graph", MAX_CAPTURES)
            return None
        before = self._driver.reserved_nbytes()
        try:
            capture = self._record(inputs)
        except Exception as error:  # noqa: BLE001 - of any operator; one of the model's own comes again without a graph
            self._runs_alone = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            _LOG.warning("no CUDA graph can be captured, so operators run one by one: %s", reason)
            return None
        self.reserved_nbytes += self._driver.reserved_nbytes() - before
        self._captures.append(capture)
        _LOG.info("captured %d operators on %d streams", len(self._program.operators), self.plan.num_streams)
        return capture

    def _record(self, inputs: Sequence[Tensor]) -> CapturedSchedule:
        """Make a capture; the first time, make one for each layout and keep the fastest."""
        copied, driver = sorted(self._copied), self._driver
        if len(self._recorders) == 1:
            return self._recorders[self.layout].record(inputs, copied, self._pool.handle)
        found = {
            layout: recorder.record(inputs, copied, self._pool.handle) for layout, recorder in self._recorders.items()
        }
        with driver.random_kept():
            seconds = {name: driver.seconds(partial(driver.replay, one.graph)) for name, one in found.items()}
        self.layout = fastest(seconds)
        self._recorders = {self.layout: self._recorders[self.layout]}
        return found[self.layout]

    def _learn(self, locations: Sequence[Location], inputs: Sequence[Tensor]) -> None:
        """Copy inputs that moved from now on, except those that other schedules write: they have few addresses."""
        seen = [capture.locations for capture in self._captures]
        moved = {
            number
            for number, location in enumerate(locations)
            if number not in self._copied and all(own[number] != location for own in seen)
        }
        self._copied |= {number for number in moved if not is_result(inputs[number])}
        self._captures = [capture for capture in self._captures if self._copied <= set(capture.copies)]

    def _write_back(self, inputs: Sequence[Tensor], results: dict[ValueId, Tensor]) -> None:
        """Write new values back, after the replay, to the caller's tensors that the call changes."""
        pairs = [
            (self._known(inputs, old), results[new] if new in results else self._known(inputs, new).clone())
            for old, new in self._program.mutations
        ]
        for tensor, new in pairs:
            self._driver.copy(tensor, new)

    def _copied_out(self, results: dict[ValueId, Tensor]) -> dict[ValueId, Tensor]:
        """Return the outputs among the results in fresh memory."""
        outputs = {value: torch.empty_like(results[value]) for value in self._program.outputs if value in results}
        for value, out in outputs.items():
            self._driver.copy(out, results[value])
        return outputs

    def _outputs(self, inputs: Sequence[Tensor], results: dict[ValueId, Tensor]) -> list[Tensor]:
        outputs = []
        for value in self._program.outputs:
            if value in results:
                made = results[value]
                outputs.append(torch.empty(0, dtype=made.dtype, device=made.device).set_(made))  # type: ignore[call-overload]
            else:
                outputs.append(self._known(inputs, value))
        return outputs

    def _known(self, inputs: Sequence[Tensor], value: ValueId) -> Tensor:
        """Return the tensor of an input or a constant."""
        program = self._program
        if value in program.inputs:
            return inputs[program.inputs.index(value)]
        constant: Tensor = program.constants[value]
        return constant


class Pool:
    """Memory of schedules that never run at once: a replay begins when the pool's previous one is over.

    Results are copied out of it, so it is as large as the largest schedule, not as their sum.
    """

    def __init__(self, driver: Driver) -> None:
        self.handle: Handle = driver.new_pool()
        self._driver = driver
        self._lock = threading.Lock()
        self._event = driver.new_event()
        self._stream: Handle = None  # stream of the last replay

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Order the caller's stream after the previous turn's stream within the context.

        That is all work put on it until now: what follows a replay may read results that this turn overwrites.
        """
        with self._lock:
            stream, last = self._driver.current_stream(), self._stream
            self._stream = stream
            if last is not None and last != stream:
                self._driver.record(self._event, last)
                self._driver.wait(self._event, stream)
            yield


_SHARED: dict[torch.device, Pool] = {}


def shared_pool(driver: Driver) -> Pool:
    """Return the pool of the driver's device."""
    if driver.device not in _SHARED:
        _SHARED[driver.device] = Pool(driver)
    return _SHARED[driver.device]


def _with_scalars_on(program: Program, device: torch.device) -> Program:
    """Return the program with constants of one number, which eager takes from the CPU, on the device."""
    changed = {buffer for buffer, _ in program.mutations}
    moved = {
        value: constant.to(device)
        for value, constant in program.constants.items()
        if constant.dim() == 0 and constant.device != device and value not in changed
    }
    return replace(program, constants={**program.constants, **moved}) if moved else program
