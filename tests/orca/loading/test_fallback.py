"""Models that transformers can't run for us are refused by name, from config.json alone; damage is found at load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_orca.loading.fallback import open_fallback
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.config import UnsupportedModelError
from safetensors.torch import load_file, save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}


def write_config(path: Path, model_type: str, **changes: Any) -> dict[str, Any]:
    raw = SHAPE | {"model_type": model_type} | changes
    (path / "config.json").write_text(json.dumps(raw))
    return raw


def write_checkpoint(path: Path, family: str = "Olmo2", **changes: Any) -> None:
    """A small random model; tokenizer apart."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | {"initializer_range": 0.3} | changes))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bloom", {"n_head": 4}, "positions that cannot be given"),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "positions that cannot be given"),
        ("falcon", {"alibi": True}, "a bias by distance"),
        ("falcon", {}, "an attention that transformers' attention interface does not reach"),
        ("codegen", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 8}, "use .* attention interface 0 times"),
        ("mamba", {}, "layers of type 'linear_attention'"),
        ("rwkv", {}, "a state beside keys and values"),
        ("qwen3_next", LINEAR, "layers of type 'linear_attention'"),
        ("llama4_text", {}, "layers of type 'chunked_attention'"),
        ("deepseek_v3", {"kv_lora_rank": 16}, r"latent attention \(kv_lora_rank\)"),
        ("minicpm3", {"kv_lora_rank": 0, "qk_rope_head_dim": 8}, "features and values of"),
        ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 8}, "layers of type 'linear_attention'"),
        ("falcon_h1", {}, "layers of type 'hybrid'"),
        ("granitemoehybrid", {"mamba_n_heads": 8, "mamba_d_head": 8}, "layers of type 'linear_attention'"),
        ("mamba2", {"num_heads": 8, "head_dim": 8}, "layers of type 'linear_attention'"),
        ("doge", {}, "a mask of its own"),
        ("bert", {}, "other keys than the last so many"),
        ("t5", {}, "an encoder beside the decoder"),
        ("whisper", {"is_encoder_decoder": True}, "an encoder beside the decoder"),
        ("gemma3n_text", {"num_kv_shared_layers": 1}, "keys and values of others"),
        ("qwen2_vl", {}, "parts beside its text"),
        ("no_such_model", {}, "an architecture that transformers .* does not have"),
        ("olmo2", {"quantization_config": {"bits": 4}}, "quantised by other tools"),
    ],
)
def test_limits_of_ragged_attention_are_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    raw = write_config(tmp_path, model_type, **changes)  # and nothing else
    with pytest.raises(UnsupportedModelError, match=message):
        open_fallback(tmp_path, raw)


def test_the_error_names_both_ways_that_failed(tmp_path: Path) -> None:
    write_config(tmp_path, "falcon", alibi=True)
    with pytest.raises(InvalidInputError, match=r"decoders lack the architecture 'falcon'.*a bias by distance"):
        load_model(tmp_path)
    write_config(tmp_path, "qwen2", layer_types=["conv", "full_attention"])
    with pytest.raises(
        InvalidInputError, match=r"Orca's own decoders lack layers of type 'conv'.*layers of type 'conv'"
    ):
        load_model(tmp_path)


def test_code_of_the_directory_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    raw = write_config(tmp_path, "evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(UnsupportedModelError, match="code from the model's directory is never run"):
        open_fallback(tmp_path, raw)


def test_without_transformers_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, "olmo")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "mlsys-orca\[transformers\]"'):
        load_model(tmp_path)


def test_attention_options_of_each_layer_are_read_from_the_model(tmp_path: Path) -> None:
    raw = write_config(
        tmp_path, "vaultgemma", head_dim=16, query_pre_attn_scalar=64, sliding_window=5, attn_logit_softcapping=9.0
    )
    fallback = open_fallback(tmp_path, raw)
    assert fallback.options == (
        AttentionOptions(scale=0.125, softcap=9.0, window=5),
        AttentionOptions(scale=0.125, softcap=9.0),
    )
    config = fallback.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.max_positions) == (96, 64)


@pytest.mark.parametrize(
    ("rope", "max_positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
        ({"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}, 16),
    ],
    ids=["yarn", "dynamic", "dynamic-original", "longrope"],
)
def test_rotary_scaling_by_the_length_of_a_batch_ends_the_context(
    tmp_path: Path, rope: dict[str, Any], max_positions: int
) -> None:
    original = {"original_max_position_embeddings": 16} if rope["rope_type"] == "longrope" else {}
    raw = write_config(tmp_path, "olmo2", rope_parameters=rope | original | {"rope_theta": 10_000.0})
    fallback = open_fallback(tmp_path, raw)
    assert fallback.config.max_positions == max_positions
    assert fallback.source.rope_parameters["rope_type"] != "dynamic"


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    fallback = open_fallback(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    reads: list[tuple[int, int]] = []
    fallback.load(progress=lambda done, total: reads.append((done, total)), **options)
    assert reads == [(sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()),) * 2]

    tensors = load_file(tmp_path / "model.safetensors")
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    save_file(tensors | bias, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"unexpected keys: model.layers.0.self_attn.q_proj.bias"):
        fallback.load(**options)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"missing keys: model.norm.weight"):
        fallback.load(**options)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, match="a pickle"):
        fallback.load(**options)


def test_a_model_that_computes_otherwise_than_its_own_attention_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    fallback = open_fallback(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    decoder = fallback.load(dtype=torch.float32, device=torch.device("cpu"))
    decoder._options = (AttentionOptions(window=2),) * 2
    with pytest.raises(InvalidInputError, match="over a ragged batch it does not give what it does by its own"):
        decoder.verify()


def test_a_model_that_mixes_few_tokens_of_other_requests_is_refused(tmp_path: Path) -> None:
    """The comparison with its own attention is by the median token; core's check is of each request's every number."""
    write_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    decoder = open_fallback(tmp_path, raw).load(dtype=torch.float32, device=torch.device("cpu"))

    def mixes(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        first = torch.zeros_like(out)
        first[:, 0] = 0.05 * out[:, -1]  # the first token of a batch sees its last one
        return out + first

    handle = decoder.module.model.layers[-1].mlp.register_forward_hook(mixes)
    with pytest.raises(InvalidInputError, match="mixes requests"):
        decoder.verify()
    handle.remove()
    decoder.verify()
