"""Cells made ready ahead of time: compiled for each supported batch size (BatchMaker, section 6).

The compiler is whatever the registry of plugins offers under a name; ``eager`` runs the module as it is, which needs no
fixed sizes and so no padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from mlsys_batchmaker.cells.cell import Cell, require_rows_apart
from mlsys_batchmaker.native.runner import PackedCell
from mlsys_batchmaker.plan.spec import CellSpec
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.loading import find_module_compiler
from mlsys_core.plugins.specs import CompilerSpec
from torch import Tensor, nn

Compiler: TypeAlias = Callable[..., Callable[..., Any]]  # (module, example_inputs) -> callable
EAGER = "eager"
AUTO = "auto"
_PREFERRED = "nimble"
_log = logging.getLogger(__name__)


class MaterialisedCell:
    """A cell ready to run on one device.

    Args:
        cell: cell to run.
        device: device to run on; the module's weights are moved there.
        compiler: makes a callable of the module and example inputs of one batch size; None runs the module itself.
        in_place: run as compiled loops over the pool's rows where the cell can; ``compiler`` is for those that cannot.
        falls_back: run the module itself where the compiler cannot take it, and log why.

    Raises:
        InvalidInputError: the compiler cannot take the cell, or one row of a batch changes another when compiled.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        device: torch.device | str = "cpu",
        compiler: Compiler | None = None,
        in_place: bool = False,
        falls_back: bool = False,
    ) -> None:
        self.spec: CellSpec = cell.spec
        self.module: nn.Module = cell.module.to(device)
        self.packed: PackedCell | None = cell.packed if in_place else None
        self._compiled: dict[int, Callable[..., Any]] = {}
        if compiler is not None and self.packed is None:
            self._compile(cell, compiler, device, falls_back)

    def _compile(self, cell: Cell, compiler: Compiler, device: torch.device | str, falls_back: bool) -> None:
        try:
            for size in cell.spec.batch_sizes:
                self._compiled[size] = compiler(self.module, cell.example(size, device=device))
            require_rows_apart(cell, lambda *inputs: self.run([value.to(device) for value in inputs]))
        except Exception as error:  # a plugin's compiler; torch raises of many kinds while it captures a graph
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not falls_back:
                raise InvalidInputError(
                    f"cell {cell.spec.name!r} cannot be compiled: {reason}; --compiler eager runs its module as it is, "
                    "auto does so for the cells that need it"
                ) from error
            self._compiled = {}
            _log.warning(
                "cell %r runs as a plain module (eager), since it cannot be compiled: %s", cell.spec.name, reason
            )

    def computed(self, size: int) -> int:
        """Return the rows computed for a batch of ``size``."""
        return self.spec.padded(size) if self._compiled else size

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run one step of a batch of at most ``max_batch_size`` rows.

        A compiled cell's batch is padded with zeros to a supported size.
        """
        if not self._compiled:
            outputs = self.module(*inputs)
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)
        size = len(inputs[0])
        padded = self.spec.padded(size)
        if padded != size:
            inputs = [_pad(values, padded) for values in inputs]
        outputs = self._compiled[padded](*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        return [values[:size].clone() for values in outputs]  # a compiled callable may use its outputs again


def find_compiler(name: str = AUTO) -> Compiler | None:
    """Find the compiler called ``name``; None for ``eager``, and for ``auto`` where Nimble offers none.

    Raises:
        InvalidInputError: there is no compiler of that name.
    """
    if name == EAGER:
        return None
    registry = installed_plugins().registry
    if name == AUTO and not any(spec.name == _PREFERRED for spec in registry.all(CompilerSpec)):
        return None
    return find_module_compiler(_PREFERRED if name == AUTO else name, registry)


def _pad(values: Tensor, size: int) -> Tensor:
    padded = values.new_zeros(size, *values.shape[1:])
    padded[: len(values)] = values
    return padded
