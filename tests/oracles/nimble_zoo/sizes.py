"""Sizes that make any configuration of transformers tiny."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

VOCABULARY = 97
SMALL: dict[str, Any] = {  # every name that some configuration has for one of its sizes
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_local_experts"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "d_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_seq_len", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "relative_attention_num_buckets"), 8),
    **dict.fromkeys(("sliding_window", "window_size"), 4),
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("n_routed_experts", "index_n_heads", "index_topk", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "moe_topk", "moe_k"), 2),
    "first_k_dense_replace": 1,
    "expansion_ratio": 2,
    "type_vocab_size": 2,
    "attention_types": [[["global", "local"], 1]],
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_HEADS = {"num_key_value_heads": 4}
_OWN_KEYS = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
_MIXED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
OTHERS: dict[str, dict[str, Any]] = {  # sizes that these need to go together
    **dict.fromkeys(
        (
            "AXK1ForCausalLM",
            "AXK2ForCausalLM",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
        ),
        _HEADS,
    ),
    **dict.fromkeys(
        ("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "LongcatFlashForCausalLM", "MiniCPM3ForCausalLM"), _HEADS
    ),
    **dict.fromkeys(("EsmcForMaskedLM", "Dots3NoteForCausalLM"), _HEADS),
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _MIXED),
    **{name: {**_MIXED, **_HEADS} for name in ("BailingHybridForCausalLM", "KimiLinearForCausalLM")},
    "Qwen4ExpForCausalLM": {**_MIXED, "token_budget": 8, "compress_ratio": 2},
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": "auto"},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "JambaForCausalLM": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "ZambaForCausalLM": {"layers_block_type": ["mamba", "hybrid"]},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "MPNetForMaskedLM": {"pad_token_id": 1, "relative_attention_num_buckets": 32},
    **{name: {"default_language": "en_XX"} for name in ("XmodForCausalLM", "XmodForMaskedLM")},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds": False},
    "ReformerForMaskedLM": {"axial_pos_embds": False},
    "LukeForMaskedLM": {"entity_vocab_size": 50, "entity_emb_size": 32},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 50},
    **{name: {"num_codebooks": 1} for name in ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM")},
    "xLSTMForCausalLM": {"qk_dim_factor": 1.0},
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), _OWN_KEYS),
    **{name: {"vocab_size_per_layer_input": 97} for name in ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")},
    "Gemma4AssistantForCausalLM": {"hidden_size_per_layer_input": 0},
    "PerceiverForMaskedLM": {"d_latents": 32, "num_latents": 8},
    "NeoMMEForMaskedLM": {"head_dim": 16},
}


def tiny(config: Any, model: str = "") -> Any:
    """A configuration with all sizes small, and those of its parts."""
    names = set(inspect.signature(config.__init__).parameters)
    if dataclasses.is_dataclass(config):
        names |= {field.name for field in dataclasses.fields(config)}
    chosen = {name: value for name, value in {**SMALL, **OTHERS.get(model, {})}.items() if name in names}
    for name in getattr(config, "sub_configs", {}):  # of text, of images, of sound
        if name in names:
            part = getattr(config(), name)
            if part is not None:
                chosen[name] = tiny(type(part), model).to_dict()
    return config(**chosen)
