"""Any module, exported program, .pt2 or ONNX file as one graph of operators, ready to be cut.

A cut is allowed where everything that crosses it is a tensor with one row for each request, or the batch size itself:
then requests can join and leave there. Which values do is found by running the graph with two batch sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.device import Device
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.program import SavedProgram
from mlsys_core.pt2.program import load_program as load_exported
from mlsys_dvabatch.stages.slicing.onnx_file import OnnxFile, read_onnx
from mlsys_dvabatch.stages.slicing.onnx_session import OnnxSession
from mlsys_dvabatch.stages.slicing.shapes import Sizes, dynamic_sizes, fixed_example
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export._tree_utils import reorder_kwargs
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@contextmanager
def naming(name: str | Path) -> Iterator[None]:
    """Put a model's name or path before the text of an :class:`InvalidInputError` that lacks it.

    Example:
        >>> with naming("net.onnx"):
        ...     raise InvalidInputError("the model mixes requests")
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: net.onnx: the model mixes requests
    """
    try:
        yield
    except InvalidInputError as error:
        if Path(name).name in str(error) or str(error).startswith(f"{Path(name).stem}: "):
            raise
        raise InvalidInputError(f"{name}: {error}") from error


_A_SHAPE = "the shape of one request, like --shape 3,224,224"
_FLOPS = 1e10  # FLOP a second of ONNX Runtime, roughly: it counts none
_PROBES = (2, 3)  # batch sizes that tell rows from other dimensions


def _nothing() -> None:
    """Do nothing: the host has done its work when a call returns."""


@dataclass(frozen=True, slots=True)
class Program:
    """A graph and what is known of it."""

    module: fx.GraphModule
    operators: tuple[fx.Node, ...]  # without inputs, parameters and the output, in topological order
    example: tuple[Tensor, ...]  # inputs of one request, ``[1, ...]`` each
    row_values: frozenset[str]  # names of nodes that are tensors with one row for each request
    batch_values: frozenset[str]  # names of nodes that are the batch size
    rounding: float  # relative difference between batch sizes that the dtypes within explain
    shapes: Mapping[str, tuple[int, ...]]  # shapes of tensor nodes for two requests
    flops: int  # FLOP of a request, as torch counts them: products and convolutions
    followed: tuple[fx.GraphModule, tuple[Tensor, ...]]  # graph and example, in host memory on whatever device it runs
    synchronize: Callable[[], None] = _nothing  # waits until the device that it lies on is idle
    sizes: Sizes | None = None  # allowed sizes of requests; None: all have the example's shapes
    extents: frozenset[str] = frozenset()  # names of nodes that are numbers which follow from a request's sizes alone
    guards: Callable[..., Any] | None = None  # raises for inputs of sizes that the program was not exported for
    input_names: tuple[str, ...] = ()  # on the wire; (): those of the graph
    output_names: tuple[str, ...] = ()  # on the wire; (): output_0, output_1, ...
    can_fork: bool = True  # the process that holds it may fork workers

    @property
    def allowed_cuts(self) -> list[int]:
        """Positions among the operators before which the graph may be cut."""
        return [cut for cut in range(1, len(self.operators)) if self.crossing(cut) is not None]

    def crossing(self, cut: int) -> list[fx.Node] | None:
        """Return the tensors that cross a cut, side inputs included; None if something crosses that has no rows."""
        position = {node: index for index, node in enumerate(self.operators)}
        crossing = []
        for node in self.module.graph.nodes:
            if node.op == "get_attr" or (node.op != "placeholder" and position.get(node, cut) >= cut):
                continue
            if not any(position.get(user, len(position)) >= cut for user in node.users):
                continue
            if node.name in self.row_values:
                crossing.append(node)
            elif node.name not in self.batch_values and node.name not in self.extents:
                return None
        return crossing or None

    def extents_crossing(self, cut: int) -> list[str]:
        """Return the names of the numbers that cross a cut and follow from the requests' sizes, in order."""
        position = {node: index for index, node in enumerate(self.operators)}
        return [
            node.name
            for node in self.operators[:cut]
            if node.name in self.extents and any(position.get(user, len(position)) >= cut for user in node.users)
        ]

    def timed(self, num: int, repeats: int = 3) -> list[float]:
        """Measure the seconds of each operator for ``num`` requests, the least of some runs."""
        inputs = [torch.cat([value] * num) for value in self.example]
        best: dict[fx.Node, float] = {}
        for _ in range(repeats + 1):
            timer = _Timer(self.module, self.synchronize)
            with torch.inference_mode():
                timer.run(*inputs)
            for node, seconds in timer.seconds.items():
                best[node] = min(best.get(node, seconds), seconds)
        return [best[node] for node in self.operators]


class _Timer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, synchronize: Callable[[], None]) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, float] = {}
        self._synchronize = synchronize

    def run_node(self, n: fx.Node) -> Any:
        start_s = time.perf_counter()
        value = super().run_node(n)
        self._synchronize()
        self.seconds[n] = time.perf_counter() - start_s
        return value


class _Shapes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, object] = {}
        self.rounding = 0.0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.seen[n.name] = tuple(value.shape)
            if value.is_floating_point():
                self.rounding = max(self.rounding, torch.finfo(value.dtype).eps ** 0.5)
        elif isinstance(value, int):
            self.seen[n.name] = value
        return value


def program_of(
    model: nn.Module | torch.export.ExportedProgram,
    example: tuple[Tensor, ...],
    *,
    device: Device | None = None,
    sizes: Sizes | None = None,
) -> Program:
    """Export a module, or take a program, and find where it can be cut.

    Args:
        model: in evaluation mode; takes tensors of ``[requests, ...]``, gives one such tensor or several.
        example: inputs of one request, ``[1, ...]`` each.
        device: Device of the weights; None: host memory.
        sizes: Allowed sizes of requests; None: the example's.

    Raises:
        InvalidInputError: it cannot be exported, or not for any batch size.
    """
    if isinstance(model, nn.Module):
        model = _exported(model, example)
    module, guards = _flattened(model)
    if device is None or device.torch_name == "cpu":
        return replace(_program(module, example, sizes=sizes), guards=guards)
    moved, _ = _flattened(move_to_device_pass(model, device.torch_name))
    inputs = tuple(value.to(device.torch_name) for value in example)
    made = _program(moved, inputs, device.synchronize, sizes)
    return replace(made, guards=guards, followed=(module, example))


def _program(
    module: fx.GraphModule,
    example: tuple[Tensor, ...],
    synchronize: Callable[[], None] = _nothing,
    sizes: Sizes | None = None,
) -> Program:
    skipped = ("placeholder", "get_attr", "output")
    operators = tuple(node for node in module.graph.nodes if node.op not in skipped)
    runs = [_shapes(module, example, num) for num in _PROBES]
    first, second = (run.seen for run in runs)
    rows = frozenset(
        name
        for name, shape in first.items()
        if isinstance(shape, tuple) and shape[:1] == _PROBES[:1] and second[name] == (_PROBES[1], *shape[1:])
    )
    batch = frozenset(name for name, value in first.items() if (value, second[name]) == _PROBES)
    flops = _flops(module, example)
    extents = frozenset() if sizes is None else _extents(operators, sizes)
    return Program(
        module=module,
        operators=operators,
        example=example,
        row_values=rows,
        batch_values=batch,
        rounding=runs[0].rounding,
        shapes=_tensors(first),
        flops=flops,
        followed=(module, example),
        synchronize=synchronize,
        sizes=sizes,
        extents=extents,
    )


def load_program(
    path: Path,
    example: tuple[Tensor, ...] | None = None,
    *,
    trust_code: bool = False,
    device: Device | None = None,
) -> Program:
    """Load a ``.pt2`` or ``.onnx`` file.

    Args:
        path: the file.
        example: inputs of one request; None makes them of the shapes that the file tells of (a ``.pt2``'s first row).
            Only their shape counts: all requests have it then, where the program allows several.
        trust_code: let ``torch.export.load`` read a ``.pt2``, which runs code that it holds.
        device: Device of the weights; None: host memory.

    Raises:
        InvalidInputError: the file is damaged, of another kind, or its model takes no batches; an ONNX file for another
            device than the CPU.
        MissingDependencyError: an ONNX file, and ONNX Runtime is not installed.
    """
    with naming(path):
        if path.suffix == ".pt2":
            saved = load_exported(path, trust_code=trust_code)
            args = _tensor_leaves(saved)
            if args is None and example is None:
                raise InvalidInputError(f"{path} keeps no example inputs: give {_A_SHAPE}")
            sizes = None if example is not None or args is None else dynamic_sizes(saved.program, args)
            inputs = fixed_example(path, saved.program, args, example)
            return program_of(saved.program, inputs, device=device, sizes=sizes)
        if path.suffix == ".onnx":
            if device is not None and device.torch_name != "cpu":
                raise InvalidInputError(
                    f"{path} runs in ONNX Runtime, on the CPU; export a .pt2 file for {device.name}"
                )
            return _onnx_program(read_onnx(path, None if example is None else example[0].shape[1:]))
    raise InvalidInputError(f"{path}: got {path.suffix or 'no suffix'}; a .pt2 or .onnx file is needed")


def _onnx_program(file: OnnxFile) -> Program:
    """Return a file as a program whose only operator is a session of ONNX Runtime."""
    session = OnnxSession(file.path, file.inputs.names, file.outputs, file.inputs.batch)
    program = _program(session.graph_module(), file.inputs.example)
    start_s = time.perf_counter()
    program.module(*program.example)
    return replace(
        program,
        flops=int((time.perf_counter() - start_s) * _FLOPS),
        can_fork=False,
        input_names=file.inputs.names,
        output_names=file.outputs,
    )


def _exported(model: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    inputs = tuple(torch.cat([value] * _PROBES[0]) for value in example)
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    except Exception as error:
        raise InvalidInputError(
            f"{type(model).__name__} cannot be exported for any batch size, so it cannot be sliced: "
            f"{_first_line(error)}"
        ) from error


def _tensor_leaves(saved: SavedProgram) -> tuple[Tensor, ...] | None:
    """Return the tensors within a file's example inputs in the order of its placeholders; None: it has no examples.

    Raises:
        InvalidInputError: An input is no tensor with rows, and no constant.
    """
    if saved.example_args is None:
        return None
    kwargs = reorder_kwargs(saved.example_kwargs, saved.program.call_spec.in_spec)
    specs = [spec.arg for spec in saved.program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    found = []
    for spec, value in zip(specs, tree_leaves((saved.example_args, kwargs)), strict=True):
        if isinstance(spec, ConstantArgument):
            continue
        if not isinstance(value, Tensor) or not value.ndim:
            raise InvalidInputError(
                f"input {spec.name!r} is one number: each input needs a row for each request; export it as a constant "
                "or as a tensor with one row for each request"
            )
        found.append(value)
    return tuple(found)


def _flattened(program: torch.export.ExportedProgram) -> tuple[fx.GraphModule, Callable[..., Any] | None]:
    """Return a module that takes the tensors of its inputs by position, and gives its outputs as they stand in a graph.

    Dictionaries, keywords and constants are gone, and so is the call that compares inputs with the example's
    constraints: stages have other inputs. That call is returned too, for the same tensors.

    Raises:
        InvalidInputError: The program cannot be made into a module.
    """
    try:
        module = program.module()
    except Exception as error:
        raise InvalidInputError(f"this exported program cannot be made into a module: {_first_line(error)}") from error
    assert isinstance(module, fx.GraphModule)
    graph, compare = module.graph, getattr(module, "_guards_fn", None)
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    arguments = (spec.arg for spec in program.graph_signature.input_specs)
    constants = {each.name: each.value for each in arguments if isinstance(each, ConstantArgument)}
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    for node in graph.find_nodes(op="placeholder"):
        if node.name in constants:
            graph.erase_node(node)
    graph.set_codegen(fx.graph.CodeGen())
    flat = fx.GraphModule(module, graph)  # without the module's hooks, which want what is gone
    if compare is None:
        return flat, None

    def guards(*tensors: Tensor) -> None:
        rest = iter(tensors)
        compare(*(constants[name] if name in constants else next(rest) for name in names))

    return flat, guards


def _shapes(module: fx.GraphModule, example: tuple[Tensor, ...], num: int) -> _Shapes:
    finder = _Shapes(module)
    try:
        with torch.inference_mode():
            finder.run(*(torch.cat([value] * num) for value in example))
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"the model does not run with {num} requests: {_first_line(error)}; export it with a dynamic first "
            "dimension"
        ) from error
    return finder


def _extents(operators: Sequence[fx.Node], sizes: Sizes) -> frozenset[str]:
    """Return the names of the nodes that are numbers without the batch size in them, as the exporter wrote it."""
    known = set(sizes.symbols)
    found = set()
    for node in operators:
        value = node.meta.get("val")
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            free = value.node.expr.free_symbols if isinstance(value, torch.SymInt) else set()
            if free <= known:
                found.add(node.name)
    return frozenset(found)


def _tensors(seen: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in seen.items() if isinstance(shape, tuple)}


def _flops(module: fx.GraphModule, example: tuple[Tensor, ...]) -> int:
    if any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes):
        return 0  # scans and branches are not run under a counter
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(*example)
    except Exception:  # noqa: BLE001 - a lone request may be refused; then nothing says how long the model takes
        return 0
    return int(counter.get_total_flops())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
