"""Pointers to the caller's tensors, set at each call, by which a replay finds its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from ctypes import addressof, c_void_p

import torch
from mlsys_nimble.ir.program import Program, ValueId, ValueType
from torch import Tensor


class Slots:
    """Table of one pointer for each input and each copied output.

    Args:
        program: Program after the layout; each output is an input, a constant, or a copy made for the caller.
    """

    def __init__(self, program: Program) -> None:
        self.inputs = {value: number for number, value in enumerate(program.inputs)}
        self._results = [  # each with a template: empty_like is three times as fast as empty
            (value, torch.empty(program.values[value].shape, dtype=getattr(torch, program.values[value].dtype)))
            for value in dict.fromkeys(program.outputs)
            if value not in self.inputs and value not in program.constants
        ]
        self.makes_all = [value for value, _ in self._results] == list(program.outputs)  # in this order, each once
        self.input_types = [program.values[value] for value in program.inputs]
        owners = [*program.inputs, *(value for value, _ in self._results)]
        self._pointers = (c_void_p * max(len(owners), 1))()
        base = addressof(self._pointers)
        self.addresses = {value: base + 8 * number for number, value in enumerate(owners)}

    def resized(self, values: Sequence[ValueType]) -> Slots:
        """Return the same table for results of other sizes, by ValueId."""
        made = copy(self)
        made._results = [(value, like.new_empty(values[value].shape)) for value, like in self._results]
        return made

    def bind(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Point at a call's inputs; return the tensors that must be kept alive until it is over."""
        pointers = self._pointers
        kept: list[Tensor] = []
        for tensor in inputs:
            if tensor.is_conj() or tensor.is_neg():  # views that torch reads with another sign
                tensor = tensor.resolve_conj().resolve_neg()
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            pointers[len(kept)] = tensor.data_ptr()
            kept.append(tensor)
        return kept

    def results(self) -> dict[ValueId, Tensor]:
        """Allocate a call's outputs, and point at them."""
        made: dict[ValueId, Tensor] = {}
        for number, (value, like) in enumerate(self._results, len(self.inputs)):
            made[value] = tensor = torch.empty_like(like)
            self._pointers[number] = tensor.data_ptr()
        return made
