"""A Hugging Face ``config.json`` to a :class:`ModelConfig`: what the families with Llama's keys share.

Between :mod:`mlsys_orca.loading.huggingface` and the families. A family whose keys are Llama's adds its defaults and
its differences to :func:`config_from_huggingface`; one with other keys builds its configuration with the helpers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_orca.models.config import ModelConfig, activation_name, refuse


def config_from_huggingface(
    raw: Mapping[str, Any], architecture: str, *, partial_rotary: bool = False, **changes: Any
) -> ModelConfig:
    """The configuration that a ``config.json`` with Llama's keys states.

    Args:
        raw: The file's object.
        architecture: The family.
        partial_rotary: Whether the family knows rotary positions on part of a head.
        changes: Fields of :class:`ModelConfig` that the family has read itself.

    Raises:
        InvalidInputError: a key is missing, or states something that is not implemented.
    """
    require(raw, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    refuse_common(raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    theta, rotary_dim, divisors = rope_from_huggingface(raw, head_dim)
    refuse(rotary_dim is not None and not partial_rotary, "rotary positions on part of a head (partial_rotary_factor)")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": head_dim,
        "max_positions": raw.get("max_position_embeddings", 2048),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": activation_name(raw.get("hidden_act", "silu")),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "rope_theta": theta,
        "rotary_dim": rotary_dim,
        "rope_divisors": divisors,
        "qkv_bias": bool(raw.get("attention_bias")),
        "output_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
    }
    return ModelConfig(**(fields | changes))


def require(raw: Mapping[str, Any], *keys: str) -> None:
    """See that ``raw`` has a whole number at each of ``keys``.

    Raises:
        InvalidInputError: it lacks some, all of which are named.
    """
    if missing := [key for key in keys if not isinstance(raw.get(key), int)]:
        raise InvalidInputError(f"config.json lacks {', '.join(missing)}: is it a decoder-only model's?")


def refuse_common(raw: Mapping[str, Any]) -> None:
    """Refuse what any ``config.json`` may ask for and no family does."""
    refuse(raw.get("quantization_config") is not None, "weights quantised by other tools (plain float or GGUF are)")
    refuse(bool(raw.get("add_cross_attention")), "attention over an encoder's states")
    refuse(bool(raw.get("use_bidirectional_attention")), "attention to later tokens (use_bidirectional_attention)")


def windows_from_huggingface(
    raw: Mapping[str, Any], window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...] | None:
    """The attention window of each layer.

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


def rope_from_huggingface(raw: Mapping[str, Any], head_dim: int) -> tuple[float, int | None, tuple[float, ...] | None]:
    """Theta, rotary part of a head and divisors: from ``rope_parameters`` (transformers 5) or the keys before it.

    Raises:
        InvalidInputError: the scaling is not implemented.
    """
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    turned = int(head_dim * partial)
    rotary_dim = turned if turned != head_dim else None
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, rotary_dim, None
    if kind == "linear":
        return theta, rotary_dim, (float(rope["factor"]),) * (turned // 2)
    if kind == "llama3":
        return (
            theta,
            rotary_dim,
            llama3_divisors(
                theta,
                turned,
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_positions=rope["original_max_position_embeddings"],
            ),
        )
    raise InvalidInputError(f"rotary scaling {kind!r} is not implemented; default, linear and llama3 are")


def llama3_divisors(
    theta: float,
    rotary_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> tuple[float, ...]:
    """Llama 3.1's stretch of the rotary frequencies: long waves slowed by ``factor``, short ones kept, a ramp between.

    Example:
        >>> stretch = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
        >>> llama3_divisors(10000.0, 4, **stretch)
        (1.0, 8.0)
    """
    divisors = []
    for pair in range(rotary_dim // 2):
        turns = original_max_positions * theta ** (-2 * pair / rotary_dim) / (2 * pi)  # over the original context
        kept = min(1.0, max(0.0, (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)))
        divisors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(divisors)
