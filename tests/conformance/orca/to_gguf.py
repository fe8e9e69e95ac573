"""Checkpoints of transformers as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

ARCH = gguf.MODEL_ARCH
WITH_LAYER_NORM = (ARCH.GPT2, ARCH.COMMAND_R, ARCH.COHERE2)
ONE_PLUS = (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3, ARCH.QWEN3NEXT)
ONE_PLUS += (ARCH.QWEN35, ARCH.QWEN35MOE)
INTERLEAVED = (ARCH.LLAMA, ARCH.SMOLLM3, ARCH.GRANITE, ARCH.GRANITE_HYBRID)
DELTA = (ARCH.QWEN3NEXT, ARCH.QWEN35, ARCH.QWEN35MOE)
RECURRENT = (ARCH.MAMBA2, ARCH.GRANITE_HYBRID, *DELTA)


def convert_to_gguf(model: Any, architecture: gguf.MODEL_ARCH, path: Path, *, num_guessing: int = 0) -> Path:
    """Write the file as llama.cpp's converter does: other names, some weights in another order or form.

    ``num_guessing``: layers behind the last that would guess further tokens, copies of the last.
    """
    config, tensors = model.config, dict(model.state_dict())
    if architecture in RECURRENT:
        add_states(config, tensors, architecture)
    if architecture in (ARCH.QWEN35, ARCH.QWEN35MOE):
        tile_heads(config, tensors)
    heads, hidden = getattr(config, "num_attention_heads", 0), config.hidden_size  # Mamba-2 has none
    head_dim = getattr(config, "head_dim", None) or hidden // max(1, heads)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers + num_guessing)
    if num_guessing:
        writer.add_nextn_predict_layers(num_guessing)
    writer.add_context_length(getattr(config, "max_position_embeddings", 128))
    writer.add_embedding_length(hidden)
    inner = getattr(config, "ffn_hidden_size", None) or getattr(config, "intermediate_size", 4 * hidden * bool(heads))
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    if rope := getattr(config, "rope_parameters", None):
        rope = rope.get("full_attention", rope)
        if rope["rope_type"] == "llama3":  # its factors are a tensor
            plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
            writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
        elif rope["rope_type"] != "default":
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(rope["rope_theta"])
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if architecture in RECURRENT:
        add_sizes_of_states(writer, config, architecture)
    elif kv_heads:
        writer.add_head_count_kv(kv_heads)
    if architecture in WITH_LAYER_NORM:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon)
        if heads:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    if architecture in (ARCH.GRANITE, ARCH.GRANITE_HYBRID):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture in (ARCH.COMMAND_R, ARCH.COHERE2):
        writer.add_logit_scale(config.logit_scale)
    if architecture in (ARCH.PHI3, ARCH.GEMMA2, ARCH.GEMMA3, ARCH.COHERE2, ARCH.GPT_OSS):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == ARCH.DEEPSEEK2:
        add_latents(writer, config, tensors)
    elif "experts" in "".join(tensors):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        )
        split_experts(tensors, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "tt", *(f"t{i}" for i in range(2, config.vocab_size))])
    writer.add_array("tokenizer.ggml.merges", ["t t"])
    for number in range(num_guessing):
        own, last = f".{config.num_hidden_layers + number}.", f".{config.num_hidden_layers - 1}."
        tensors |= {name.replace(last, own, 1): values for name, values in tensors.items() if f"layers{last}" in name}
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers + num_guessing)
    for name, values in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(
            str(names.get_name(name, (".weight", ".bias"))),
            converted(name, values, architecture, head_dim=head_dim).contiguous().numpy(),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_states(config: Any, tensors: dict[str, Tensor], architecture: gguf.MODEL_ARCH) -> None:
    """Recurrent layers: decays without their logarithm, convolutions and norms in other shapes, some products apart."""
    groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", None)
    for name in list(tensors):
        values, stem = tensors[name], name.rpartition(".")[0]
        if name.endswith("conv1d.weight"):
            tensors[name] = values.squeeze()
        elif name.endswith((".A_log", ".D")):
            values = values if name.endswith(".D") else -values.exp()
            tensors[name] = values if architecture in DELTA else values[:, None]
        elif name.endswith(".dt_bias"):
            tensors[f"{stem}.dt_proj.bias"] = tensors.pop(name)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensors[name] = values.view(groups, -1)
        elif ".shared_mlp." in name:
            del tensors[name]
            mlp = f"{name.partition('.shared_mlp.')[0]}.mlp" + (".shared_expert" if config.num_local_experts else "")
            roles = ("gate", "up") if "input_linear" in name else ("down",)
            parts = values.chunk(len(roles))
            tensors |= {f"{mlp}.{role}_proj.weight": part for role, part in zip(roles, parts, strict=True)}
        elif ".block_sparse_moe." in name:
            del tensors[name]
            tensors[name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")] = values
        elif name.endswith("in_proj_qkvz.weight"):
            del tensors[name]
            heads, keys = config.linear_num_value_heads // config.linear_num_key_heads, config.linear_key_head_dim
            width = heads * config.linear_value_head_dim
            of_groups = values.view(config.linear_num_key_heads, -1, values.shape[1])
            parts = [part.flatten(0, 1) for part in of_groups.split([keys, keys, width, width], dim=1)]
            tensors[f"{stem.removesuffix('_qkvz')}_qkv.weight"] = torch.cat(parts[:3])
            tensors[f"{stem.removesuffix('_qkvz')}_z.weight"] = parts[3]


def tile_heads(config: Any, tensors: dict[str, Tensor]) -> None:
    """Qwen3.5: the heads of values stand as their keys repeat, not beside those that share their key."""
    groups, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    values, shared = heads * width, 2 * groups * config.linear_key_head_dim
    order = torch.arange(heads).view(groups, -1).T.flatten()
    wide = (order[:, None] * width + torch.arange(width)).flatten()
    for name in [name for name in tensors if ".linear_attn." in name]:
        old, axis = tensors[name], 1 if "out_proj" in name else 0
        if old.shape[axis] == shared + values:
            tensors[name] = torch.cat([old[:shared], old[shared:][wide]])
        elif old.shape[axis] == values:
            tensors[name] = old.index_select(axis, wide)
        elif old.shape[axis] == heads:
            tensors[name] = old[order]


def add_sizes_of_states(writer: gguf.GGUFWriter, config: Any, architecture: gguf.MODEL_ARCH) -> None:
    if architecture in DELTA:
        sizes = (config.linear_conv_kernel_dim, config.linear_key_head_dim, config.linear_num_key_heads)
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        if architecture != ARCH.QWEN35:
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        if architecture != ARCH.QWEN3NEXT:
            writer.add_rope_dimension_sections([11, 11, 10, 0])
    elif architecture == ARCH.MAMBA2:
        sizes, heads, width = (
            (config.conv_kernel, config.state_size, config.n_groups),
            config.num_heads,
            config.head_dim,
        )
    else:
        sizes = (config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups)
        heads, width = config.mamba_n_heads, config.mamba_d_head
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(sizes[0])
    writer.add_ssm_state_size(sizes[1])
    writer.add_ssm_group_count(sizes[2])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)


def split_experts(tensors: dict[str, Tensor], architecture: gguf.MODEL_ARCH) -> None:
    """transformers keeps gates and ups in one tensor, and without ``.weight``; the files do not."""
    if architecture == ARCH.GPT_OSS:
        split_clamped_experts(tensors)
        return
    for name in [name for name in tensors if ".experts." in name]:
        values, stem = tensors.pop(name), name.rpartition(".")[0]
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        if architecture == gguf.MODEL_ARCH.LLAMA:
            stem, (gate, up, down) = stem.replace(".mlp.", ".block_sparse_moe."), ("w1", "w3", "w2")
        parts = dict(zip((gate, up), values.chunk(2, dim=1), strict=True)) if "gate_up" in name else {down: values}
        tensors |= {f"{stem}.{role}.weight": part for role, part in parts.items()}


def add_latents(writer: gguf.GGUFWriter, config: Any, tensors: dict[str, Tensor]) -> None:
    """As llama.cpp's converter does since it keeps latents: the products of keys turned, those of values apart."""
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    split_experts(tensors, ARCH.DEEPSEEK2)
    for name in [name for name in tensors if "kv_b_proj" in name]:
        heads = tensors.pop(name).view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        tensors[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
        tensors[name.replace("kv_b_proj", "v_b_proj")] = values
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensors.pop(name)


def split_clamped_experts(tensors: dict[str, Tensor]) -> None:
    """gpt-oss keeps gates and ups beside each other, in columns; sinks and experts without ``.weight``."""
    for name in [name for name in tensors if ".experts." in name or name.endswith(".sinks")]:
        values, stem, is_bias = tensors.pop(name), name.rpartition(".")[0], name.endswith("_bias")
        part = "bias" if is_bias else "weight"
        if name.endswith(".sinks"):
            tensors[f"{name}.weight"] = values
            continue
        columns = values if is_bias else values.transpose(1, 2)
        if "gate_up" in name:
            gates, ups = (columns[:, i::2] for i in range(2))
            tensors |= {f"{stem}.gate_proj.{part}": gates, f"{stem}.up_proj.{part}": ups}
        else:
            tensors[f"{stem}.down_proj.{part}"] = columns


def converted(name: str, values: Tensor, architecture: gguf.MODEL_ARCH, *, head_dim: int) -> Tensor:
    if architecture == gguf.MODEL_ARCH.GPT2 and ".c_" in name and values.ndim == 2:
        return values.T
    if architecture in ONE_PLUS and "norm" in name and "linear_attn" not in name:
        return values + 1
    if name.endswith("shared_expert_gate.weight"):
        return values.squeeze()
    if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        return values.view(-1, 2, head_dim // 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
    return values
