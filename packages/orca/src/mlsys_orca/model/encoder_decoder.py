"""Encoder-decoders over the flattened batch: one request's tokens are its encoder's, then its decoder's.

A request's first iteration has all tokens that its encoder reads and the first that its decoder begins with. The
encoder's rows pass the encoder, whose states give each decoder layer the keys and values of its cross-attention. They
go to the slots of the encoder's tokens, where no other key or value ever is: the decoder keeps those of its own rows
in the slots after them. So an encoder-decoder needs no second cache, and nothing but the order of its tokens is
different for whoever plans its blocks. To compute a request anew is its first iteration again, with more rows.

The paper serves such models too (ORCA, section 3.2); its attention keys and values are managed as a decoder's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.blocks import Decoder, PreNormLayer
from mlsys_orca.model.decoder import AttentionSpan, ForwardInputs
from mlsys_orca.model.embedding import Embedding
from mlsys_orca.model.kv_cache import KVCache, slots_of
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
        options: Not causal, unless rows see a cache (:class:`SelfAttention`).
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


class Encoder(nn.Module):
    """Embedding, layers, and a norm behind the last one.

    Args:
        embedding: (token ids, positions) -> fp32 [num_tokens, hidden_size].
        layers: Each (states, spans) -> states.
        last_norm: Norm of the last layer's output.
    """

    def __init__(self, *, embedding: Embedding, layers: Iterable[PreNormLayer], last_norm: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.last_norm = last_norm

    def forward(self, token_ids: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """Return the states of all tokens.

        Args:
            token_ids: [num_tokens] int64, text after text.
            positions: [num_tokens] int64, of each token in its text.
            spans: Spans that :func:`spans_of` gives for the texts' lengths.

        Returns:
            [num_tokens, hidden_size].
        """
        x: Tensor = self.embedding(token_ids, positions)
        for layer in self.layers:
            x = layer(x, spans)
        out: Tensor = self.last_norm(x)
        return out


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """Inputs of every decoder layer of one iteration beside the states. Owner: the model, for this iteration."""

    own_slots: Tensor  # [num_decoder_rows] int64
    own_spans: list[AttentionSpan]
    cross_slots: Tensor  # [num_encoder_rows] int64
    cross_spans: list[AttentionSpan]
    encoded: Tensor | None  # [num_encoder_rows, hidden_size] of the requests that begin; None: there are none
    kv_cache: KVCache


@dataclass(frozen=True, slots=True)
class Sides:
    """Rows of an iteration that pass the encoder, and those that pass the decoder. Owner: the model, for it."""

    encoder_rows: list[int]  # of the flattened batch: the first tokens of the requests that begin
    encoder_lengths: list[int]  # of each of those requests, in order
    encoder_slots: list[int]  # [len(encoder_rows)] where cross-attention finds their keys and values
    decoder_rows: list[int]  # all others
    decoder_slots: list[int]  # [len(decoder_rows)]
    decoder_positions: list[int]  # [len(decoder_rows)] counted from the decoder's first token
    own_spans: list[AttentionSpan]  # of all requests, over the decoder's rows: what they see of themselves
    cross_spans: list[AttentionSpan]  # the same rows, and what they see of the encoder
    sampled: list[int]  # of the decoder's rows, those whose logits are wanted

    def step(self, encoded: Tensor | None, kv_cache: KVCache, device: torch.device) -> DecoderStep:
        """Return the inputs of the decoder's layers, with the states ``encoded`` of the requests that begin."""
        own, cross = (
            torch.tensor(slots, dtype=torch.int64, device=device) for slots in (self.decoder_slots, self.encoder_slots)
        )
        return DecoderStep(own, self.own_spans, cross, self.cross_spans, encoded, kv_cache)


def split(inputs: ForwardInputs) -> Sides:
    """Take an iteration apart.

    Raises:
        InvalidInputError: a request has no tokens for an encoder, or logits are wanted of one of those.
        MemoryPlanError: a request's block table is too short for its tokens.
    """

    def where(slots: range | list[int]) -> slice | Tensor:
        return slice(slots.start, slots.stop) if isinstance(slots, range) else torch.tensor(slots, device=inputs.device)

    sides = Sides([], [], [], [], [], [], [], [], [])
    for request in inputs.batch.requests:
        num_encoder, stop = request.num_encoder_tokens, request.context_len
        if not num_encoder:
            raise InvalidInputError(f"request {request.request_id!r} has no tokens for this model's encoder")
        cross = slots_of(request.block_table, 0, num_encoder, block_size=inputs.block_size)
        own = slots_of(request.block_table, num_encoder, stop, block_size=inputs.block_size)
        start = request.start
        if not request.num_computed_tokens:
            start += num_encoder
            sides.encoder_rows.extend(range(request.start, start))
            sides.encoder_lengths.append(num_encoder)
            sides.encoder_slots.extend(cross)
        first, num_rows = len(sides.decoder_rows), request.stop - start
        sides.decoder_rows.extend(range(start, request.stop))
        sides.decoder_slots.extend(own[-num_rows:])
        sides.decoder_positions.extend(range(stop - num_encoder - num_rows, stop - num_encoder))
        sides.own_spans.append(AttentionSpan(first, first + num_rows, stop - num_encoder, where(own)))
        sides.cross_spans.append(AttentionSpan(first, first + num_rows, num_encoder, where(cross)))
    number = {row: index for index, row in enumerate(sides.decoder_rows)}
    if not number.keys() >= set(inputs.wanted):
        raise InvalidInputError("logits are wanted of tokens that an encoder reads; it has none")
    sides.sampled.extend(number[row] for row in inputs.wanted)
    return sides


class SelfAttention(RowAttention):
    """The decoder's attention to its own tokens, layer ``index``; ``options`` are causal."""

    def __init__(self, index: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.index = index

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:  # type: ignore[override]  # of another kind of layer
        """Attend with ``x`` [num_decoder_rows, hidden_size] -> same shape; write its keys and values."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        keys, values = step.kv_cache.write(self.index, step.own_slots, key, value)
        out: Tensor = self.output(ragged_attention(query, keys, values, step.own_spans, self.options))
        return out


class CrossAttention(nn.Module):
    """The decoder's attention to what the encoder made of its tokens.

    Args:
        index: The layer's number.
        query: hidden_size -> num_heads * head_dim.
        key_value: hidden_size -> 2 * num_heads * head_dim, of the encoder's states: keys, values, head after head.
        output: num_heads * head_dim -> hidden_size.
        num_heads: Heads of queries, keys and values each.
        options: Not causal.
    """

    def __init__(
        self,
        index: int,
        *,
        query: nn.Module,
        key_value: nn.Module,
        output: nn.Module,
        num_heads: int,
        options: AttentionOptions,
    ) -> None:
        super().__init__()
        self.index = index
        self.query = query
        self.key_value = key_value
        self.output = output
        self.num_heads = num_heads
        self.options = options

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Attend to the encoder: ``x`` [num_decoder_rows, hidden_size] -> same shape.

        Writes the keys and values of the requests that begin.
        """
        if step.encoded is None:
            keys, values = step.kv_cache.of_layer(self.index)
        else:
            key, value = self.key_value(step.encoded).unflatten(-1, (2, self.num_heads, -1)).unbind(1)
            keys, values = step.kv_cache.write(self.index, step.cross_slots, key, value)
        query = self.query(x).unflatten(-1, (self.num_heads, -1))
        out: Tensor = self.output(ragged_attention(query, keys, values, step.cross_spans, self.options))
        return out


class CrossLayer(PreNormLayer):
    """A decoder layer of three branches; each reads the normalised state and is added to it."""

    def __init__(self, *, cross_norm: nn.Module, cross_attention: CrossAttention, **parts: nn.Module) -> None:
        super().__init__(**parts)
        self.cross_norm = cross_norm
        self.cross_attention = cross_attention

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Run the layer on ``x`` [num_decoder_rows, hidden_size] fp32 -> same shape and dtype."""
        x = x + self.attention(self.attention_norm(x), step)
        x = x + self.cross_attention(self.cross_norm(x), step)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder whose layers see its states.

    It is a :class:`~mlsys_orca.model.decoder.DecoderModel`: to whoever plans and runs iterations it is a decoder,
    whose requests say how many of their first tokens the encoder reads.

    Args:
        encoder: Its states are of the decoder's dtype.
        decoder: Its layers take a :class:`DecoderStep`; its configuration's ``encoder`` is not None.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.config = decoder.config
        self.dtype = decoder.dtype
        self.device = decoder.device
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size].

        Raises:
            InvalidInputError: as :func:`split`.
            MemoryPlanError: as :func:`split`.
        """
        sides = split(inputs)
        encoded = None
        if sides.encoder_rows:
            rows = self._tensor(sides.encoder_rows)
            encoded = self.encoder(inputs.token_ids[rows], inputs.positions[rows], spans_of(sides.encoder_lengths))
        step = sides.step(encoded, kv_cache, self.device)
        token_ids = inputs.token_ids[self._tensor(sides.decoder_rows)]
        return self.decoder.run(token_ids, self._tensor(sides.decoder_positions), step, self._tensor(sides.sampled))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
