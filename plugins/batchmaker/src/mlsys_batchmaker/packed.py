"""An LSTM's weights in oneDNN's own order, for the CPU: small batches multiply up to twice as fast as with ``addmm``.

oneDNN packs a weight for each call otherwise; here it is packed once. The operators are those that torch's compiler
uses; where torch has none of them (another build, another dtype) :func:`pack` says so and plain torch runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PackedLSTM:
    """Weights of one LSTM layer, packed.

    Args:
        weight: [input + h, 4h] float32, on the CPU.
        bias: [4h].
        input_size: rows of ``weight`` that are of the inputs.
    """

    def __init__(self, weight: Tensor, bias: Tensor, input_size: int) -> None:
        ops: Any = torch.ops.mkldnn
        with torch.no_grad():
            by_output = weight.detach().t().contiguous()
            self._inputs = ops._reorder_linear_weight(by_output[:, :input_size].contiguous(), None)
            self._hidden = ops._reorder_linear_weight(by_output[:, input_size:].contiguous(), None)
        self._bias = bias.detach()
        self._linear = ops._linear_pointwise

    def from_inputs(self, inputs: Tensor) -> Tensor:
        """The inputs' part of the gates, with the bias: [n, input] -> [n, 4h]."""
        gates: Tensor = self._linear(inputs, self._inputs, self._bias, "none", [], "")
        return gates

    def gates(self, from_inputs: Tensor, hidden: Tensor) -> Tensor:
        """All gates' sums [b, 4h]."""
        gates: Tensor = self._linear.binary(hidden, from_inputs, self._hidden, None, "add")
        return gates


def pack(weight: Tensor, bias: Tensor, input_size: int) -> PackedLSTM | None:
    """The packed weights; None where this torch, device or dtype has no such operators."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_onednn():
        return None
    try:
        packed = PackedLSTM(weight, bias, input_size)
        with torch.inference_mode():
            packed.gates(packed.from_inputs(torch.zeros(1, input_size)), torch.zeros(1, weight.shape[1] // 4))
    except (AttributeError, RuntimeError):
        return None
    return packed


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
