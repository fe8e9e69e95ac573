"""Models in a few lines: cells from functions, and how a request unfolds as one function more.

The full form is a module under ``@cell`` and an :class:`~mlsys_batchmaker.models.model.Architecture`; what is made here
is both, with ports read off a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import nn

from mlsys_batchmaker.cells.cell import Cell, dtype_name, make_cell, random_rows
from mlsys_batchmaker.models.model import Model, Payload, Tensor
from mlsys_batchmaker.plan import CellGraph, Layout, Port, Wire
from mlsys_batchmaker.scheduling.requests import Values

Row = int | range | Port  # numbers in a row of fp32; range(n): one whole number below n; or a port
Unfold = Callable[[Payload, CellGraph], int | Wire | None]


class _OwnCell(nn.Module):
    """A function and its weights as a module with ports."""

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module], inputs: Sequence[Port]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._function, self._inputs = function, inputs
        self._outputs: list[Port] = []

    def read_outputs(self, names: Sequence[str], cell: str) -> None:
        """Run two rows, and name the outputs that come.

        Raises:
            InvalidInputError: The function does not run, or gives another number of outputs.
        """
        rng = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                found = self.eval()(*(random_rows(port, 2, rng) for port in self._inputs))
        except Exception as error:
            raise InvalidInputError(f"cell {cell!r} does not run on rows of its inputs: {error}") from error
        outputs = tuple(found) if isinstance(found, tuple | list) else (found,)
        if not all(isinstance(value, torch.Tensor) for value in outputs):
            kinds = ", ".join(type(value).__name__ for value in outputs)
            raise InvalidInputError(f"cell {cell!r} gives {kinds}: it must give a tensor, or a tuple of tensors")
        if len(outputs) != len(names):
            raise InvalidInputError(f"cell {cell!r} gives {len(outputs)} outputs, and {len(names)} are named")
        self._outputs = [
            Port(name, dtype_name(value.dtype), tuple(value.shape[1:]))
            for name, value in zip(names, outputs, strict=True)
        ]

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return self._inputs, self._outputs

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the function with this module, then the inputs."""
        return self._function(self, *inputs)


def own_cell(
    name: str,
    function: Callable[..., Any],
    inputs: Mapping[str, Row],
    outputs: str,
    *,
    options: Mapping[str, Any] | None = None,
    **modules: nn.Module,
) -> Cell:
    """Make a cell of a function.

    Args:
        name: Unique in its model.
        function: ``(weights, *inputs) -> tensor or tuple``; inputs and outputs are [b, ...], rows independent of each
            other. ``weights`` has the modules as attributes.
        inputs: By name, in the order of the function's arguments: the numbers of an fp32 row, ``range(n)`` for one
            whole number below n, or a port.
        outputs: Names of the outputs, with spaces between. A request gets all of them of a node that it asks for.
        options: As :func:`~mlsys_batchmaker.cells.cell.make_cell` has them, such as ``priority``.
        modules: With the weights, by name.

    Raises:
        InvalidInputError: The function does not run, gives other outputs, or mixes rows.

    Example:
        >>> adder = own_cell("adder", lambda _, x, total: total + x, {"x": 1, "total": 1}, "total")
        >>> adder.spec.outputs
        (Port(name='total', dtype='float32', shape=(1,), high=None),)
    """
    names = outputs.split()
    module = _OwnCell(function, modules, [_port(each, row) for each, row in inputs.items()])
    module.read_outputs(names, name)
    return make_cell(name, module, **({"results": names} | dict(options or {})))


def own_model(
    name: str,
    cells: Sequence[Cell],
    unfold: Unfold,
    example: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    max_cells: int = 4096,
) -> Model:
    """Make a model of cells and of a function that unfolds requests.

    Args:
        name: Name of the model.
        cells: Its cells.
        unfold: ``(request, graph) -> node``: adds the request's cells; the node's results are the answer. None: what it
            asked for with ``graph.result``, stacked.
        example: A small request: arrays by name. Others may have other sizes, not other dtypes or dimensions.
        outputs: Names of what a node gives, in the order of its cell's outputs; fewer names leave out the last ones.
        max_cells: Most cells of a request; larger ones are refused.

    Raises:
        InvalidInputError: The example does not unfold, or a cell mixes rows.

    Example:
        >>> adder = own_cell("adder", lambda _, x, total: total + x, {"x": 1, "total": 1}, "total")
        >>> def unfold(request, graph):
        ...     x = request["x"]
        ...     return graph.chain("adder", len(x), each={"x": x}, carry={"total": "total"}).last("total")
        >>> model = own_model("sum", [adder], unfold, {"x": np.ones((3, 1), "f4")}, ["total"])
        >>> model.unfold({"x": np.ones((5, 1), "f4")}).plan.num_nodes
        5
    """
    return Model(name, cells, _OwnArchitecture(name, unfold, example, outputs, cells), max_cells=max_cells)


class _OwnArchitecture:
    """Functions as an :class:`~mlsys_batchmaker.models.model.Architecture`."""

    def __init__(
        self, name: str, unfold: Unfold, example: Mapping[str, Any], outputs: Sequence[str], cells: Sequence[Cell]
    ) -> None:
        self.name = name
        self._unfold = unfold
        self._example = {key: np.asarray(value) for key, value in example.items()}
        self._names = tuple(outputs)
        self._is_stacked = False
        self.inputs = tuple(
            Tensor(key, array.dtype.name, (-1, *array.shape[1:]) if array.ndim else ())
            for key, array in self._example.items()
        )
        self.outputs: tuple[Tensor, ...] = ()
        layout = Layout([each.spec for each in cells])
        graph = CellGraph(layout)
        try:
            node = unfold(self._example, graph)
            self._is_stacked = node is None
            if node is not None:
                graph.result(node)
        except InvalidInputError as error:
            raise InvalidInputError(f"model {name!r}: its own example request does not unfold: {error}") from error
        spec = layout.cells[graph.cell_of_result()]
        ports = [spec.outputs[index] for index in spec.results]
        if len(self._names) > len(ports):
            raise InvalidInputError(f"cell {spec.name!r} gives {len(ports)} results, and {len(self._names)} are named")
        first = (-1,) if self._is_stacked else ()
        self.outputs = tuple(
            Tensor(key, port.dtype, (*first, *port.shape)) for key, port in zip(self._names, ports, strict=False)
        )

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Call the function, and ask for the node that it returns."""
        self._check(request)
        node = self._unfold(request, graph)
        if (node is None) != self._is_stacked:
            raise InvalidInputError("unfold returns a node for some requests and None for others: choose one")
        if node is not None:
            graph.result(node)

    def _check(self, request: Payload) -> None:
        """Refuse a request whose arrays are not those of the example, but for their sizes."""
        if request.keys() != self._example.keys():
            raise InvalidInputError(f"a request has {sorted(self._example)}, got {sorted(request)}")
        for name, example in self._example.items():
            try:
                array = np.asarray(request[name])
            except ValueError as error:
                raise InvalidInputError(f"{name}: its rows have different lengths ({error})") from error
            if array.ndim != example.ndim or (array.size and array.dtype.kind not in "biuf"):
                raise InvalidInputError(
                    f"{name}: numbers in {example.ndim} dimensions are needed, got {array.dtype} in {array.ndim}"
                )

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the last node's results by name, or all nodes' stacked."""
        count = len(self._names)
        if not self._is_stacked:
            return dict(zip(self._names, map(np.asarray, values[-1][:count]), strict=True))
        return {key: np.stack([np.asarray(value[index]) for value in values]) for index, key in enumerate(self._names)}

    def example(self) -> Payload:
        """Return the example."""
        return self._example

    def config(self) -> Mapping[str, Any]:
        """Refuse to be written: a function is no data.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            f"model {self.name!r} unfolds by a function, which a directory cannot hold: serve it by Service, or "
            "write an architecture class"
        )


def _port(name: str, row: Row) -> Port:
    if isinstance(row, Port):
        return row
    if isinstance(row, range):
        if row.start or row.step != 1:
            raise InvalidInputError(f"input {name!r} is {row}: numbers are counted from 0, as range({row.stop})")
        return Port(name, "int64", high=row.stop)
    if not isinstance(row, int):
        raise InvalidInputError(f"input {name!r} is {row!r}: give the numbers of its row, range(n), or a Port")
    return Port(name, "float32", (row,))
