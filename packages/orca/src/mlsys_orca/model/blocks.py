"""The parts that decoder layers are made of, and the decoder around them.

A flattened forward: all requests' tokens stand as rows of one matrix for every operator but attention. A family
(such as :mod:`mlsys_orca.model.families.llama`) reads the operators from a checkpoint and puts them together here.
Query, key and value projections are one matrix product, gate and up projections another; the vocabulary projection
runs on the sampled rows only.

In bf16 the sum that runs through the layers stays fp32, which costs little and leaves the last layer's state half as
wrong (by 0.75 % of its norm instead of 1.5 % on SmolLM2-135M).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.model.layers import ACTIVATIONS, Linear, RMSNorm, Rotaries, Rotary, rotate
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of every layer of one iteration beside the states. Owner: the decoder, for this iteration."""

    inputs: ForwardInputs
    kv_cache: KVCache
    rotary: Any  # what the decoder's rotary gives, layers.Rotary's factors or several; None: positions are learned


class Attention(nn.Module):
    """Self-attention of one layer over the cache.

    Args:
        config: The model's shape.
        index: The layer's number.
        qkv: hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values, head after head.
        output: num_heads * head_dim -> hidden_size.
        qk_norm: Normalises query and key heads, [num_heads + num_kv_heads, head_dim], before they turn.
    """

    def __init__(
        self, config: ModelConfig, index: int, *, qkv: Linear, output: Linear, qk_norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.index = index
        self.num_heads = config.num_heads
        self.num_rotary = config.num_heads + config.num_kv_heads
        self.num_all = config.num_heads + 2 * config.num_kv_heads
        self.head_dim = config.head_dim
        self.options = AttentionOptions(
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=config.windows[index] if config.windows else None,
        )
        self.qkv = qkv
        self.output = output
        self.qk_norm = qk_norm

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Attend with normalised ``x`` [num_tokens, hidden_size] -> same shape; write the layer's keys and values."""
        out: Tensor = self.output(self.attend(self.qkv(x), step))
        return out

    def attend(self, qkv: Tensor, step: Step) -> Tensor:
        """Attend with what the first product gave; return what the last one takes."""
        qkv = qkv.view(-1, self.num_all, self.head_dim)
        qk = qkv[:, : self.num_rotary]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if step.rotary is not None:
            qk = rotate(qk, *step.rotary)
        slots, spans = step.inputs.slots, step.inputs.spans
        keys, values = step.kv_cache.write(self.index, slots, qk[:, self.num_heads :], qkv[:, self.num_rotary :])
        return ragged_attention(qk[:, : self.num_heads], keys, values, spans, self.options)


class WideNorms(nn.Module):
    """Norms of queries and keys, each over all heads together (OLMo 2): what an :class:`Attention` has as ``qk_norm``.

    Args:
        query: Over num_heads * head_dim features.
        key: Over num_kv_heads * head_dim features.
    """

    def __init__(self, query: RMSNorm, key: RMSNorm) -> None:
        super().__init__()
        self.query = query
        self.key = key

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise ``heads`` [num_tokens, num_heads + num_kv_heads, head_dim] -> same shape."""
        flat, width = heads.flatten(1).float(), self.query.weight.numel()
        return torch.cat([self.query(flat[:, :width]), self.key(flat[:, width:])], dim=1).view(heads.shape)


class RotatedBy(nn.Module):
    """Attention whose heads are rotated by one of the decoder's :class:`~.layers.Rotaries`, or not at all.

    Args:
        attention: Attention of one layer.
        which: The number of the rotary; None: positions do not turn this layer's heads.
    """

    def __init__(self, attention: Attention, which: int | None) -> None:
        super().__init__()
        self.attention = attention
        self.which = which

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Attend like :class:`Attention`, with this layer's rotary factors."""
        factors = None if self.which is None else step.rotary[self.which]
        out: Tensor = self.attention(x, replace(step, rotary=factors))
        return out


class MLP(nn.Module):
    """``down(activation(up(x)))``."""

    def __init__(self, up: Linear, down: Linear, *, activation: str) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.activation_name = activation
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to ``x`` [num_tokens, hidden_size] -> same shape."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Clamped SwiGLU (gpt-oss, 2025): ``g * sigmoid(slope * g) * (u + 1)`` of gates ``g`` and factors ``u``."""

    most: float  # of gates from above, and of the factors' magnitude
    slope: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return what gates let through of their factors, all of one shape."""
        gate = gate.clamp(max=self.most)
        return gate * torch.sigmoid(gate * self.slope) * (up.clamp(-self.most, self.most) + 1)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product, gates first (SwiGLU; Shazeer, 2020).

    With ``limits`` these take the place of the activation.
    """

    def __init__(self, gate_up: Linear, down: Linear, *, activation: str, limits: Limits | None = None) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation_name = activation
        self.activation = ACTIVATIONS[activation]
        self.limits = limits

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated MLP to ``x`` [num_tokens, hidden_size] -> same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        inner = self.activation(gate).mul_(up) if self.limits is None else self.limits(gate, up)
        out: Tensor = self.down(inner)
        return out


class PreNormLayer(nn.Module):
    """The usual layer of a decoder or an encoder: each branch reads the normalised state and is added to it."""

    def __init__(self, *, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, x: Tensor, step: Any) -> Tensor:
        """Run the layer.

        Args:
            x: [num_tokens, hidden_size] fp32.
            step: Input of ``attention`` beside the states: a decoder's :class:`Step`, an encoder's spans.

        Returns:
            States of the same shape and dtype.
        """
        x = x + self.attention(self.attention_norm(x), step)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ParallelLayer(PreNormLayer):
    """Both branches read the same state through one norm."""

    def forward(self, x: Tensor, step: Any) -> Tensor:
        """Run the layer as :meth:`PreNormLayer.forward`."""
        normed = self.attention_norm(x)
        out: Tensor = x + self.attention(normed, step) + self.mlp(normed)
        return out


class SandwichLayer(PreNormLayer):
    """Each branch reads the normalised state, and what it gives is normalised before it is added."""

    def __init__(self, *, attention_out_norm: nn.Module, mlp_out_norm: nn.Module, **parts: nn.Module) -> None:
        super().__init__(**parts)
        self.attention_out_norm = attention_out_norm
        self.mlp_out_norm = mlp_out_norm

    def forward(self, x: Tensor, step: Any) -> Tensor:
        """Run the layer as :meth:`PreNormLayer.forward`."""
        x = x + self.attention_out_norm(self.attention(self.attention_norm(x), step).float())
        out: Tensor = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)).float())
        return out


class Cast(nn.Module):
    """Cast from fp32 to the model's dtype, in place of a norm, which else does it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` in ``dtype``."""
        return x.to(self.dtype)


class Decoder(nn.Module):
    """Embedding, layers, last norm and head: a :class:`~mlsys_orca.model.decoder.DecoderModel`.

    Args:
        config: The model's shape.
        embedding: (token ids, positions) -> fp32 [num_tokens, hidden_size].
        layers: Each (states, :class:`Step`) -> states.
        norm: fp32 [num_sampled, hidden_size] -> the same in ``dtype``.
        head: Product of the normalised states -> [num_sampled, vocab_size].
        rotary: Where positions turn the heads.
        dtype: Dtype of weights, keys and values.
        device: Where they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        head: nn.Module,
        rotary: Rotary | Rotaries | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.dtype = dtype
        self.device = device

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size]."""
        step = Step(inputs, kv_cache, self.rotary(inputs.positions) if self.rotary is not None else None)
        return self.run(inputs.token_ids, inputs.positions, step, inputs.sampled_rows)

    def run(self, token_ids: Tensor, positions: Tensor, step: Any, sampled_rows: Tensor) -> Tensor:
        """Run all layers on tokens at ``positions``, with ``step``; return the logits of the sampled ones."""
        x: Tensor = self.embedding(token_ids, positions)
        for layer in self.layers:
            x = layer(x, step)
        if not len(sampled_rows):  # only chunks of prompts with more to come
            return x.new_empty((0, self.config.vocab_size))
        return self.logits(self.norm(x[sampled_rows]))

    def logits(self, normed: Tensor) -> Tensor:
        """Return fp32 logits for normalised states [num_sampled, hidden_size]."""
        if self.config.logit_scale != 1.0:
            normed = normed * self.config.logit_scale
        logits: Tensor = self.head(normed).float()
        cap = self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)
