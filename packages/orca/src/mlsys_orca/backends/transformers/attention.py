"""Hand the attention calls of ``transformers`` modules to a function of ours; find out what they ask for.

Between those modules, which look their attention up by name in ``transformers.AttentionInterface``, and
:mod:`.decoder`, which runs it over the ragged batch. The interface knows global functions only, so who answers is set
around each forward. :func:`attention_layout` builds a model on torch's ``meta`` device, where tensors have no values,
and runs it once with an attention and a mask that write down what they are asked for. So what our ragged attention
can't do is refused by name before a weight is read, for architectures that this package has never heard of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.config import UnsupportedModelError
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


_NUM_TOKENS = 5  # of the trace; shapes show nothing more with a longer one
# What modules hand on to attention that says nothing about its result.
_NEUTRAL = {"dropout", "is_causal", "output_attentions", "output_router_logits", "position_ids", "use_cache"}
_READ = {"scaling", "softcap", "sliding_window"}


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Shape of a model's attention, for the K/V cache and the ragged attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: tuple[AttentionOptions, ...]  # by layer


@dataclass(frozen=True, slots=True)
class _Call:
    """One use of attention."""

    layer: int | None
    shapes: tuple[torch.Size, ...]  # of query, key and value
    mask: Tensor | None
    options: Mapping[str, Any]
    is_causal: bool


def attention_layout(config: Any, max_positions: int) -> AttentionLayout:
    """Return what attention does in the model of ``config``, a ``transformers`` configuration.

    Args:
        config: The configuration; it is not changed.
        max_positions: Tokens of context; windows as wide say nothing.

    Raises:
        UnsupportedModelError: attention does something in some layer that ours does not, or more than attention mixes
            the tokens.
    """
    calls, masks = _trace(config, max_positions)
    layers = [call.layer for call in calls]
    if sorted(layers, key=str) != sorted(range(config.num_hidden_layers), key=str):
        raise UnsupportedModelError(
            "an attention, or another mixing of tokens, of its own (a bias by distance, a state, a convolution): its "
            f"{config.num_hidden_layers} layers use transformers' attention interface {len(calls)} times"
        )
    shapes = {tuple(shape[i] for shape in call.shapes for i in (1, 3)) for call in calls}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"heads that differ from layer to layer ({len(shapes)} shapes)")
    num_heads, head_dim, num_kv_heads, key_dim, num_value_heads, value_dim = shapes.pop()
    if not head_dim == key_dim == value_dim or num_kv_heads != num_value_heads:
        raise UnsupportedModelError(f"keys of {key_dim} features and values of {value_dim} (latent attention)")
    by_layer = sorted(calls, key=lambda call: call.layer or 0)
    options = tuple(_options(call, masks) for call in by_layer)
    return AttentionLayout(num_heads, num_kv_heads, head_dim, options)


def _trace(config: Any, max_positions: int) -> tuple[list[_Call], list[tuple[Tensor, int | None]]]:
    """Return every use of attention in one forward, and every mask that was made, with its window."""
    from transformers import AutoModelForCausalLM

    calls: list[_Call] = []
    masks: list[tuple[Tensor, Callable[..., Any]]] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        layer, is_causal = getattr(module, "layer_idx", None), bool(getattr(module, "is_causal", True))
        calls.append(_Call(layer, (query.shape, key.shape, value.shape), mask, options, is_causal))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def mask(*, mask_function: Callable[..., Any], q_length: int, kv_length: int, **_: Any) -> Tensor:
        made = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        masks.append((made, mask_function))
        return made

    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), torch.device("meta"):
            # Experts by index would look at values; a trace needs none.
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                copy.deepcopy(config), attn_implementation=TRACED, experts_implementation="batched_mm"
            )
            if getattr(model, "_is_stateful", False):
                raise UnsupportedModelError("a state beside keys and values (a recurrent or hybrid model)")
            if "position_ids" not in signature(model.forward).parameters:
                raise UnsupportedModelError("positions that cannot be given (its forward takes no position_ids)")
            with answered_by(attend, mask):
                model.eval()(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except UnsupportedModelError:
        raise
    except KeyError as error:  # a table of its own, by the name of the implementation
        raise UnsupportedModelError("an attention that transformers' attention interface does not reach") from error
    except Exception as error:  # whatever a model does that has no meaning without values
        reason = str(error).partition("\n")[0]
        raise UnsupportedModelError(f"a forward that can be traced ({type(error).__name__}: {reason})") from error
    return calls, [(made, _window(function, max_positions)) for made, function in masks]


def _window(mask_function: Callable[..., Any], max_positions: int) -> int | None:
    """Return the window of a mask: the number of keys up to its own that a query sees; None: all.

    Raises:
        UnsupportedModelError: queries see something else than that.
    """
    keys = torch.arange(max_positions)
    try:
        widths = []
        for query in (0, max_positions // 3, max_positions - 1):
            seen = torch.as_tensor(mask_function(0, 0, torch.tensor(query), keys)).expand(max_positions)
            widths.append(int(seen.sum()))
            if not torch.equal(seen, (keys <= query) & (keys > query - widths[-1])):
                raise UnsupportedModelError("attention to other keys than the last so many (chunks, or later tokens)")
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModelError(f"a mask that is no function of positions ({error})") from error
    return None if widths[-1] == max_positions else widths[-1]


def _options(call: _Call, masks: Sequence[tuple[Tensor, int | None]]) -> AttentionOptions:
    unknown = sorted(
        name
        for name, value in call.options.items()
        if name not in _NEUTRAL | _READ and value is not None and value is not False
    )
    if unknown:
        raise UnsupportedModelError(f"attention with {', '.join(unknown)}")
    if not call.is_causal:
        raise UnsupportedModelError("attention to later tokens")
    windows = [window for mask, window in masks if mask is call.mask]
    if not windows:
        raise UnsupportedModelError("attention under a mask of its own")
    scale, softcap = call.options.get("scaling"), call.options.get("softcap")
    return AttentionOptions(
        scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        window=windows[0],
    )
