"""A call of fixed shapes, ready to be replayed: its program after the passes, and the executor that replays it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.memory.pages import ReturnsMemory, return_freed_memory
from mlsys_core.posix.machine import num_cores

from mlsys_nimble.backends.executor import Executor, Releasing, make_executor
from mlsys_nimble.capture import Captured
from mlsys_nimble.capture.aliases import overlap
from mlsys_nimble.errors import CaptureError, refuse
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.operators import Aten, Convolution, Dequantise, Linear, Pointwise, Quantise
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.ir.sizes import split
from mlsys_nimble.options import BF16, BF16_PAIRS, Options
from mlsys_nimble.passes import PASSES, PassReport, optimise
from mlsys_nimble.passes.fusion import fuse_separables
from mlsys_nimble.passes.precision import multiply_pairs, round_weights
from mlsys_nimble.passes.rewrite import is_random
from mlsys_nimble.ranged import Ranged
from mlsys_nimble.state.forks import renew_in_forks
from mlsys_nimble.state.weights import Watch, copied_constants

_BY_DEVICE = {"cpu": "auto", "cuda": "cuda"}  # other devices: torch runs the operators
_ONE_TENSOR = trees.flatten((0, [])).spec
_QUANTISED = (
    "the model is quantised, but %d of its products run in float32 on rounded values%s. Products of whole numbers need "
    "int8 weights whose zero points are 0, by tensor or by output channel, and constant biases"
)


class Prepared:
    """Call of fixed shapes, ready to be replayed from any thread."""

    def __init__(
        self,
        captured: Captured,
        options: Options,
        model: Any,
        *,
        ranged: Ranged | None = None,
        call: trees.Flat | None = None,
        layout: Any = None,
    ) -> None:
        self.captured = captured
        self.call = call  # the arguments, flattened, tensors without memory; None: not known
        self.ranged = ranged
        split_program = split(captured.program, is_random) if ranged else None
        self.program: Program = split_program.main if split_program else captured.program
        self.reports: tuple[PassReport, ...] = ()
        if options.optimises:
            is_apart = options.precision == BF16_PAIRS  # separable convolutions, fused, have no product of pairs
            passes = tuple(one for one in PASSES if not (is_apart and one is fuse_separables))
            self.program, self.reports = optimise(self.program, passes)
        if options.precision in (BF16, BF16_PAIRS):
            self.program = round_weights(self.program)
        if options.precision == BF16_PAIRS:
            if captured.device.type != "cpu":
                raise InvalidInputError(
                    f"precision {BF16_PAIRS!r} is for CPUs, and the model is on {captured.device}; "
                    f"use model.bfloat16(), or precision {BF16!r}"
                )
            self.program = multiply_pairs(self.program)
        self._options = options
        self._extra: dict[str, Any] = {}  # options of the executor of many sizes
        if ranged and split_program:
            self._extra = {"places": ranged.places, "tables": split_program.tables, "largest": ranged.largest}
        self.executor: Executor = self._make(options.num_threads)
        constants = captured.program.constants.values()
        copied = list(constants)
        if not captured.reads_values:
            copied = copied_constants(captured.program, self.program, self.executor.copies)
            if split_program:  # each size keeps what these make
                read = (split_program.tables.constants.values(), copied)
                copied = list({id(tensor): tensor for tensors in read for tensor in tensors}.values())
        self.watch = Watch(model, constants, copied, weights=options.weights, executor=self.executor)
        self.renew()
        renew_in_forks(self)
        results = captured.results
        self._is_one_tensor = results.is_plain and results.spec == _ONE_TENSOR and len(results.tensor_indices) == 1
        self._writes = Writes(captured)
        if isinstance(self.executor, Releasing) and options.max_concurrency == 1:  # others are to be made of them
            self.executor.release(captured.program.constants.values())
        return_freed_memory()  # freed by the capture and by kernels that were not chosen
        self.strides = captured.strides
        self.made_for = layout  # layout of the example's tensors
        self._returns_memory = ReturnsMemory()  # last

    def renew(self) -> None:
        """Make new locks: no call is running."""
        self._turn = threading.Lock()  # held by the one caller that the executor serves
        self._others: SimpleQueue[Executor | None] | None = None  # idle ones beside it; None: to be made
        if self._options.max_concurrency > 1 and not self.program.mutations:  # buffers are shared: one call at a time
            self._others = SimpleQueue()
            for _ in range(self._options.max_concurrency - 1):
                self._others.put(None)

    def has_changed(self, *, looks_at_all: bool = False) -> bool:
        """Return whether the model has changed since; see :meth:`~mlsys_nimble.state.weights.Watch.has_changed`."""
        return self.watch.has_changed(looks_at_all=looks_at_all, turn=self._turn)

    @property
    def warning(self) -> str:
        """Return what keeps the model from being as fast as it is meant to be; empty if nothing does."""
        num_floats, num_torch = _rounded(self.captured.program, self.program)
        if not num_floats + num_torch:
            return ""
        return _QUANTISED % (num_floats, f"; torch runs {num_torch} operators" if num_torch else "")

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check that the model can be replayed on these inputs.

        Raises:
            CaptureError: tensors share memory, and the model writes to it.
        """
        if self._writes:
            self._writes.check(inputs)

    def _make(self, num_threads: int | None) -> Executor:
        options = self._options
        return make_executor(
            "ranged" if self.ranged else _executor_of(options, self.captured.device),
            self.program,
            num_threads=num_threads,
            use_multi_stream=options.use_multi_stream,
            winograd=options.winograd,
            device=self.captured.device,
            kernels=options.kernels,
            shares_pool=options.max_concurrency == 1,
            own=self._own(),
            **self._extra,
        )

    def _own(self) -> frozenset[int]:
        """Return the ids of the model's own weights; none where all are packed or compared in any case."""
        if self.ranged or self.captured.reads_values:
            return frozenset()
        return frozenset(map(id, self.captured.program.constants.values()))

    def run(self, inputs: Sequence[torch.Tensor], objects: Sequence[Any] = ()) -> Any:
        """Replay the call and return the model's result.

        Args:
            inputs: Tensors of the call, in flattened order.
            objects: Objects among its arguments, which are changed as forward changes them.

        Raises:
            CaptureError: tensors share memory, and the model writes to it.
        """
        self.check(inputs)
        if self._others is None:
            with self._turn:
                outputs = self.executor.run(inputs)
        elif self._turn.acquire(blocking=False):
            try:
                outputs = self.executor.run(inputs)
            finally:
                self._turn.release()
        else:
            executor = self._others.get()
            try:
                executor = executor or self._make(self._threads_beside())
                outputs = executor.run(inputs)
            finally:
                self._others.put(executor)
        if self._is_one_tensor:
            return outputs[0]
        return self.captured.results.build(outputs, inputs, self.captured.program, list(objects))

    def _threads_beside(self) -> int:
        """Return the threads of each further executor: its share of the cores that the first one leaves, at least 1."""
        first = self._options.num_threads or torch.get_num_threads()
        return max(1, min(first, (num_cores() - first) // (self._options.max_concurrency - 1)))


def _executor_of(options: Options, device: torch.device) -> str:
    return _BY_DEVICE.get(device.type, "reference") if options.executor == "auto" else options.executor


def _rounded(captured: Program, program: Program) -> tuple[int, int]:
    """Return the number of float products of rounded values, and of quantised operators that torch runs."""
    targets = [each.kind.target for each in program.operators if isinstance(each.kind, Aten)]
    num_torch = sum(target.startswith(("quantized_decomposed.", "aten._int_mm")) for target in targets)
    if not any(isinstance(each.kind, Quantise | Dequantise) for each in captured.operators):
        return 0, num_torch
    producers = {value: operator.kind for operator in program.operators for value in operator.outputs}

    def is_rounded(value: ValueId) -> bool:
        kind = producers.get(value)
        rounds = isinstance(kind, Pointwise) and any(step.op == "round" for step in kind.steps)
        return rounds or isinstance(kind, Dequantise)

    products = [each for each in program.operators if isinstance(each.kind, Convolution | Linear)]
    return sum(is_rounded(each.inputs[0]) for each in products), num_torch


class Writes:
    """Inputs and constants that a call writes to; false if there are none."""

    def __init__(self, captured: Captured) -> None:
        program = captured.program
        written = {old for old, _ in program.mutations}
        self.inputs = [number for number, value in enumerate(program.inputs) if value in written]
        self._written = [tensor for value, tensor in program.constants.items() if value in written]
        self._constants = list(program.constants.values())

    def __bool__(self) -> bool:
        return bool(self.inputs or self._written)

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check that no other tensor of the call shares memory with one that is written to.

        Raises:
            CaptureError: one does, which a program cannot express.
        """
        for number in self.inputs:
            others = (*inputs[:number], *inputs[number + 1 :], *self._constants)
            if any(overlap(inputs[number], other) for other in others):
                raise _shared()
        if any(overlap(tensor, given) for tensor in self._written for given in inputs):
            raise _shared()


def _shared() -> CaptureError:
    what = "two arguments, or an argument and a tensor of the model, share memory, and forward writes to it"
    return refuse(what, "", "Pass a copy of one, x.clone(), or prepare with fallback='eager'.")
