"""A Hugging Face ``config.json`` to a :class:`ModelConfig`: what the families with Llama's keys share.

Between :mod:`mlsys_orca.loading.huggingface` and the families. A family whose keys are Llama's adds its defaults and
its differences to :func:`config_from_huggingface`; one with other keys builds its configuration with the helpers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig, activation_name, refuse
from mlsys_orca.model.rope import rope_from_huggingface
from mlsys_orca.model.weights.quantized_directory import check_quantization


def config_from_huggingface(
    raw: Mapping[str, Any], architecture: str, *, partial_rotary: bool = False, **changes: Any
) -> ModelConfig:
    """Return the configuration that a ``config.json`` with Llama's keys states.

    Args:
        raw: The file's object.
        architecture: The family.
        partial_rotary: True if the family knows rotary positions on part of a head.
        changes: Fields of :class:`ModelConfig` that the family has read itself.

    Raises:
        InvalidInputError: a key is missing, or states something that is not implemented.
    """
    require(raw, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    refuse_common(raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    rope = rope_from_huggingface(raw, head_dim, max_positions=raw.get("max_position_embeddings", 2048))
    is_partial = rope["rotary_dim"] is not None
    refuse(is_partial and not partial_rotary, "rotary positions on part of a head (partial_rotary_factor)")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": head_dim,
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": activation_name(raw.get("hidden_act", "silu")),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": bool(raw.get("attention_bias")),
        "output_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
    }
    return ModelConfig(**(fields | rope | changes))


def require(raw: Mapping[str, Any], *keys: str) -> None:
    """See that ``raw`` has a whole number at each of ``keys``.

    Raises:
        InvalidInputError: it lacks some, all of which are named.
    """
    if missing := [key for key in keys if not isinstance(raw.get(key), int)]:
        raise InvalidInputError(f"config.json lacks {', '.join(missing)}: is it a decoder-only model's?")


def refuse_common(raw: Mapping[str, Any]) -> None:
    """Refuse what any ``config.json`` may ask for and no family does."""
    if (settings := raw.get("quantization_config")) is not None:
        check_quantization(settings if isinstance(settings, Mapping) else {})
    refuse(bool(raw.get("add_cross_attention")), "attention over an encoder's states")
    refuse(bool(raw.get("use_bidirectional_attention")), "attention to later tokens (use_bidirectional_attention)")
    refuse(raw.get("is_causal") is False, "attention to later tokens (is_causal)")


def windows_from_huggingface(
    raw: Mapping[str, Any], window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...] | None:
    """Return the attention window of each layer.

    Args:
        raw: The file's object; its ``layer_types``, where it has them, say which layers have a window.
        window: The window's width, in tokens; None: the model has none.
        is_sliding: Which layers (by number) have it in a file without ``layer_types``.

    Raises:
        InvalidInputError: a layer is of another type than full or sliding attention, or sliding without a width.
    """
    numbers = range(raw["num_hidden_layers"])
    types = raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if window and is_sliding(number) else "full_attention" for number in numbers]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    refuse(bool(unknown), f"layers of type {', '.join(map(repr, sorted(unknown)))} (full and sliding attention are)")
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and not window:
        raise InvalidInputError("config.json has layers of sliding attention but no sliding_window")
    return tuple(window if slides else None for slides in sliding) if any(sliding) else None
