"""Silero's network as a module: what batches of voices cost in torch's operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlsys_batchmaker.cells.cell import cell
from mlsys_batchmaker.models.silero import BINS, CONTEXT, CONVS, SPEC, STATES, WINDOW
from mlsys_batchmaker.plan.spec import Port
from torch import Tensor, nn
from torch.nn import functional


@cell
class SileroCell(nn.Module):
    """One frame in torch's operators."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return [SPEC.frame, *STATES], [SPEC.answer, *STATES]

    def forward(self, samples: Tensor, context: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """Return the probability of speech [b], and the next states."""

        def weight(name: str) -> Tensor:
            return self.get_buffer(name.replace(".", "_"))

        heard = torch.cat([context, samples], 1)
        padded = functional.pad(heard[:, None], (0, CONTEXT), mode="reflect")
        spectrum = functional.conv1d(padded, weight("stft.forward_basis_buffer"), stride=WINDOW // 2)
        real, imaginary = spectrum[:, :BINS], spectrum[:, BINS:]
        x = torch.sqrt(real**2 + imaginary**2)
        for number, (_, _, stride) in enumerate(CONVS):
            name = f"encoder.{number}.reparam_conv"
            convolved = functional.conv1d(x, weight(f"{name}.weight"), weight(f"{name}.bias"), stride, padding=1)
            x = functional.relu(convolved)
        gates = functional.linear(x[:, :, 0], weight("decoder.rnn.weight_ih"), weight("decoder.rnn.bias_ih"))
        gates = gates + functional.linear(hidden, weight("decoder.rnn.weight_hh"), weight("decoder.rnn.bias_hh"))
        take, keep, candidate, give = gates.chunk(4, 1)
        state = keep.sigmoid() * state + take.sigmoid() * candidate.tanh()
        hidden = give.sigmoid() * state.tanh()
        speech = functional.conv1d(
            functional.relu(hidden)[:, :, None], weight("decoder.decoder.2.weight"), weight("decoder.decoder.2.bias")
        )
        return speech[:, 0, 0].sigmoid(), heard[:, -CONTEXT:], hidden, state
