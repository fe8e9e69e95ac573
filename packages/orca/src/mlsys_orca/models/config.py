"""The shape of a decoder-only transformer, read from either kind of model file.

Between the loaders (which read GGUF metadata or ``config.json``) and the model classes (which take a
:class:`ModelConfig`). Whatever would change the result and is not implemented is refused here, by name, before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

from mlsys_core.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a Llama-like decoder needs to know of itself."""

    architecture: str  # a name of mlsys_orca.models.ARCHITECTURES
    vocab_size: int  # tokens
    hidden_size: int  # features of a token's state
    intermediate_size: int  # features inside the MLP
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; num_heads is a multiple
    head_dim: int  # features per head, even
    max_positions: int  # tokens of context the model was made for
    norm_eps: float  # added to the mean square in RMSNorm
    rope_theta: float  # base of the rotary frequencies
    rope_divisors: tuple[float, ...] | None = None  # [head_dim / 2] each frequency is divided by its own; None: by 1
    tied_embeddings: bool = False  # the output projection is the embedding table

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InvalidInputError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads: "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise InvalidInputError(f"the head dimension is {self.head_dim}; rotary positions need an even one")


def config_from_huggingface(raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The configuration that a Hugging Face ``config.json`` of a Llama-like model states.

    Raises:
        InvalidInputError: a key is missing, or states something that is not implemented.
    """
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [key for key in required if not isinstance(raw.get(key), int)]:
        raise InvalidInputError(f"config.json lacks {', '.join(missing)}: is it a decoder-only model's?")
    _refuse(raw.get("hidden_act", "silu") != "silu", f"the activation {raw.get('hidden_act')!r} (only silu is)")
    _refuse(bool(raw.get("attention_bias") or raw.get("mlp_bias")), "a bias in attention or MLP projections")
    _refuse(raw.get("quantization_config") is not None, "weights quantised by other tools (plain float or GGUF are)")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    # Up to the window's length, attention over a sliding window is plain causal attention.
    window = raw.get("sliding_window", 4096 if raw.get("model_type") == "mistral" else None)
    max_positions = raw.get("max_position_embeddings", 2048)
    theta, divisors = _rope_from_huggingface(raw, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=head_dim,
        max_positions=min(max_positions, window) if window else max_positions,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_divisors=divisors,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _rope_from_huggingface(raw: Mapping[str, Any], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """Theta and divisors from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    _refuse(partial != 1.0, f"rotary positions on part of a head (partial_rotary_factor {partial})")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, (float(rope["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return theta, llama3_divisors(
            theta,
            head_dim,
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_positions=rope["original_max_position_embeddings"],
        )
    raise InvalidInputError(f"rotary scaling {kind!r} is not implemented; default, linear and llama3 are")


def llama3_divisors(
    theta: float,
    head_dim: int,
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
    for pair in range(head_dim // 2):
        turns = original_max_positions * theta ** (-2 * pair / head_dim) / (2 * pi)  # over the original context
        kept = min(1.0, max(0.0, (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)))
        divisors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(divisors)


def config_from_gguf(
    metadata: Mapping[str, Any],
    architecture: str,
    *,
    tensor_names: frozenset[str],
    rope_divisors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The configuration that a GGUF file's metadata states.

    Args:
        metadata: The file's key-value pairs.
        architecture: ``general.architecture``; prefixes the keys.
        tensor_names: Names of the file's tensors: without ``output.weight`` the embeddings are tied.
        rope_divisors: Values of the tensor ``rope_freqs.weight`` where the file has one (Llama 3.1's scaling).

    Raises:
        InvalidInputError: a key is missing, or states something that is not implemented.
    """

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        _refuse(isinstance(value, list), f"{architecture}.{key} that differs from layer to layer")
        if value is None:
            raise InvalidInputError(f"the file's metadata lacks {architecture}.{key}")
        return value

    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.scale"):
        _refuse(f"{architecture}.{key}" in metadata, f"{architecture}.{key}")
    _refuse(get("expert_count", 0) > 0, "a mixture of experts")
    num_heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // num_heads)
    _refuse(get("attention.value_length", head_dim) != head_dim, "values of another width than keys")
    _refuse(get("rope.dimension_count", head_dim) != head_dim, "rotary positions on part of a head")
    scaling = get("rope.scaling.type", "none")
    _refuse(scaling not in ("none", "linear"), f"rotary scaling {scaling!r} (none, linear and rope_freqs are)")
    if scaling == "linear":
        linear = float(get("rope.scaling.factor"))
        rope_divisors = tuple(linear * divisor for divisor in rope_divisors or (1.0,) * (head_dim // 2))
    return ModelConfig(
        architecture=architecture,
        vocab_size=metadata.get(f"{architecture}.vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10_000.0),
        rope_divisors=rope_divisors,
        tied_embeddings="output.weight" not in tensor_names,
    )


def _refuse(refused: bool, what: str) -> None:
    if refused:
        raise InvalidInputError(f"this model needs {what}, which is not implemented; loading it would give wrong text")
