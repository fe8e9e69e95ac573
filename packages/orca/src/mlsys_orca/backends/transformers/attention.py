"""Hand the attention calls of ``transformers`` modules to a function of ours.

Between those modules, which look their attention up by name in ``transformers.AttentionInterface``, and
:mod:`.layout`, which finds out what a model's attention does, and :mod:`.decoder`, which runs
it over the ragged batch. The interface knows global functions only, so who answers is set around each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

RAGGED = "mlsys_ragged"  # no mask is registered under this name, so transformers makes none
TRACED = "mlsys_traced"


# Attention of one layer, of the layer's module and
# - query [1, num_heads, num_tokens, head_dim] and key and value [1, num_kv_heads, num_tokens, head_dim], rotated;
# - what the model made of what Mask gave;
# - what else the module says: scaling, softcap, sliding_window, ...
# It gives [1, num_tokens, num_heads, head_dim].
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, Mapping[str, Any]], Tensor]
# What takes the place of a mask, of keywords: q_length, kv_length, mask_function (whether a query sees a key), ...
Mask = Callable[..., Tensor | None]

_attend: ContextVar[Attend] = ContextVar("attend")
_mask: ContextVar[Mask] = ContextVar("mask")


def register() -> None:
    """Make both names known to ``transformers``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (RAGGED, TRACED):
        AttentionInterface.register(name, _call_attend)
    AttentionMaskInterface.register(TRACED, _call_mask)


@contextmanager
def answered_by(attend: Attend, mask: Mask | None = None) -> Iterator[None]:
    """Bind the registered names to ``attend`` and ``mask`` inside the block, in this thread."""
    before = _attend.set(attend)
    mask_before = _mask.set(mask) if mask else None
    try:
        yield
    finally:
        _attend.reset(before)
        if mask_before:
            _mask.reset(mask_before)


def _call_attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    return _attend.get()(module, query, key, value, attention_mask, options), None


def _call_mask(**options: Any) -> Tensor | None:
    return _mask.get()(**options)
