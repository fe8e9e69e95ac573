"""Small random checkpoints that transformers writes, loaded by Orca: every shape and layout the family comes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from torch import Tensor

from tests.conformance.orca.to_gguf import convert_to_gguf

VOCAB = 256
PROMPTS = [[5], list(range(40, 60)), [7, 7, 7], list(range(200, 160, -1)), [1, 250, 3, 99]]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped-heads": {"num_key_value_heads": 2},
    "one-kv-head": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "tied": {"tie_word_embeddings": True},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "rope-llama3": {"rope_parameters": LLAMA3},
}


def write_directory(path: Path, *, family: str = "Llama", max_shard_size: str = "1GB", **changes: Any) -> Any:
    """A model directory as transformers saves one, with a byte-sized vocabulary; returns the model."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(BASE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones otherwise, which would hide a norm's weight
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "t9"}, "chat_template": "x"}))
    return model


def logits(loaded: LoadedModel, prompts: list[list[int]]) -> Tensor:
    cache = new_kv_cache(loaded.model, num_blocks=64)
    builder = BatchBuilder()
    for i, prompt in enumerate(prompts):
        table = tuple(range(8 * i, 8 * i + 8))
        builder.add(str(i), prompt, num_computed_tokens=0, block_table=table, sampling=SamplingParams())
    with torch.inference_mode():
        out: Tensor = loaded.model(
            ForwardInputs(builder.build(), block_size=cache.block_size, device=loaded.model.device), cache
        )
    return out


def assert_same_model(loaded: LoadedModel, reference: Any, greedy_by_orca: Callable[..., list[list[int]]]) -> None:
    with torch.inference_mode():
        expected = torch.stack([reference(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
        answers = [
            reference.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # guessed from padding tokens otherwise
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
            )
            for prompt in PROMPTS
        ]
    assert expected.std() > 0.5  # distinct enough for greedy choices to mean something
    assert torch.allclose(logits(loaded, PROMPTS), expected, atol=1e-4)
    loaded.tokenizer.eos_ids = frozenset()  # the reference does not stop either
    expected_tokens = [answer[0, len(prompt) :].tolist() for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert greedy_by_orca(loaded, PROMPTS, 24, joins=[0, 2, 5, 5, 9]) == expected_tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_directory_runs_as_in_transformers(tmp_path: Path, variant: str, greedy_by_orca: Any) -> None:
    reference = write_directory(tmp_path, **VARIANTS[variant])
    assert_same_model(load_model(tmp_path, dtype="fp32"), reference, greedy_by_orca)


def test_shards_are_joined_by_their_index(tmp_path: Path, greedy_by_orca: Any) -> None:
    reference = write_directory(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same_model(load_model(tmp_path, dtype="fp32"), reference, greedy_by_orca)


def test_mistral_runs_on_the_same_class(tmp_path: Path, greedy_by_orca: Any) -> None:
    reference = write_directory(tmp_path, family="Mistral", num_key_value_heads=2, sliding_window=100)
    loaded = load_model(tmp_path, dtype="fp32")
    assert loaded.config.max_positions == 128
    assert loaded.config.windows == (100, 100, 100)
    assert_same_model(loaded, reference, greedy_by_orca)


@pytest.mark.parametrize("variant", ["grouped-heads", "tied", "rope-llama3"])
def test_a_converted_gguf_runs_as_the_original(tmp_path: Path, variant: str, greedy_by_orca: Any) -> None:
    reference = write_directory(tmp_path, **VARIANTS[variant])
    path = convert_to_gguf(reference, gguf.MODEL_ARCH.LLAMA, tmp_path / "model.gguf")
    assert_same_model(load_model(path, dtype="fp32"), reference, greedy_by_orca)


def test_the_directory_says_how_to_use_the_model(tmp_path: Path) -> None:
    write_directory(tmp_path)
    settings = {"eos_token_id": [1, 4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    loaded = load_model(tmp_path, dtype="fp32")
    assert loaded.tokenizer.eos_ids == {1, 4, 9}
    assert loaded.chat_template is not None
    assert loaded.chat_template.source == "x"
    (tmp_path / "chat_template.jinja").write_text("newer")
    (tmp_path / "generation_config.json").write_text("{}")
    reloaded = load_model(tmp_path, dtype="fp32")
    assert reloaded.chat_template is not None
    assert reloaded.chat_template.source == "newer"
    assert reloaded.tokenizer.eos_ids == {1, 9}


def test_a_tokenizer_file_that_cuts_and_pads_does_not(tmp_path: Path) -> None:
    write_directory(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_model(tmp_path, dtype="fp32").tokenizer.encode("t3 t4 t5") == [3, 4, 5]


def damage_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def damage_shard(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')


def damage_escape(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')


def damage_index_entry(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"absent": "model.safetensors"}}')


def damage_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def damage_truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def damage_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def damage_architecture(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))


def damage_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def damage_tokenizer_content(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")


def damage_dtype(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_pickle, "pickle, which can run any code"),
        (damage_shard, r"model-2\.safetensors is missing"),
        (damage_escape, "which is not inside it"),
        (damage_index_entry, "lack 'absent'"),
        (damage_index, "no index of shards"),
        (damage_truncate, "truncated or no safetensors"),
        (damage_config, "no valid JSON"),
        (damage_architecture, "no forward of ours has the architecture 'rwkv'.* a state beside"),
        (damage_tokenizer, r"tokenizer\.json is missing"),
        (damage_tokenizer_content, "damaged or of an unknown kind"),
        (damage_dtype, "type I8"),
    ],
)
def test_a_damaged_directory_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_directory(tmp_path)
    damage(tmp_path)
    with pytest.raises(InvalidInputError, match=message):
        load_model(tmp_path, dtype="fp32")
