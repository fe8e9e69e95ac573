"""Detection of changes to a model after its schedule was made.

Kernels read packed copies of weights, and passes fold several into one. A write through torch raises a tensor's
version; one through ``.data``, NumPy or another process changes only the bytes. So each replay first checks that
modules hold the same tensors, submodules and numbers, that tensors have the same addresses, and that tensors which the
schedule copied have the same bytes (ADR 15 gives the cost).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.state.digest import Digest
from torch import nn

_WATCHED = (torch.Tensor, nn.Module, bool, int, float, complex, str, type(None))
_PLAIN = frozenset({bool, int, float, complex, str})
_NOT_WATCHED = frozenset(vars(nn.Module())) | {"training"}  # the entries of its dictionaries are watched instead


class Watch:
    """Record of the model that a schedule was made from; :meth:`has_changed` compares it with the present one.

    Args:
        model: Model whose parameters, buffers, submodules and plain attributes must stay the same objects.
        constants: Tensors that the schedule took from the model. Their addresses must stay the same.
        copied: Tensors that the schedule copied. Their content must stay the same.
        reads_content: True compares every byte; False compares versions, which only writes through torch raise.
    """

    def __init__(
        self,
        model: Any,
        constants: Iterable[torch.Tensor],
        copied: Iterable[torch.Tensor],
        *,
        reads_content: bool = True,
    ) -> None:
        attributes = list(_watched_attributes(model))
        self._gets = [attribute[0].get for attribute in attributes]
        self._keys = [attribute[1] for attribute in attributes]
        self._held = [attribute[2] for attribute in attributes]
        self._tensors = list({id(tensor): tensor for tensor in constants}.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        copied = list(copied)
        on_host = [tensor for tensor in copied if tensor.device.type == "cpu"] if reads_content else []
        self._digest = Digest(on_host)
        self._content = self._digest.read()
        seen = {id(tensor) for tensor in on_host}
        self._versioned = [tensor for tensor in copied if id(tensor) not in seen and not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._versioned]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that each check reads."""
        return self._digest.nbytes

    def has_changed(self) -> bool:
        """Return whether the model has changed since the schedule was made."""
        for get, key, held in zip(self._gets, self._keys, self._held, strict=True):
            found = get(key)
            if found is not held and not (type(found) is type(held) and type(held) in _PLAIN and found == held):
                return True
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            return True
        if [tensor._version for tensor in self._versioned] != self._versions:
            return True
        return self._digest.read() != self._content


def _watched_attributes(model: Any) -> Iterable[tuple[dict[str, Any], str, Any]]:
    """Yield the attributes that decide modules' results: (the dictionary, the key, the value)."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for held in (module._parameters, module._buffers, module._modules):
            yield from ((held, key, value) for key, value in held.items())
        own = vars(module)
        yield from (
            (own, key, value) for key, value in own.items() if key not in _NOT_WATCHED and isinstance(value, _WATCHED)
        )


def copied_constants(captured: Program, final: Program, copies: Collection[ValueId]) -> list[torch.Tensor]:
    """Return the constants whose bytes a schedule has copied: those that a pass folded, and those that kernels packed.

    A constant is read in place if each operator that read it when the model was captured still does, and no kernel has
    packed it. Constants that a call writes to are read in place, too.

    Args:
        captured: Program before the passes.
        final: Program of the executor; its operators have the names of the captured ones.
        copies: Constants of the final program that the executor has copied.
    """
    readers = {
        (operator.name, id(final.constants[value]))
        for operator in final.operators
        for value in operator.inputs
        if value in final.constants and value not in copies
    }
    written = {old for old, _ in captured.mutations}
    in_place = set(captured.constants) - written
    for operator in captured.operators:
        for value in operator.inputs:
            if value in in_place and (operator.name, id(captured.constants[value])) not in readers:
                in_place.discard(value)
    return [tensor for value, tensor in captured.constants.items() if value not in in_place | written]
