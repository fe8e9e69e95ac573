"""Transformer encoders in BERT's form (Devlin et al. 2018): BERT-base, and the shape of all-MiniLM-L6-v2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlsys_nimble.nets.blocks import Net

_VOCABULARY, _POSITIONS, _EPS = 30522, 512, 1e-12
_NUM_TOKENS = 128


class Layer(nn.Module):
    """Self-attention and two linears, each added to its input and normalised after."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.norm = nn.LayerNorm(width, eps=_EPS), nn.LayerNorm(width, eps=_EPS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map ``x [N, T, width]`` and ``mask [N, 1, 1, T]`` (added to the scores) to ``[N, T, width]``."""
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.attention_norm(x + self.mixed(attended.transpose(1, 2).flatten(2)))
        result: Tensor = self.norm(x + self.narrow(functional.gelu(self.wide(x))))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        batch, num_tokens, width = x.shape
        return x.view(batch, num_tokens, self.num_heads, width // self.num_heads).transpose(1, 2)


class Encoder(nn.Module):
    """Embeddings, layers, and the first token's pooler."""

    def __init__(self, width: int, num_layers: int, num_heads: int):
        super().__init__()
        self.words, self.positions = nn.Embedding(_VOCABULARY, width), nn.Embedding(_POSITIONS, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, token_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Map int64 ids and mask ``[N, T]`` to token states ``[N, T, width]`` and the pooled first ``[N, width]``."""
        num_tokens = token_ids.shape[1]
        x = self.words(token_ids) + self.positions.weight[:num_tokens] + self.segments.weight[0]
        x = self.norm(x)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


def _encoder(batch: int, width: int, num_layers: int, num_heads: int) -> Net:
    token_ids = torch.randint(0, _VOCABULARY, (batch, _NUM_TOKENS))
    return Net(Encoder(width, num_layers, num_heads), (token_ids, torch.ones_like(token_ids)))


def bert_base(batch: int = 1) -> Net:
    """Build BERT-base with 128 tokens."""
    return _encoder(batch, width=768, num_layers=12, num_heads=12)


def minilm_l6(batch: int = 1) -> Net:
    """Build the shape of all-MiniLM-L6-v2 with 128 tokens."""
    return _encoder(batch, width=384, num_layers=6, num_heads=12)
