"""resemblyzer: a speaker's embedding from mel spectrogram frames, with the package's weights; three LSTM layers.

The cell is one step through all three layers. The head (a linear layer, ReLU, and the norm) is a cell of its own, so
it is batched over requests too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import nn

from mlsys_batchmaker.cells.cell import cell, make_cell
from mlsys_batchmaker.cells.lstm import LSTMCell, StackedLSTMCell
from mlsys_batchmaker.models.model import Model, Payload, Tensor, sequence
from mlsys_batchmaker.plan import CellGraph, Port
from mlsys_batchmaker.plan.spec import DEFAULT_BATCH_SIZES
from mlsys_batchmaker.scheduling.requests import Values

NUM_MELS, HIDDEN, EMBEDDING, NUM_LAYERS = 40, 256, 256, 3


@cell
class EmbeddingHead(nn.Module):
    """The top layer's last hidden state to an embedding of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, EMBEDDING)

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return [Port("h", "float32", (HIDDEN,))], [Port("embedding", "float32", (EMBEDDING,))]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the embedding [b, 256], of length 1, from hidden [b, 256]."""
        raw = torch.relu(self.linear(hidden))
        unit: torch.Tensor = raw / torch.norm(raw, dim=1, keepdim=True)
        return unit


class SpeakerEncoder:
    """mels [frames, 40] -> embedding [256]."""

    name = "resemblyzer"
    inputs: tuple[Tensor, ...] = (Tensor("mels", "float32", (-1, NUM_MELS)),)
    outputs: tuple[Tensor, ...] = (Tensor("embedding", "float32", (EMBEDDING,)),)

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add a chain over the frames, then the head."""
        mels = sequence(request, "mels")
        states = [f"{kind}{layer}" for layer in range(NUM_LAYERS) for kind in "hc"]
        frames = graph.chain("frame", len(mels), each={"x": mels}, carry={name: name for name in states})
        graph.result(graph.add("head", {"h": frames.last(f"h{NUM_LAYERS - 1}")}))

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the embedding."""
        return {"embedding": np.asarray(values[0][0])}

    def example(self) -> Payload:
        """Return a request of two silent frames."""
        return {"mels": np.zeros((2, NUM_MELS), dtype=np.float32)}

    def config(self) -> Mapping[str, Any]:
        """See :class:`mlsys_batchmaker.models.model.Architecture`."""
        return {}


def speaker_model(
    checkpoint: Path, *, batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES, name: str = "resemblyzer"
) -> Model:
    """Load the model with the weights of ``pretrained.pt``.

    Raises:
        InvalidInputError: the file has other tensors.
    """
    frame = StackedLSTMCell(NUM_MELS, HIDDEN, NUM_LAYERS)
    head = EmbeddingHead()
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)["model_state"]
        for number, layer in enumerate(frame.layers):
            assert isinstance(layer, LSTMCell)
            bias = state[f"lstm.bias_ih_l{number}"] + state[f"lstm.bias_hh_l{number}"]
            layer.load(state[f"lstm.weight_ih_l{number}"], state[f"lstm.weight_hh_l{number}"], bias)
        head.linear.load_state_dict({"weight": state["linear.weight"], "bias": state["linear.bias"]})
    except Exception as error:  # torch raises of many kinds where a file is damaged, or holds other than tensors
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InvalidInputError(f"{checkpoint} is not resemblyzer's pretrained.pt: {reason}") from error
    cells = [
        make_cell("frame", frame, batch_sizes=batch_sizes),
        make_cell("head", head, priority=1, batch_sizes=batch_sizes),
    ]
    return Model(name, cells, SpeakerEncoder())
