"""Prepared calls: one for each set of input shapes, made on first use; a bounded number is kept."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.memory.trim import ReturnsMemory, return_freed_memory
from mlsys_core.posix import num_cores

from mlsys_nimble.backends.executor import Executor, Releasing, make_executor
from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.capture.aliases import overlap
from mlsys_nimble.capture.general import refuse_unwatched
from mlsys_nimble.capture.repeat import capture_checked
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.errors import CaptureError, refuse, refuse_or_blame
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.program import Program
from mlsys_nimble.ir.resized import split
from mlsys_nimble.passes import PassReport, optimise
from mlsys_nimble.passes.precision import round_weights
from mlsys_nimble.passes.rewrite import is_random
from mlsys_nimble.ranged import Ranged, RangedCalls, Ranges
from mlsys_nimble.state.forks import CAPTURE_LOCK, renew_in_forks
from mlsys_nimble.state.weights import Watch, copied_constants

_LOG = logging.getLogger("mlsys_nimble")
_CHANGED = (
    "the model was changed after it was prepared, so it was prepared again. Where that is often, prepare it with "
    "training=True, which reads weights at every call."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options by which models are prepared."""

    executor: str = "auto"  # "native", "cuda", "reference", or "auto": by device
    use_multi_stream: bool = True  # run independent operators concurrently
    num_threads: int | None = None  # workers of the native executor; None: as many as torch uses
    max_schedules: int = 8  # sets of input shapes kept; the least recently used one is dropped
    max_concurrency: int = 1  # calls of one schedule that may run at once, each with memory of its own
    winograd: int = 4  # the largest tile for 3x3 convolutions in the native executor: 0, 2 or 4 (docs/nimble-cpu.md)
    kernels: str = "triton"  # of the CUDA executor: "triton", "inductor" or "aten" (docs/nimble-cuda.md)
    rematerialises: bool = True  # training: recompute cheap values in the backward pass (min-cut)
    precision: str = "fp32"  # "bf16" rounds the weights of linears and convolutions to it (docs/nimble-cpu.md)
    weights: str = "bytes"  # how a change is detected: by "bytes" or by "versions" (docs/nimble.md)
    optimises: bool = True  # run the passes; without them the program has the model's operators

    def __post_init__(self) -> None:
        for name in ("max_schedules", "max_concurrency"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.precision not in ("fp32", "bf16"):
            raise InvalidInputError(f"precision is {self.precision!r}; it may be 'fp32' or 'bf16'")
        if self.weights not in ("bytes", "versions"):
            raise InvalidInputError(f"weights is {self.weights!r}; it may be 'bytes' or 'versions'")
        if self.winograd not in (0, 2, 4):
            raise InvalidInputError(f"winograd is {self.winograd}; it may be 0, 2 or 4")
        if self.kernels not in ("triton", "inductor", "aten"):
            raise InvalidInputError(f"kernels is {self.kernels!r}; it may be 'triton', 'inductor' or 'aten'")


_BY_DEVICE = {"cpu": "auto", "cuda": "cuda"}  # on other devices torch runs the operators


def make_options(options: Mapping[str, Any]) -> Options:
    """Make options from names and values.

    Raises:
        InvalidInputError: a name does not exist, or a value is out of range.

    Example:
        >>> make_options({"num_threads": 2}).num_threads
        2
    """
    known = Options.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InvalidInputError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}")
    return Options(**options)


class Prepared:
    """Call of fixed shapes, ready to be replayed from any thread."""

    def __init__(self, captured: Captured, options: Options, model: Any, *, ranged: Ranged | None = None) -> None:
        self.captured = captured
        self.ranged = ranged
        split_program = split(captured.program, is_random) if ranged else None
        self.program: Program = split_program.main if split_program else captured.program
        self.reports: tuple[PassReport, ...] = ()
        if options.optimises:
            self.program, self.reports = optimise(self.program)
        if options.precision == "bf16":
            self.program = round_weights(self.program)
        self._options = options
        self._extra: dict[str, Any] = {}  # options of the executor of many sizes
        if ranged and split_program:
            self._extra = {"places": ranged.places, "tables": split_program.tables, "largest": ranged.largest}
        self.executor: Executor = self._make(options.num_threads)
        constants = captured.program.constants.values()
        copied = list(constants)
        if not captured.reads_values and not ranged:
            copied = copied_constants(captured.program, self.program, self.executor.copies)
        self.watch = Watch(model, constants, copied, reads_content=options.weights == "bytes")
        self.renew()
        renew_in_forks(self)
        self._is_one_tensor = captured.results.is_plain and captured.results.spec == _ONE_TENSOR
        self._writes = Writes(captured)
        views = any(origin.kind == "input" for origin in captured.results.origins)
        if isinstance(self.executor, Releasing) and options.max_concurrency == 1:  # others are to be made of them
            self.executor.release(captured.program.constants.values())
        return_freed_memory()  # of the capture, and of kernels that were tried and not taken
        self.is_bound_to_strides = views or bool(self._writes.inputs)  # whether they copy depends on strides
        self._returns_memory = ReturnsMemory()  # last

    def renew(self) -> None:
        """Make new locks: no call is running."""
        self._turn = threading.Lock()  # of the executor that serves a single caller
        self._others: SimpleQueue[Executor | None] | None = None  # idle ones beside it; None: to be made
        if self._options.max_concurrency > 1 and not self.program.mutations:  # buffers are shared: one call at a time
            self._others = SimpleQueue()
            for _ in range(self._options.max_concurrency - 1):
                self._others.put(None)

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
            **self._extra,
        )

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


class PreparedCalls:
    """Prepared calls of one model, by the signature of their arguments."""

    def __init__(
        self,
        model: Callable[..., Any],
        options: Options,
        *,
        fixed_indices: Collection[int] = (),
        in_eval_mode: bool = False,
    ) -> None:
        self._model = model
        self._options = options
        self._fixed_indices = frozenset(fixed_indices)
        self._mode = eval_mode if in_eval_mode else nullcontext
        self._by_signature: OrderedDict[Any, Prepared] = OrderedDict()
        self.latest: Prepared | None = None
        self.ranged: RangedCalls[Prepared] | None = None  # calls of many sizes that one preparation serves
        self.renew()
        renew_in_forks(self)

    def serve(self, ranges: Ranges) -> None:
        """Serve all calls within these ranges by one preparation, where one can."""

        def make(captured: Captured, ranged: Ranged) -> Prepared:
            return Prepared(captured, self._options, self._model, ranged=ranged)

        self.ranged = RangedCalls(ranges, self._capture_at, make)

    def renew(self) -> None:
        """Make new locks: no call is running."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_signature)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._by_signature.clear()
            self.latest = None
            if self.ranged:
                self.ranged.clear()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replay the call; prepare it first if its signature is new."""
        signature, inputs, objects = self._read(args, kwargs)
        for tensor in inputs:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(
                    "an input requires a gradient, and what Nimble replays has none. Call under torch.no_grad(), "
                    "or pass input.detach()."
                )
        is_autocast = torch._C._is_any_autocast_enabled()
        if is_autocast:
            signature = signature, autocast_state()
        prepared = self._by_signature.get(signature) or self._find(signature, args, kwargs)
        if prepared.is_bound_to_strides and not all(tensor.is_contiguous() for tensor in inputs):
            signature = signature, tuple([tensor.stride() for tensor in inputs])
            prepared = self._by_signature.get(signature) or self._prepare(signature, args, kwargs)
        if prepared.watch.has_changed():
            self.clear()
            prepared = self._find(signature, args, kwargs)
            _LOG.info("%s", _CHANGED)
        if prepared is not self.latest:
            with self._lock:
                if signature in self._by_signature:
                    self._by_signature.move_to_end(signature)
                self.latest = prepared
        if is_autocast:  # the schedule holds its casts
            with torch._C._DisableAutocast():
                return prepared.run(inputs, objects)
        return prepared.run(inputs, objects)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """Prepare calls of this one's signature, without running it."""
        signature, inputs, _ = self._read(args, kwargs)
        prepared = self._find(signature, args, kwargs)
        prepared.check(inputs)
        return prepared

    def _read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Sequence[torch.Tensor], Sequence[Any]]:
        """Return the call's signature, the tensors that a replay takes, and the objects among the arguments."""
        if not kwargs and not self._fixed_indices and {*map(type, args)} == {torch.Tensor}:
            return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in args]), args, ()
        flat = trees.flatten((args, dict(kwargs)))
        leaves = flat.leaves
        if self._fixed_indices:
            leaves = [leaf for index, leaf in enumerate(leaves) if index not in self._fixed_indices]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return (flat.spec, tuple([trees.key_of(leaf, _looks) for leaf in leaves])), inputs, flat.objects

    def _find(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """Return what serves a call; make it first if need be."""
        if self.ranged is None or torch._C._is_any_autocast_enabled():
            return self._prepare(signature, args, kwargs)
        found = self.ranged.known(signature)
        if found is None:
            with self._lock:
                found = self.ranged.find(signature, args, kwargs)
                self.latest = found or self.latest
        return found or self._prepare(signature, args, kwargs)

    def _capture_at(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], questions: Questions, is_first: bool
    ) -> Captured:
        """Capture the model at one of many sizes; the first of them with the checks of any preparation."""
        with CAPTURE_LOCK, self._mode(self._model):
            refuse_unwatched(self._model)
            if is_first:
                return self._capture(tuple(args), kwargs, questions)
            fixed = self._fixed_indices
            return capture(self._model, args, kwargs, fixed_indices=fixed, separates=False, questions=questions)

    def _capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], questions: Questions | None = None
    ) -> Captured:
        fixed = self._fixed_indices
        try:
            if isinstance(self._model, torch.fx.GraphModule):
                return capture(self._model, args, kwargs, fixed_indices=fixed, separates=False, questions=questions)
            return capture_checked(self._model, args, kwargs, questions)
        except MlsysError:
            raise
        except Exception as error:  # the model's own, or one of the capture
            with torch.no_grad():
                run_on_copies(self._model, args, kwargs)
            what = "the model runs, but not when it is watched"
            raise refuse_or_blame(error, what, "Prepare with fallback='eager'.") from error

    def _prepare(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        with self._lock:
            if (found := self._by_signature.get(signature)) is not None:  # another thread was faster
                return found
            begin = time.perf_counter()
            with CAPTURE_LOCK, self._mode(self._model):
                captured = self._capture(args, kwargs)
            with faults_refused():
                prepared = Prepared(captured, self._options, self._model)
            self._by_signature[signature] = self.latest = prepared
            dropped = len(self._by_signature) > self._options.max_schedules
            if dropped:
                self._by_signature.popitem(last=False)
            shapes = ", ".join(str(captured.program.values[value]) for value in captured.program.inputs)
            _LOG.info(
                "prepared %s: %d operators, %.2f s; %d of at most %d schedules kept%s",
                shapes or "a call without tensors",
                len(prepared.program.operators),
                time.perf_counter() - begin,
                len(self._by_signature),
                self._options.max_schedules,
                ", the one unused for longest was dropped" if dropped else "",
            )
            return prepared


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return for CPU and CUDA whether autocast is on, and the dtype that it casts to."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put all modules in eval mode within the context."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def faults_refused() -> Iterator[None]:
    """Refuse a model on which passes or executors fail, so that ``fallback="eager"`` and torch.compile can go on."""
    try:
        yield
    except MlsysError:
        raise
    except Exception as error:
        what = "no schedule can be made"
        raise refuse_or_blame(error, what, "Prepare with fallback='eager'.") from error


def run_on_copies(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a model eagerly on copies of the tensors."""
    flat = trees.flatten((args, dict(kwargs)))
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    copied_args, copied_kwargs = trees.unflatten(leaves, flat.spec)
    return model(*copied_args, **copied_kwargs)


def _looks(tensor: torch.Tensor) -> Any:
    """Return the properties by which a schedule fits a tensor."""
    return tensor.shape, tensor.dtype, tensor.device


_ONE_TENSOR = trees.flatten((0, [])).spec
