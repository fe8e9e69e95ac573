"""Families of encoders: what each one's config.json means, and what its files call the weights.

A family grows here by a function and a table. What a config.json asks for beyond them is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_encoders.models.layers import ACTIVATIONS

Raw = Mapping[str, Any]
_NUM_BUCKETS = 32  # transformers' MPNet computes with these, whatever a file says
_REACH = 128  # ModernBERT's local_attention where its file leaves it out


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    A weight may have several names, tried in order; ``{}`` is the layer's number. The products of attention are "qkv"
    in one, or "query", "key" and "value"; the MLP's first product is "up", or "gate" and "factor".
    """

    shape: Callable[[Raw], dict[str, Any]]  # fields of BertConfig, but sizes of SIZES and the head
    sizes: Mapping[str, str]  # field of BertConfig -> key of config.json
    prefixes: tuple[str, ...]  # before the encoder's names
    names: Mapping[str, tuple[str, ...]]
    head: Mapping[str, str]  # names of its parts, without the prefix
    head_activation: str = "tanh"
    ignorable: tuple[str, ...] = ("pooler.", "cls.", "lm_head.")  # heads of training


_SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_length": "max_position_embeddings",
}
_EMBEDDINGS = {
    "words": ("embeddings.word_embeddings",),
    "positions": ("embeddings.position_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "norm": ("embeddings.LayerNorm",),
}
_MLP = {"up": ("encoder.layer.{}.intermediate.dense",), "down": ("encoder.layer.{}.output.dense",)}
_CLASSIFIER = {"pool": "classifier.dense", "classifier": "classifier.out_proj"}


def _only(raw: Raw, **allowed: Any) -> None:
    for key, value in allowed.items():
        if raw.get(key, value) not in (value, None):
            raise InvalidInputError(f"got {key} {raw[key]!r}; only {value!r} is computed here")


def _activation(raw: Raw, key: str, default: str) -> str:
    name = raw.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS or name == "identity":
        known = ", ".join(known for known in ACTIVATIONS if known != "identity")
        raise InvalidInputError(f"got {key} {name!r}; computed here are {known}")
    return name


def _offset(raw: Raw) -> int:
    """Return the row of the first position, which is behind that of the padding token."""
    padding = raw.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or not 0 <= padding < 1 << 24:
        raise InvalidInputError(f"pad_token_id is {padding!r}: positions begin behind it, so a number is needed")
    return padding + 1


def _bert(raw: Raw) -> dict[str, Any]:
    _only(raw, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return {
        "layer_norm_eps": raw.get("layer_norm_eps", 1e-12),
        "activation": _activation(raw, "hidden_act", "gelu"),
        "num_token_types": raw.get("type_vocab_size", 2),
    }


def _roberta(raw: Raw) -> dict[str, Any]:
    return {**_bert(raw), "position_offset": _offset(raw)}


def _mpnet(raw: Raw) -> dict[str, Any]:
    _only(raw, relative_attention_num_buckets=_NUM_BUCKETS)
    return {**_roberta(raw), "num_token_types": 0, "num_buckets": _NUM_BUCKETS}


def _distilbert(raw: Raw) -> dict[str, Any]:
    return {"layer_norm_eps": 1e-12, "activation": _activation(raw, "activation", "gelu"), "num_token_types": 0}


def _theta(params: Any, otherwise: float) -> float:
    params = {} if params is None else params
    if not isinstance(params, dict) or params.get("rope_type", "default") != "default":
        raise InvalidInputError(f"got rope_parameters {params!r}; only those of rope_type 'default' are computed here")
    theta = params.get("rope_theta", otherwise)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < 1e12:
        raise InvalidInputError(f"rope_theta is {theta!r}: a number above 0 is needed")
    return float(theta)


def _modernbert(raw: Raw) -> dict[str, Any]:
    _only(raw, rope_scaling=None)
    num_layers, every = raw.get("num_hidden_layers", 0), raw.get("global_attn_every_n_layers", 3)
    kinds = raw.get("layer_types")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InvalidInputError(f"global_attn_every_n_layers is {every!r}: a number of layers from 1 on is needed")
    if kinds is None:
        kinds = ["sliding_attention" if number % every else "full_attention" for number in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidInputError(f"layer_types does not name the kinds of {num_layers} layers")
    params = raw.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise InvalidInputError(f"rope_parameters is {params!r}: an object by kind of layer is needed")
    thetas = {
        "full_attention": _theta(params.get("full_attention"), raw.get("global_rope_theta", 160_000.0)),
        "sliding_attention": _theta(params.get("sliding_attention"), raw.get("local_rope_theta", 10_000.0)),
    }
    if unknown := sorted({str(kind) for kind in kinds} - thetas.keys()):
        raise InvalidInputError(f"got layer_types {unknown[0]!r}; known are {', '.join(thetas)}")
    reach = raw.get("local_attention", _REACH)
    if not isinstance(reach, int) or isinstance(reach, bool) or reach < 2:
        raise InvalidInputError(f"local_attention is {reach!r}: a number of tokens from 2 on is needed")
    return {
        "layer_norm_eps": raw.get("norm_eps", 1e-5),
        "activation": _activation(raw, "hidden_activation", "gelu"),
        "has_positions": False,
        "num_token_types": 0,
        "thetas": tuple(thetas[kind] for kind in kinds),
        "reaches": tuple(reach // 2 if kind == "sliding_attention" else None for kind in kinds),
        "is_gated": True,
        "is_pre_norm": True,
        "has_attention_bias": bool(raw.get("attention_bias", False)),
        "has_mlp_bias": bool(raw.get("mlp_bias", False)),
        "has_norm_bias": bool(raw.get("norm_bias", False)),
    }


def _nomic(raw: Raw) -> dict[str, Any]:
    own = {"layer_norm_eps": raw.get("layer_norm_eps", 1e-12), "activation": _activation(raw, "hidden_act", "silu")}
    theta = _theta(raw.get("rope_parameters"), 1000.0)
    if "n_embd" in raw:  # the form of its authors' own code
        _only(raw, prenorm=False, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, use_rms_norm=False)
        _only(raw, rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_scaling_factor=None, causal=False)
        _only(raw, rotary_emb_scale_base=None, parallel_block=False, activation_function="swiglu", num_experts=0)
        own = {"layer_norm_eps": raw.get("layer_norm_epsilon", 1e-12), "activation": "silu"}
        theta = _theta({"rope_theta": raw.get("rotary_emb_base", 1000.0)}, 1000.0)
    else:
        _only(raw, head_dim=raw.get("hidden_size", 0) // max(1, raw.get("num_attention_heads", 1)))
    num_layers = raw.get("n_layer", raw.get("num_hidden_layers"))
    return {
        **own,
        "has_positions": False,
        "num_token_types": raw.get("type_vocab_size", 2),
        "thetas": (theta,) * (num_layers if isinstance(num_layers, int) and 0 < num_layers <= 512 else 0),
        "is_gated": True,
        "has_attention_bias": False,
        "has_mlp_bias": False,
    }


_BERT = Family(
    shape=_bert,
    sizes=_SIZES,
    prefixes=("bert.", ""),
    names={
        **_EMBEDDINGS,
        **_MLP,
        "query": ("encoder.layer.{}.attention.self.query",),
        "key": ("encoder.layer.{}.attention.self.key",),
        "value": ("encoder.layer.{}.attention.self.value",),
        "attention_output": ("encoder.layer.{}.attention.output.dense",),
        "attention_norm": ("encoder.layer.{}.attention.output.LayerNorm",),
        "output_norm": ("encoder.layer.{}.output.LayerNorm",),
    },
    head={"pool": "bert.pooler.dense", "classifier": "classifier"},
)
_ROBERTA = Family(
    shape=_roberta, sizes=_SIZES, prefixes=("roberta.", ""), names=_BERT.names, head=_CLASSIFIER,
)  # fmt: skip
_MPNET = Family(
    shape=_mpnet,
    sizes=_SIZES,
    prefixes=("mpnet.", ""),
    names={
        **_EMBEDDINGS,
        **_MLP,
        "relative": ("encoder.relative_attention_bias",),
        "query": ("encoder.layer.{}.attention.attn.q",),
        "key": ("encoder.layer.{}.attention.attn.k",),
        "value": ("encoder.layer.{}.attention.attn.v",),
        "attention_output": ("encoder.layer.{}.attention.attn.o",),
        "attention_norm": ("encoder.layer.{}.attention.LayerNorm",),
        "output_norm": ("encoder.layer.{}.output.LayerNorm",),
    },
    head=_CLASSIFIER,
)
_DISTILBERT = Family(
    shape=_distilbert,
    sizes={
        **_SIZES,
        "hidden_size": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    },
    prefixes=("distilbert.", ""),
    names={
        **_EMBEDDINGS,
        "query": ("transformer.layer.{}.attention.q_lin",),
        "key": ("transformer.layer.{}.attention.k_lin",),
        "value": ("transformer.layer.{}.attention.v_lin",),
        "attention_output": ("transformer.layer.{}.attention.out_lin",),
        "attention_norm": ("transformer.layer.{}.sa_layer_norm",),
        "up": ("transformer.layer.{}.ffn.lin1",),
        "down": ("transformer.layer.{}.ffn.lin2",),
        "output_norm": ("transformer.layer.{}.output_layer_norm",),
    },
    head={"pool": "pre_classifier", "classifier": "classifier"},
    head_activation="relu",
    ignorable=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
)
_MODERNBERT = Family(
    shape=_modernbert,
    sizes=_SIZES,
    prefixes=("model.", ""),
    names={
        "words": ("embeddings.tok_embeddings",),
        "norm": ("embeddings.norm",),
        "qkv": ("layers.{}.attn.Wqkv",),
        "attention_output": ("layers.{}.attn.Wo",),
        "attention_norm": ("layers.{}.attn_norm",),
        "up": ("layers.{}.mlp.Wi",),
        "down": ("layers.{}.mlp.Wo",),
        "output_norm": ("layers.{}.mlp_norm",),
        "last_norm": ("final_norm",),
    },
    head={"pool": "head.dense", "norm": "head.norm", "classifier": "classifier"},
    ignorable=("head.", "decoder."),
)
_NOMIC = Family(
    shape=_nomic,
    sizes=_SIZES,
    prefixes=("nomic_bert.", "bert.", ""),
    names={
        "words": _EMBEDDINGS["words"],
        "token_types": _EMBEDDINGS["token_types"],
        "norm": ("emb_ln", "embeddings.LayerNorm"),
        "qkv": ("encoder.layers.{}.attn.Wqkv",),
        "query": ("layers.{}.self_attn.q_proj",),
        "key": ("layers.{}.self_attn.k_proj",),
        "value": ("layers.{}.self_attn.v_proj",),
        "attention_output": ("encoder.layers.{}.attn.out_proj", "layers.{}.self_attn.o_proj"),
        "attention_norm": ("encoder.layers.{}.norm1", "layers.{}.post_attention_layernorm"),
        "gate": ("encoder.layers.{}.mlp.fc12", "layers.{}.mlp.gate_proj"),
        "factor": ("encoder.layers.{}.mlp.fc11", "layers.{}.mlp.up_proj"),
        "down": ("encoder.layers.{}.mlp.fc2", "layers.{}.mlp.down_proj"),
        "output_norm": ("encoder.layers.{}.norm2", "layers.{}.post_mlp_layernorm"),
    },
    head={"pool": "nomic_bert.pooler.dense", "classifier": "classifier"},
)
NOMIC_OWN_SIZES = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_length": "n_positions",
}
FAMILIES: dict[str, Family] = {  # keys: model_type of config.json
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "mpnet": _MPNET,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "nomic_bert": _NOMIC,
}
