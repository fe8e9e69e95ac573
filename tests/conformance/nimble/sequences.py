"""Sequences: attention, recurrent layers, embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conformance.nimble.cases import Call, Case, integers, normal


class AttentionByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 0.5 + mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, width)), weights.argmax(-1)


class CausalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.norm, self.qkv, self.mlp = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.place(torch.arange(ids.shape[1]))
        q, k, v = (part.view(*ids.shape, 4, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(16, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        return (x + functional.gelu(self.mlp(x), approximate="tanh")) @ self.table.weight.t()


class Windows(nn.Module):
    """Shifted windows, as Swin has them."""

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        x = torch.roll(x, (-2, -1), (1, 2)).view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        return torch.roll(x.reshape(-1, 16, c).softmax(1).reshape(n, h, w, c), (2, 1), (1, 2))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class CellByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 6)
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        return h


SEQUENCES = [
    Case(
        "multi-layer perceptron",
        lambda: nn.Sequential(
            nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.PReLU(16), nn.Linear(16, 3), nn.Softmax(-1)
        ),
        normal((4, 6)),
    ),
    Case(
        "bilinear and einsum",
        lambda: Call(lambda self, x, y: torch.einsum("nd,nd->n", self.layer(x, y), y), layer=nn.Bilinear(4, 5, 5)),
        normal((3, 4), (3, 5)),
    ),
    Case(
        "transformer encoder",
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
        normal((2, 5, 16)),
    ),
    Case(
        "transformer decoder",
        lambda: nn.TransformerDecoderLayer(16, 4, 32, norm_first=True),
        normal((5, 2, 16), (7, 2, 16)),
    ),
    Case("attention by hand", AttentionByHand, normal((2, 6, 16), (2, 1, 1, 6))),
    Case("causal language model", CausalBlock, integers(20, (2, 8))),
    Case(
        "multi-head attention",
        lambda: Call(lambda self, x: self.layer(x, x, x), layer=nn.MultiheadAttention(8, 2)),
        normal((5, 2, 8)),
    ),
    Case("shifted windows", Windows, normal((1, 8, 8, 6))),
    Case("rms norm", lambda: nn.RMSNorm(8), normal((3, 8))),
    Case("gru", lambda: Recurrent(nn.GRU(5, 7, 2, batch_first=True)), normal((2, 6, 5))),
    Case("gru, both directions", lambda: Recurrent(nn.GRU(5, 4, bidirectional=True)), normal((4, 2, 5))),
    Case("lstm", lambda: Recurrent(nn.LSTM(5, 7, 2)), normal((6, 2, 5))),
    Case(
        "lstm, both directions, no bias",
        lambda: Recurrent(nn.LSTM(5, 4, bias=False, bidirectional=True)),
        normal((4, 3, 5)),
    ),
    Case("lstm, projected", lambda: Recurrent(nn.LSTM(5, 6, proj_size=3)), normal((4, 3, 5))),
    Case("lstm, unbatched", lambda: Recurrent(nn.LSTM(5, 6)), normal((4, 5))),
    Case("simple recurrent", lambda: Recurrent(nn.RNN(5, 6, 2, nonlinearity="relu")), normal((4, 3, 5))),
    Case("gru, long", lambda: Recurrent(nn.GRU(2, 2)), normal((300, 1, 2))),
    Case("cell by hand", CellByHand, normal((2, 5, 6))),
    Case(
        "embedding bag of words",
        lambda: Call(lambda self, ids: self.table(ids).mean(1), table=nn.Embedding(30, 8, padding_idx=0)),
        integers(30, (3, 7)),
    ),
    Case(
        "dropout in eval",
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9), nn.AlphaDropout(0.9), nn.Linear(8, 2)),
        normal((3, 4)),
    ),
]
