"""A GGUF file's metadata to a :class:`ModelConfig`: what all families share.

Between :mod:`mlsys_orca.loading.gguf` and the families, each of which names the keys beyond the common ones that it
implements. Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_orca.models.config import ModelConfig, refuse

# Keys that change the result, with the values that mean "as if it were absent". A family names those it implements.
_CHANGES_THE_RESULT: dict[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.key_length_swa": (),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (1,),
    "attention.scale": (),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "nextn_predict_layers": (0,),
    "residual_scale": (1,),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "rope.scaling.attn_factor": (1,),
}
_ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFields:
    """What a file says about its model outside its weights. Owner: the loader, while it loads."""

    metadata: Mapping[str, Any]  # the file's key-value pairs
    architecture: str  # general.architecture; prefixes the keys
    tensor_names: frozenset[str]  # without output.weight the embeddings are tied
    rope_divisors: tuple[float, ...] | None = None  # of the tensor rope_freqs.weight (Llama 3.1's scaling), if any

    def get(self, key: str, default: Any = None) -> Any:
        """The value at ``key`` of the architecture.

        Raises:
            InvalidInputError: it is missing and there is no default, or differs from layer to layer.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        refuse(isinstance(value, list), f"{self.architecture}.{key} that differs from layer to layer")
        if value is None:
            raise InvalidInputError(f"the file's metadata lacks {self.architecture}.{key}")
        return value


def config_from_gguf(
    fields: GgufFields,
    *,
    implements: frozenset[str] = frozenset(),
    norm: str = "rms",
    partial_rotary: bool = False,
    **changes: Any,
) -> ModelConfig:
    """The configuration that a file's metadata states.

    Args:
        fields: The metadata.
        implements: Keys beyond the common ones that the family has read itself.
        norm: ``"rms"`` or ``"layer"``: whose epsilon the file has.
        partial_rotary: Whether the family knows rotary positions on part of a head.
        changes: Fields of :class:`ModelConfig` that the family has read itself.

    Raises:
        InvalidInputError: a key is missing, or states something that is not implemented.
    """
    for key in _CHANGES_THE_RESULT.keys() - implements:
        value = fields.metadata.get(name := f"{fields.architecture}.{key}")
        refuse(value is not None and value not in _CHANGES_THE_RESULT[key], f"{name} = {value!r}")
    refuse(not fields.tensor_names.isdisjoint(_ROPE_FACTORS), "rotary scaling 'longrope' (rope_factors_long)")
    num_heads = fields.get("attention.head_count")
    head_dim = fields.get("attention.key_length", fields.get("embedding_length") // num_heads)
    refuse(fields.get("attention.value_length", head_dim) != head_dim, "values of another width than keys")
    turned = fields.get("rope.dimension_count", head_dim)
    refuse(turned != head_dim and not partial_rotary, "rotary positions on part of a head")
    stated: dict[str, Any] = {
        "architecture": fields.architecture,
        "vocab_size": fields.metadata.get(f"{fields.architecture}.vocab_size")
        or len(fields.metadata["tokenizer.ggml.tokens"]),
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
        "rotary_dim": turned if turned != head_dim else None,
        "rope_divisors": _divisors(fields, turned // 2),
    }
    return ModelConfig(**(stated | changes))


def _divisors(fields: GgufFields, num_pairs: int) -> tuple[float, ...] | None:
    kind = fields.get("rope.scaling.type", "none")
    refuse(kind not in ("none", "linear"), f"rotary scaling {kind!r} (none, linear and rope_freqs are)")
    if kind == "none":
        return fields.rope_divisors
    factor = float(fields.get("rope.scaling.factor"))
    return tuple(factor * divisor for divisor in fields.rope_divisors or (1.0,) * num_pairs)
