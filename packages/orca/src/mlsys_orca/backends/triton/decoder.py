"""A decoder on the kernels of this package: each part takes the place of the torch part, and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from mlsys_orca.backends.triton.attention import paged_attention
from mlsys_orca.backends.triton.batch import DeviceBatch, to_device
from mlsys_orca.backends.triton.plan import tile_shape
from mlsys_orca.backends.triton.rowwise import activate, add_norm, gated, prepare_heads
from mlsys_orca.model.blocks import MLP, Attention, Decoder, GatedMLP, PreNormLayer
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.model.layers import LayerNorm, RMSNorm
from mlsys_orca.model.recurrent import GatedAttention, Recurrence
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FusedStep:
    """Inputs of every layer of one iteration beside the states; takes the place of ``blocks.Step``."""

    batch: DeviceBatch
    kv_cache: KVCache
    rotary: tuple[Tensor, Tensor] | None  # layers.Rotary's factors; None: positions are learned


class FusedNorm(nn.Module):
    """RMSNorm or LayerNorm of rows, with the addition before it where there is one.

    Args:
        norm: Over a row's features, not over heads.
    """

    def __init__(self, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [num_tokens, hidden_size] of any floating dtype; the result has the norm's dtype."""
        return self._run(x, None)

    def add(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of both, and its norm.

        Args:
            x: [num_tokens, hidden_size] fp32, overwritten with the sum.
            branch: The same shape, any floating dtype; None: nothing is added.
        """
        return x, self._run(x, branch)

    def _run(self, x: Tensor, branch: Tensor | None) -> Tensor:
        norm = self.norm
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        return add_norm(
            x,
            branch,
            weight=norm.weight,
            bias=bias,
            eps=norm.eps,
            is_centred=isinstance(norm, LayerNorm),
            dtype=norm.dtype,
        )


class FusedAttention(nn.Module):
    """Self-attention of one layer: the projection, one kernel up to the cache, one or two over it, the projection."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.index = attention.index
        self.num_heads = attention.num_heads
        self.num_all = attention.num_all
        self.head_dim = attention.head_dim
        self.options = attention.options
        self.qkv = attention.qkv
        self.output = attention.output
        self.qk_norm = attention.qk_norm

    def forward(self, x: Tensor, step: FusedStep) -> Tensor:
        """Attend with normalised ``x`` [num_tokens, hidden_size] -> same shape; write the layer's keys and values."""
        keys, values = step.kv_cache.of_layer(self.index)
        norm = self.qk_norm
        query = prepare_heads(
            self.qkv(x).view(-1, self.num_all, self.head_dim),
            keys,
            values,
            step.batch.slots,
            num_heads=self.num_heads,
            rotary=step.rotary,
            norm_weight=norm.weight if isinstance(norm, RMSNorm) else None,
            eps=norm.eps if isinstance(norm, RMSNorm) else 0.0,
        )
        out: Tensor = self.output(paged_attention(query, keys, values, step.batch.ragged, self.options))
        return out


class FusedMLP(nn.Module):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, mlp: MLP | GatedMLP) -> None:
        super().__init__()
        self.up = mlp.up if isinstance(mlp, MLP) else mlp.gate_up
        self.down = mlp.down
        self.activation = mlp.activation_name
        self.activate = activate if isinstance(mlp, MLP) else gated

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to ``x`` [num_tokens, hidden_size] -> same shape."""
        out: Tensor = self.down(self.activate(self.up(x), activation=self.activation))
        return out


class FusedPreNormLayer(nn.Module):
    """The usual decoder layer. What its MLP gives is added by the norm that comes next, wherever that is."""

    def __init__(self, layer: PreNormLayer) -> None:
        super().__init__()
        assert isinstance(layer.attention_norm, FusedNorm)
        assert isinstance(layer.mlp_norm, FusedNorm)
        self.attention_norm = layer.attention_norm
        self.attention = layer.attention
        self.mlp_norm = layer.mlp_norm
        self.mlp = layer.mlp

    def forward(self, x: Tensor, branch: Tensor | None, step: FusedStep) -> tuple[Tensor, Tensor]:
        """Run the layer on states [num_tokens, hidden_size] fp32.

        The input is the states and a branch that is still to be added to them; so is the result.
        """
        x, normed = self.attention_norm.add(x, branch)
        x, normed = self.mlp_norm.add(x, self.attention(normed, step))
        return x, self.mlp(normed)


def missing_kernel(decoder: nn.Module) -> str | None:
    """Return the part of ``decoder``, as a noun, that can neither run on a kernel nor stay as it is; None: no part."""
    for module in decoder.modules():
        if isinstance(module, Recurrence | GatedAttention):
            return "recurrent layers" if isinstance(module, Recurrence) else "gated attention"
        if not isinstance(module, Attention):
            continue
        if type(module) is not Attention:
            return f"attention by {type(module).__name__}"
        options = module.options
        if options.bias is not None or not options.is_causal:
            return "attention with a bias, or to later tokens"
        if options.sinks is not None:
            return "attention with sinks"
        norm = module.qk_norm
        if norm is not None and not (isinstance(norm, RMSNorm) and norm.weight.ndim == 2):
            return f"queries and keys normalised by {type(norm).__name__}"
    return None


def fuse(parent: nn.Module) -> None:
    """Have all parts below ``parent`` that there are kernels for run on them."""
    for name, child in list(parent.named_children()):
        fuse(child)
        parent.register_module(name, _fused(child))


def _fused(module: nn.Module) -> nn.Module:
    """Return the replacement of ``module``, whose own parts are fused: itself where there is no kernel for it."""
    if isinstance(module, LayerNorm) or (isinstance(module, RMSNorm) and module.weight.ndim == 1):
        return FusedNorm(module)
    if type(module) is Attention:
        return FusedAttention(module)
    if type(module) is MLP or type(module) is GatedMLP:
        return FusedMLP(module)
    if type(module) is PreNormLayer:
        return FusedPreNormLayer(module)
    return module


class FusedDecoder(nn.Module):
    """A :class:`~mlsys_orca.model.decoder.DecoderModel` on Triton kernels.

    The forward of a dense model waits for nothing on the device: all that it needs of the batch crosses in one copy.

    Args:
        decoder: Gives its parts away and cannot run itself any more.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        fuse(decoder)
        self.decoder = decoder
        self.config = config = decoder.config
        self.dtype = decoder.dtype
        self.device = decoder.device
        self.tile = tile_shape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            itemsize=decoder.dtype.itemsize,
        )

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size].

        Raises:
            MemoryPlanError: a request's block table is too short for its tokens.
        """
        batch, decoder = to_device(inputs, self.tile), self.decoder
        x: Tensor = decoder.embedding(batch.token_ids, batch.positions)
        branch: Tensor | None = None
        step = FusedStep(batch, kv_cache, decoder.rotary(batch.positions) if decoder.rotary is not None else None)
        for layer in decoder.layers:
            if isinstance(layer, FusedPreNormLayer):
                x, branch = layer(x, branch, step)
            else:
                x = layer(x, step)
        if not len(batch.sampled_rows):  # only chunks of prompts with more to come
            return x.new_empty((0, self.config.vocab_size))
        x, branch = x[batch.sampled_rows], None if branch is None else branch[batch.sampled_rows]
        if isinstance(decoder.norm, FusedNorm):
            x, normed = decoder.norm.add(x, branch)
        else:
            normed = decoder.norm(x if branch is None else x + branch)
        return decoder.logits(normed)
