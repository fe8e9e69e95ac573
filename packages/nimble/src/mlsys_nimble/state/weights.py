"""Notices that a model is no longer what its schedule was made from.

Kernels read packed copies of weights, and passes fold several into one. A write through torch raises a tensor's
version; one through ``.data``, NumPy or another process leaves no trace but the bytes. So before each replay three
things are looked at: that modules hold the same tensors, parts and numbers; that tensors lie where they lay; and, of
those that a schedule has copies of, every byte (ADR 15 has what that costs).
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
_NOT_WATCHED = frozenset(vars(nn.Module())) | {"training"}  # its dictionaries are watched by what is in them


class Watch:
    """Record of what a schedule was made from; :meth:`has_changed` compares it with the present.

    Args:
        model: Its modules' parameters, buffers, parts and plain attributes must stay the same objects.
        constants: Tensors that the schedule took from the model. They must stay where they are in memory.
        copied: Those that it has copies of. Their content must stay as it is.
        reads_content: Whether every byte is read; if not, versions are, which only writes through torch raise.
    """

    def __init__(
        self,
        model: Any,
        constants: Iterable[torch.Tensor],
        copied: Iterable[torch.Tensor],
        *,
        reads_content: bool = True,
    ) -> None:
        places = list(_places(model))
        self._gets = [place[0].get for place in places]
        self._keys = [place[1] for place in places]
        self._held = [place[2] for place in places]
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
        """Bytes that each look reads."""
        return self._digest.nbytes

    def has_changed(self) -> bool:
        """Say whether the model is another than the one that the schedule was made from."""
        for get, key, held in zip(self._gets, self._keys, self._held, strict=True):
            found = get(key)
            if found is not held and not (type(found) is type(held) and type(held) in _PLAIN and found == held):
                return True
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            return True
        if [tensor._version for tensor in self._versioned] != self._versions:
            return True
        return self._digest.read() != self._content


def _places(model: Any) -> Iterable[tuple[dict[str, Any], str, Any]]:
    """List where modules hold what decides their results: (the dictionary, the key, the value)."""
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
    packed it. What a call itself writes to is read in place, too.

    Args:
        captured: The program before the passes.
        final: The program that the executor was given; names of operators are those of the captured one.
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
