"""``@cell``: a module that computes one cell type, checked to be batchable (BatchMaker, sections 3.1, 4.1).

A cell's type is its definition, its weights and the shapes of its inputs: :attr:`Cell.identity` is a hash of the three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_serving.isolation import draw_like, require_isolated
from mlsys_serving.isolation.reading import require_followed
from torch import Tensor, nn

from mlsys_batchmaker.native.runner import HasForm, PackedCell, gives, pack_or_none
from mlsys_batchmaker.plan.spec import DEFAULT_BATCH_SIZES, CellSpec, Port, Stop

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])
_MANY_WEIGHTS = 1 << 20  # above which a cell is tried at fewer batch sizes


class HasPorts(Protocol):
    """Module that ``@cell`` accepts: one that describes its ports."""

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """Return the inputs, in the order of ``forward``'s arguments, and the outputs."""
        ...


@runtime_checkable
class RunsSteps(Protocol):
    """A cell that runs several steps of its chains at once, faster than step by step."""

    def run_steps(
        self, first: dict[int, Tensor], each: dict[int, Tensor], carry: Sequence[int], sizes: Sequence[int]
    ) -> list[list[Tensor]] | None:
        """Run several steps of chains; return the outputs by step, of the first ``sizes[step]`` rows.

        Args:
            first: by input that the chain carries, [b, ...].
            each: by other input, [steps, b, ...].
            carry: by input, the output that it reads from the second step on, or -1.
            sizes: rows of each step, never rising.

        Returns:
            None if the cell cannot carry that way; it is then run step by step.
        """
        ...


def cell(cls: ModuleClass) -> ModuleClass:
    """Mark a module class as a cell; it must have ``ports()``.

    Raises:
        InvalidInputError: it is no ``nn.Module``, or has no ``ports``.

    Example:
        >>> @cell
        ... class Counter(nn.Module):
        ...     def ports(self):
        ...         return [Port("n", "float32")], [Port("n", "float32")]
        ...     def forward(self, n):
        ...         return n + 1
        >>> make_cell("counter", Counter()).spec.inputs[0].name
        'n'
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InvalidInputError(f"@cell goes before a class of nn.Module, not {cls!r}")
    if not callable(getattr(cls, "ports", None)):
        raise InvalidInputError(f"{cls.__name__} needs a method ports() that returns its inputs and outputs")
    cls.is_batchmaker_cell = True  # type: ignore[attr-defined]
    return cls


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell type: what the scheduler knows of it, and the module that computes it."""

    spec: CellSpec
    module: nn.Module = field(repr=False)  # in evaluation mode; its weights are part of it

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 of the weights, by name."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def identity(self) -> str:
        """SHA-256 of graph, weights and input types; equal for equal types, whatever they are called."""
        inputs = [(port.dtype, port.shape) for port in self.spec.inputs]
        text = f"{export(self).graph_module.code}\0{self.weights_digest}\0{inputs}"
        return hashlib.sha256(text.encode()).hexdigest()

    def require_batchable(self) -> None:
        """Check the cell unless that was done; see :func:`check_batchable`."""
        self._is_checked  # noqa: B018 - computed once

    @cached_property
    def _is_checked(self) -> bool:
        check_batchable(self)
        return True

    @cached_property
    def packed(self) -> PackedCell | None:
        """The cell for the compiled loops of the CPU; None where it has no form for them, or they cannot be had.

        They keep no cell states but the last, so a cell whose results are among those has none either.
        """
        if not isinstance(self.module, HasForm):
            return None
        packed = pack_or_none(self.module.form(), stop=None if self.spec.stop is None else self.spec.stop.value)
        return packed if packed is not None and all(gives(packed, each) for each in self.spec.results) else None

    def example(self, size: int, *, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Return random inputs of ``size`` rows."""
        rng = torch.Generator().manual_seed(seed)
        return tuple(random_rows(port, size, rng).to(device) for port in self.spec.inputs)

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run one step; the result is always a tuple."""
        outputs = self.module(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def make_cell(
    name: str,
    module: nn.Module,
    *,
    results: Sequence[str] | None = None,
    stop: tuple[str, int] | None = None,
    priority: int = 0,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    check: bool = True,
) -> Cell:
    """Make a cell type of a module that has ``ports()``.

    Args:
        name: unique in its model.
        module: put into evaluation mode; its weights must not change afterwards.
        results: names of the outputs that a request gets; None: the first.
        stop: (output, value) that ends a chain.
        priority: larger goes first.
        batch_sizes: supported ones, rising.
        check: run it to see that it is batchable; False: a model does, before it takes the cell.

    Raises:
        InvalidInputError: it is not batchable: the first dimension of an input or output is not the batch, or a row
            depends on the other rows; or its ports are not what it takes and gives.
    """
    if not callable(getattr(module, "ports", None)):
        raise InvalidInputError(
            f"cell {name!r}: {type(module).__name__} needs ports(); see mlsys_batchmaker.cells.cell"
        )
    inputs, outputs = module.ports()  # type: ignore[operator]
    names = [port.name for port in outputs]
    for wanted in (*(results or ()), *((stop[0],) if stop else ())):
        if wanted not in names:
            raise InvalidInputError(f"cell {name!r} has no output {wanted!r}: {', '.join(names)}")
    spec = CellSpec(
        name,
        tuple(inputs),
        tuple(outputs),
        results=(0,) if results is None else tuple(names.index(each) for each in results),
        stop=None if stop is None else Stop(names.index(stop[0]), stop[1]),
        priority=priority,
        batch_sizes=tuple(batch_sizes),
    )
    made = Cell(spec, module.eval())
    if check:
        made.require_batchable()
    return made


def check_batchable(made: Cell) -> None:
    """See that ``made`` gives rows of its ports, no row of which depends on others; see :func:`make_cell`.

    The second is core's check by value, the same as for other executors (:mod:`mlsys_serving.isolation`).
    """
    size = 3
    name, outputs = made.spec.name, _run(made, made.example(size))
    if len(outputs) != len(made.spec.outputs):
        count = len(made.spec.outputs)
        raise InvalidInputError(f"cell {name!r} gives {len(outputs)} outputs, and has {count} ports for them")
    for port, whole in zip(made.spec.outputs, outputs, strict=True):
        if tuple(whole.shape) != (size, *port.shape) or dtype_name(whole.dtype) != port.dtype:
            raise InvalidInputError(
                f"cell {name!r}, output {port.name!r}: with {size} rows {port.dtype}{[size, *port.shape]} is expected, "
                f"got {dtype_name(whole.dtype)}{list(whole.shape)}; the first dimension must be the batch"
            )
    require_rows_apart(made, made.run, is_wide=True)
    require_followed(f"cell {name!r}", made.run, made.example(1))


def require_rows_apart(made: Cell, run: Callable[..., Sequence[Tensor]], *, is_wide: bool = False) -> None:
    """Refuse ``run``, the cell as a function of its inputs [b, ...], if one row of a batch changes another.

    Args:
        made: The cell.
        run: It, compiled perhaps.
        is_wide: Try integers without a bound over their whole dtype; not where some would end the process.

    Raises:
        InvalidInputError: It does, or it draws random numbers, or remembers rows.
    """
    spec = made.spec

    def answers(rows: list[Any]) -> list[list[Any]]:
        with torch.inference_mode():
            columns = [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]
            outputs = [value.cpu().numpy() for value in run(*columns)]
        return [[value[row, ...] for value in outputs] for row in range(len(rows))]

    example, highs = [value[0].numpy() for value in made.example(1)], [port.high for port in spec.inputs]
    num_weights = sum(value.numel() for value in made.module.state_dict().values())
    require_isolated(
        f"cell {spec.name!r}",
        answers,
        draw_like(example, highs, is_wide=is_wide),
        largest=spec.max_batch_size,
        is_short=num_weights > _MANY_WEIGHTS,
    )


def export(made: Cell) -> torch.export.ExportedProgram:
    """Export the cell's graph for any batch size; its first input takes the weights, which the graph does not hold."""
    holder = _Functional(made.module)
    weights = {name: tensor.detach() for name, tensor in made.module.state_dict().items()}
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    shapes: Any = {"weights": dict.fromkeys(weights), "inputs": tuple({0: batch} for _ in made.spec.inputs)}
    with torch.no_grad():
        return torch.export.export(holder, (weights, *made.example(2)), dynamic_shapes=shapes)


class _Functional(nn.Module):
    """A module as a function of its weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_function", module)  # no submodule: its weights come as an input

    def forward(self, weights: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        function = self._function
        assert isinstance(function, nn.Module)
        outputs = torch.func.functional_call(function, weights, inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def random_rows(port: Port, size: int, rng: torch.Generator) -> Tensor:
    """Return ``size`` random rows that ``port`` takes."""
    dtype = torch_dtype(port.dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size, *port.shape), generator=rng).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, port.high or 2, (size, *port.shape), generator=rng, dtype=dtype)
    return torch.randn(size, *port.shape, generator=rng).to(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in a port."""
    return str(dtype).removeprefix("torch.")


def _run(made: Cell, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        return made.run(*inputs)
    except Exception as error:  # the module is the user's: say which, and what it was given
        pairs = zip(made.spec.inputs, inputs, strict=True)
        shapes = ", ".join(f"{port.name}: {list(value.shape)}" for port, value in pairs)
        raise InvalidInputError(f"cell {made.spec.name!r} does not run on ({shapes}): {error}") from error
