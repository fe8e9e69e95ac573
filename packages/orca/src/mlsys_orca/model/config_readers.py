"""A Hugging Face ``config.json`` or a GGUF file's metadata to a :class:`ModelConfig`: what the families share.

Between the loaders of both formats and the families. A family whose keys are Llama's adds its defaults and its
differences to :func:`config_from_huggingface`; one with other keys builds its configuration with the helpers. A GGUF's
defaults are those of llama.cpp's loader; a key that it would obey and the family has not read is refused. Key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig, activation_name, refuse
from mlsys_orca.model.rope import rope_from_huggingface, yarn_amplitude, yarn_divisors


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
        from mlsys_orca.model.weights.quantized_directory import check_quantization

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


# Names of a decoder's tensors by role, for OperatorReader.
GGUF_STEMS = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "qkv": "blk.{}.attn_qkv",
    "o": "blk.{}.attn_output",
    "mlp_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
}
GGUF_EXPERTS = {  # a layer's experts are one tensor
    "router": "blk.{}.ffn_gate_inp",
    "gates": "blk.{}.ffn_gate_exps",
    "ups": "blk.{}.ffn_up_exps",
    "downs": "blk.{}.ffn_down_exps",
}
# Keys with which llama.cpp changes what a decoder computes -> values that ask for nothing. A key that is not here and
# begins like those is unknown; what a family has read, it implements.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.relative_buckets_count": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # the softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "hidden_activation": (),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0,),
    "moe_latent_size": (0,),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
}
_COUNTS = ("_count", "_count_kv", "_interval", "_kernel", "_layers", "_length", "_pattern", "_rank", "_size", "_window")
_NAMESPACES = ("attention.", "expert", "rope.", "ssm.")
# Keys of these that mean nothing to a family that has not read them: of the other norm, of another scaling, or a size
# that its tensors have as well.
_OF_NO_USE = frozenset(
    {
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "expert_feed_forward_length",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFields:
    """A file's statements about its model outside its weights. Owner: the loader, while it loads."""

    metadata: Mapping[str, Any]  # the file's key-value pairs
    architecture: str  # general.architecture; prefixes the keys
    tensor_names: frozenset[str]  # without output.weight the embeddings are tied
    rope_divisors: tuple[float, ...] | None = None  # of the tensor rope_freqs.weight (Llama 3.1's scaling), if any
    long_divisors: tuple[float, ...] | None = None  # of rope_factors_long.weight (longrope)
    short_divisors: tuple[float, ...] | None = None  # of rope_factors_short.weight
    read: set[str] = field(default_factory=set)  # keys that the family has asked for

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at ``key`` of the architecture.

        Raises:
            InvalidInputError: it is missing and there is no default, differs from layer to layer, or is of a type or a
                size that nobody can use.
        """
        self.read.add(key)
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        refuse(isinstance(value, list), f"{self.architecture}.{key} that differs from layer to layer")
        if value is None:
            raise InvalidInputError(f"the file's metadata lacks {self.architecture}.{key}")
        is_count = key.endswith(_COUNTS)
        if (is_count and type(value) is not int) or (isinstance(value, str) and key != "rope.scaling.type"):
            kind = "a whole number" if is_count else "a number"
            raise InvalidInputError(f"the file's metadata has {self.architecture}.{key} = {value!r}; it must be {kind}")
        if key == "attention.head_count" and value == 0:
            raise InvalidInputError(f"the file's metadata has {self.architecture}.{key} = 0; it must be 1 or more")
        return value

    def refuse_unread(self) -> None:
        """Refuse keys that change the result and that the family has not read.

        Raises:
            InvalidInputError: there is one; the message names it.
        """
        prefix = f"{self.architecture}."
        stated = {name.removeprefix(prefix): value for name, value in self.metadata.items() if name.startswith(prefix)}
        for key in sorted(stated.keys() - self.read - _OF_NO_USE):
            neutral = _NEUTRAL.get(key, () if key.startswith(_NAMESPACES) else (stated[key],))
            if key.endswith("_swa"):  # of layers with a window: the same as of all
                neutral = (stated.get(key.removesuffix("_swa")),)
            refuse(stated[key] not in neutral, f"{prefix}{key} = {str(stated[key])[:100]}")


def config_from_gguf(
    fields: GgufFields,
    *,
    norm: str = "rms",
    partial_rotary: bool = False,
    **changes: Any,
) -> ModelConfig:
    """Return the configuration that a file's metadata states.

    Args:
        fields: The metadata.
        norm: ``"rms"`` or ``"layer"``: whose epsilon the file has.
        partial_rotary: True if the family knows rotary positions on part of a head.
        changes: Fields of :class:`ModelConfig` that the family has read itself.

    Raises:
        InvalidInputError: a key is missing, or states something that is not implemented.
    """
    num_heads = fields.get("attention.head_count")
    head_dim = fields.get("attention.key_length", fields.get("embedding_length") // max(1, num_heads))
    refuse(fields.get("attention.value_length", head_dim) != head_dim, "values of another width than keys")
    rotary_dim = fields.get("rope.dimension_count", head_dim)
    refuse(rotary_dim != head_dim and not partial_rotary, "rotary positions on part of a head")
    stated: dict[str, Any] = {
        "architecture": fields.architecture,
        "vocab_size": fields.get("vocab_size", 0) or len(fields.metadata.get("tokenizer.ggml.tokens") or ()),
        "hidden_size": fields.get("embedding_length"),
        "intermediate_size": fields.get("feed_forward_length"),
        "num_layers": fields.get("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_positions": fields.get("context_length"),
        "norm_eps": fields.get(f"attention.layer_norm_{'rms_' if norm == 'rms' else ''}epsilon"),
        "tied_embeddings": "output.weight" not in fields.tensor_names,
        "rope_theta": fields.get("rope.freq_base", 10_000.0),
        "rotary_dim": rotary_dim if rotary_dim != head_dim else None,
        "qkv_bias": not fields.tensor_names.isdisjoint({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        "output_bias": "blk.0.attn_output.bias" in fields.tensor_names,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.tensor_names,
    }
    stated |= rope_from_gguf(fields, rotary_dim)
    fields.refuse_unread()
    return ModelConfig(**(stated | changes))


def expert_fields(fields: GgufFields) -> dict[str, Any]:
    """Return what a GGUF file says about experts, as fields of :class:`ModelConfig`.

    Raises:
        InvalidInputError: it has experts and does not say how many each token passes.
    """
    if not (num_experts := fields.get("expert_count", 0)):
        return {}
    return {"num_experts": num_experts, "num_chosen_experts": fields.get("expert_used_count")}


def rope_from_gguf(fields: GgufFields, rotary_dim: int) -> dict[str, Any]:
    """Return the scaling of ``rotary_dim`` rotated features, as fields of :class:`ModelConfig`; see :mod:`.rope`.

    Raises:
        InvalidInputError: it is not implemented, or lacks a number.
    """
    kind, amplitude = fields.get("rope.scaling.type", "linear"), float(fields.get("rope.scaling.attn_factor", 1.0))
    divisors, factor = fields.rope_divisors, _rope_factor(fields)
    if fields.long_divisors and fields.short_divisors:
        length = fields.get("context_length")
        is_long = length > fields.get("rope.scaling.original_context_length", length)
        divisors = fields.long_divisors if is_long else fields.short_divisors
        kind = "linear" if kind == "longrope" else kind
    refuse(kind not in ("none", "linear", "yarn"), f"rotary scaling {kind!r} (none, linear, yarn and factors are)")
    if kind == "yarn":
        refuse(divisors is not None, "rotary scaling 'yarn' beside factors")
        divisors, amplitude = yarn_from_gguf(fields, rotary_dim), amplitude * yarn_amplitude(factor)
    elif kind == "linear" and factor != 1.0:
        divisors = tuple(factor * divisor for divisor in divisors or (1.0,) * (rotary_dim // 2))
    return {"rope_divisors": divisors, "rope_amplitude": amplitude}


def _rope_factor(fields: GgufFields) -> float:
    """Return the factor of a linear scaling or of yarn; a file says 1 with 0, too."""
    return float(fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))) or 1.0


def yarn_from_gguf(fields: GgufFields, rotary_dim: int, *, truncate: bool = True) -> tuple[float, ...]:
    """Return the divisors of a file that states scaling 'yarn'; see :func:`.rope.yarn_divisors`."""
    return yarn_divisors(
        float(fields.get("rope.freq_base", 10_000.0)),
        rotary_dim,
        factor=_rope_factor(fields),
        original_max_positions=fields.get("rope.scaling.original_context_length", fields.get("context_length")),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
        truncate=truncate,
    )
