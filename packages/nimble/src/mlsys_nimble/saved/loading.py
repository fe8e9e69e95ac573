"""Load a file of prepared calls: weights are mapped, kernels bound to them, and nothing is measured or packed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, KernelUnavailableError, MlsysError
from mlsys_core.posix.machine import num_cores
from torch import Tensor

from mlsys_nimble.backends.cpu.decisions import Decisions
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.backends.cpu.library import load as load_kernels
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.checked import check_types
from mlsys_nimble.ir.program import Program
from mlsys_nimble.modes import unusual_modes, without_modes
from mlsys_nimble.saved.container import read_file
from mlsys_nimble.saved.records import read_program, read_tree
from mlsys_nimble.state.forks import renew_in_forks

_MAX_THREADS = 1024


@without_modes()
def load(path: str | Path, *, num_threads: int | None = None) -> SavedModel:
    """Load what :meth:`mlsys_nimble.Nimble.save` wrote.

    The file is mapped: processes share its weights in memory. It holds no code, and nothing of it is unpickled; a file
    of a stranger can ask for time and memory, as any model can, and for nothing else.

    Args:
        path: The file.
        num_threads: Workers; None: as many as when it was saved, at most the cores that there are.

    Raises:
        InvalidInputError: it is no such file, damaged, of another version, or for another kind of processor.
        KernelUnavailableError: the native kernels can be neither found nor compiled here.
    """
    path = Path(path).absolute()
    header, tensors, digest = read_file(path)
    try:
        lanes, here = header["lanes"], int(load_kernels().kernel_lanes())
        if lanes != here:
            raise InvalidInputError(
                f"it is for processors with vectors of {lanes} floats, and kernels here use {here}: save the model on "
                "a machine like this one, or on any with MLSYS_KERNEL_LEVEL=x86-64-v3 in both places"
            )
        with _without_collection():
            schedules = [_Schedule(each, tensors, num_threads) for each in header["schedules"]]
    except KernelUnavailableError:
        raise
    except MlsysError as error:
        raise InvalidInputError(f"{path} is refused: {error}") from error
    except Exception as error:  # any that a header of a stranger's choice can bring about
        reason = (str(error).splitlines() or [""])[0][:120]
        raise InvalidInputError(f"{path} is refused: {type(error).__name__}: {reason}") from error
    return SavedModel(path, digest, schedules, num_threads)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python's garbage collector off: it would walk over all of torch several times, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SavedModel:
    """Prepared calls from a file; calls from several threads take turns.

    Copies and pickles name the file, and map it again where they are used.

    Attributes:
        path: The file.
        schedules: One for each set of shapes, with its program and executor.
    """

    def __init__(self, path: Path, digest: int, schedules: Sequence[_Schedule], num_threads: int | None) -> None:
        self.path = path
        self.schedules = tuple(schedules)
        self._digest, self._num_threads = digest, num_threads
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Make a new lock: no call is running."""
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the schedule of these arguments and return the model's result, in the model's own structure.

        Raises:
            InvalidInputError: no schedule of the file is for such arguments.
        """
        flat = trees.flatten((args, kwargs))
        inputs = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
        for schedule in self.schedules:
            if schedule.serves(flat):
                break
        else:
            raise InvalidInputError(
                f"{self.path} has no schedule for {_types(inputs)}; it has {self.signatures()}. Prepare the model for "
                "these arguments, too, and save it again"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise InvalidInputError("an input requires a gradient, and a replay has none: call under torch.no_grad()")
        with self._lock, without_modes() if unusual_modes() else nullcontext():
            outputs = schedule.executor.run(inputs)
        return schedule.build(outputs, inputs)

    def signatures(self) -> str:
        """Return the types of the tensors of every schedule's arguments, as text."""
        return ", ".join(_types(schedule.types) for schedule in self.schedules)

    def __repr__(self) -> str:
        return f"SavedModel({self.path}: {self.signatures()})"

    def __reduce__(self) -> Any:
        if any(schedule.program.mutations for schedule in self.schedules):
            raise InvalidInputError(
                f"{self.path} has buffers that calls write to: no copy or pickle of the loaded model would have them"
            )
        return _load_same, (str(self.path), self._digest, self._num_threads)


def _load_same(path: str, digest: int, num_threads: int | None) -> SavedModel:
    found = load(path, num_threads=num_threads)
    if found._digest != digest:
        raise InvalidInputError(f"{path} has changed since the model was loaded from it that was copied or pickled")
    return found


class _Schedule:
    """One schedule of a file, checked and ready."""

    def __init__(self, record: Mapping[str, Any], tensors: Sequence[Tensor], num_threads: int | None) -> None:
        numbers = {_index(value): number for value, number in record["constants"]}
        constants = {value: None if number is None else tensors[_index(number)] for value, number in numbers.items()}
        program = read_program(record)
        for value, tensor in constants.items():
            if tensor is None:
                type_ = program.values[value]
                constants[value] = torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device="meta")
        self.program: Program = replace(program, constants=constants)
        check_types(self.program)
        saved = _index(record["num_threads"])
        seconds = {name: float(took) for name, took in record["seconds"].items()}
        if not 0 < saved <= _MAX_THREADS or not all(isfinite(took) and took >= 0 for took in seconds.values()):
            raise ValueError("its times or threads are no numbers")
        packed = {name: [tensors[_index(number)] for number in numbers] for name, numbers in record["packed"].items()}
        kernels, assignments = dict(record["kernels"]), tuple(map(_index, record["assignments"]))
        self.executor = NativeExecutor(
            self.program,
            num_threads=num_threads or min(saved, num_cores()),
            use_multi_stream=bool(record["use_multi_stream"]),
            decided=Decisions(saved, kernels, seconds, assignments, packed),
        )
        self._read_call(record)

    def _read_call(self, record: Mapping[str, Any]) -> None:
        self.types = [self.program.values[value] for value in self.program.inputs]
        self._call = record["call"]
        call = trees.flatten(self.arguments([torch.empty(0)] * len(self.types)))
        self._spec = call.spec
        self._keys = [None if isinstance(leaf, Tensor) else trees.key_of(leaf, id) for leaf in call.leaves]
        if self._keys.count(None) != len(self.types):
            raise ValueError("its arguments are not its program's inputs")
        self._result = record["result"]
        self._origins = [(str(kind), _index(number)) for kind, number in record["origins"]]
        available = {"output": len(self.program.outputs), "input": len(self.program.inputs)}
        if any(number >= available[kind] for kind, number in self._origins):
            raise ValueError("its result is not of its program's outputs")
        nothing = torch.empty(0)  # a result that cannot be built must fail now
        self.build([nothing] * available["output"], [nothing] * available["input"])

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors in them."""
        args, kwargs = read_tree(self._call, lambda number: inputs[number])
        return args, kwargs

    def serves(self, flat: trees.Flat) -> bool:
        """Return whether a call's arguments are those of this schedule."""
        if flat.spec != self._spec:
            return False
        types = iter(self.types)
        for leaf, key in zip(flat.leaves, self._keys, strict=True):
            if key is None:
                type_ = next(types)
                if not isinstance(leaf, Tensor) or leaf.shape != type_.shape or leaf.device.type != "cpu":
                    return False
                if str(leaf.dtype) != f"torch.{type_.dtype}":
                    return False
            elif isinstance(leaf, Tensor) or trees.key_of(leaf, id) != key:
                return False
        return True

    def build(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the result that forward returns."""
        sources = {"output": outputs, "input": inputs}

        def tensor(number: int) -> Tensor:
            kind, index = self._origins[_index(number)]
            return sources[kind][index]

        return read_tree(self._result, tensor)[0]


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r:.60} is no number of an entry")
    return number


def _types(tensors: Sequence[Any]) -> str:
    found = (f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
    return f"({', '.join(found)})"
