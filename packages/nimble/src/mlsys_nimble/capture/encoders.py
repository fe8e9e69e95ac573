"""Padded positions of ``nn.TransformerEncoder``, as they are in eager without gradients.

There torch runs the layers on a nested tensor, which has no padding, and fills up with zeros. A schedule has fixed
shapes: it runs the layers with the mask, and puts the zeros afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_EAGER = nn.TransformerEncoder.forward


@contextmanager
def padding_as_in_eager(*, is_fast: bool) -> Iterator[None]:
    """Have encoders give zeros at padded positions within the context.

    Args:
        is_fast: Torch's fused encoder layers are allowed (``torch.backends.mha``); else eager has no nested tensors.
    """
    encoder: Any = nn.TransformerEncoder
    if is_fast:
        encoder.forward = _forward
    try:
        yield
    finally:
        encoder.forward = _EAGER


def _forward(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Do as ``nn.TransformerEncoder.forward`` does in eager."""
    if src_key_padding_mask is None or mask is not None or not _is_fused_in_eager(self, src):
        return _EAGER(self, src, mask, src_key_padding_mask, is_causal)
    kept = src_key_padding_mask.logical_not() if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask == 0
    positions = torch.arange(src.shape[1], device=src.device)
    begins = positions < kept.sum(1, keepdim=True)  # [B, L]: the first n positions, n unmasked ones in the row
    is_padding = begins.logical_not()
    is_nested = getattr(self, "use_nested_tensor", False)
    if not is_nested:
        padding: Tensor = src_key_padding_mask
    elif getattr(self, "mask_check", True):  # eager takes nested tensors only where all padding is to the right
        is_padding = is_padding & (begins == kept).all()
        padding = src_key_padding_mask
    else:
        padding = is_padding
    output = src
    for layer in self.layers:
        output = layer(output, src_mask=None, is_causal=bool(is_causal), src_key_padding_mask=padding)
    nothing = kept.any(1, keepdim=True).logical_not().unsqueeze(-1)  # fused layers give NaN where they see no key
    output = output.masked_fill(nothing, float("nan"))
    if is_nested:
        output = output.masked_fill(is_padding.unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def _is_fused_in_eager(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Return whether torch runs each layer as one operator."""
    if src.dim() != 3 or torch.is_autocast_enabled() or torch.is_grad_enabled():
        return False
    layer: Any = encoder.layers[0]
    attention = layer.self_attn
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    return (
        not layer.training
        and not has_hooks
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
    )
