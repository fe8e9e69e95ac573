"""The parts that encoders are made of: layers whose rows see the whole of their own text, before and after them.

A flattened forward as a decoder's (:mod:`mlsys_orca.model.blocks`): the tokens of all texts stand as rows of one
matrix, without padding, for every operator but attention. Keys and values live no longer than their layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.blocks import PreNormLayer
from mlsys_orca.model.decoder import AttentionSpan
from mlsys_orca.model.layers import Embedding
from torch import Tensor, nn


def spans_of(lengths: Iterable[int]) -> list[AttentionSpan]:
    """Return the spans of texts that stand one after the other, each over its own rows.

    Example:
        >>> [(span.start, span.stop, span.slots) for span in spans_of([2, 3])]
        [(0, 2, slice(0, 2, None)), (2, 5, slice(2, 5, None))]
    """
    spans, start = [], 0
    for length in lengths:
        spans.append(AttentionSpan(start, start + length, length, slice(start, start + length)))
        start += length
    return spans


class RowAttention(nn.Module):
    """Attention of rows to the rows of their own text.

    Args:
        qkv: hidden_size -> 3 * num_heads * head_dim: queries, keys, values, head after head.
        output: num_heads * head_dim -> hidden_size.
        num_heads: Heads of queries, keys and values each.
        options: Not causal.
    """

    def __init__(self, *, qkv: nn.Module, output: nn.Module, num_heads: int, options: AttentionOptions) -> None:
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads
        self.options = options

    def forward(self, x: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """Attend within each text: ``x`` [num_tokens, hidden_size] -> same shape."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        out: Tensor = self.output(ragged_attention(query, key, value, spans, self.options))
        return out


class PairHead(nn.Module):
    """A first token's state to the logit of how well the two texts behind it fit.

    Args:
        pool: hidden_size -> hidden_size.
        score: hidden_size -> 1.
        activation: Between them: a name of torch's.
        dtype: Dtype of the products' input.
    """

    def __init__(self, pool: nn.Module, score: nn.Module, *, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.pool = pool
        self.score = score
        self.activation = getattr(torch, activation)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Score each text: ``x`` [num_texts, hidden_size] -> fp32 [num_texts]."""
        out: Tensor = self.score(self.activation(self.pool(x.to(self.dtype)))).float().squeeze(-1)
        return out


class Encoder(nn.Module):
    """Embedding, layers, and a norm at either end.

    Args:
        embedding: (token ids, positions) -> fp32 [num_tokens, hidden_size].
        layers: Each (states, spans) -> states.
        first_norm: Norm of the embeddings; None: they enter the first layer as it is.
        last_norm: Norm of the last layer's output; None: that output is the result.
        head: For whoever scores pairs; no part of the forward.
    """

    def __init__(
        self,
        *,
        embedding: Embedding,
        layers: Iterable[PreNormLayer],
        first_norm: nn.Module | None = None,
        last_norm: nn.Module | None = None,
        head: PairHead | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.embedding = embedding
        self.first_norm = first_norm or nn.Identity()
        self.layers = nn.ModuleList(layers)
        self.last_norm = last_norm or nn.Identity()

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.embedding.table.device

    def forward(self, token_ids: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """Return the states of all tokens.

        Args:
            token_ids: [num_tokens] int64, text after text.
            positions: [num_tokens] int64, of each token in its text.
            spans: Spans that :func:`spans_of` gives for the texts' lengths.

        Returns:
            [num_tokens, hidden_size].
        """
        x: Tensor = self.first_norm(self.embedding(token_ids, positions))
        for layer in self.layers:
            x = layer(x, spans)
        out: Tensor = self.last_norm(x)
        return out
