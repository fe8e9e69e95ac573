"""Directories as transformers saves them: shards, what the files say of the model's use, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import load_model
from safetensors.torch import load_file, save_file

from tests.conformance.orca.families import CASES, log_probabilities, write_checkpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, CASES["llama"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "t9"}, "chat_template": "x"}))
    return tmp_path


def test_shards_are_joined_by_their_index(path: Path) -> None:
    import transformers

    whole = load_model(path, dtype="fp32")
    transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(path, max_shard_size="60KB")
    (path / "model.safetensors").unlink()
    assert len(list(path.glob("*.safetensors"))) > 3
    prompts = [[5, 6], [7]]
    both = (log_probabilities(each, prompts) for each in (load_model(path, dtype="fp32"), whole))
    assert all(map(torch.equal, *both))


def test_the_directory_says_how_to_use_the_model(path: Path) -> None:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    loaded = load_model(path, dtype="fp32")
    assert loaded.tokenizer.eos_ids == {1, 4, 9}
    assert loaded.chat_template is not None
    assert loaded.chat_template.source == "x"
    (path / "chat_template.jinja").write_text("newer")
    (path / "generation_config.json").write_text("{}")
    reloaded = load_model(path, dtype="fp32")
    assert reloaded.chat_template is not None
    assert reloaded.chat_template.source == "newer"
    assert reloaded.tokenizer.eos_ids == {1, 9}


def test_a_tokenizer_file_that_cuts_and_pads_does_not(path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    assert load_model(path, dtype="fp32").tokenizer.encode("t3 t4 t5") == [3, 4, 5]


def changed(name: str, change: str | Callable[[str], str]) -> Callable[[Path], object]:
    """Return what gives the file another text."""
    return lambda path: (path / name).write_text(
        change if isinstance(change, str) else change((path / name).read_text())
    )


def shards(index: object) -> Callable[[Path], object]:
    return changed("model.safetensors.index.json", json.dumps({"weight_map": index}))


def cut_in_half(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def of_another_dtype(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            "pickle, which can run any code",
        ),
        (shards({"a": "model-2.safetensors"}), r"model-2\.safetensors is missing"),
        (shards({"a": "../elsewhere.safetensors"}), "which is not inside it"),
        (shards({"absent": "model.safetensors"}), "lack 'absent'"),
        (shards(3), "no index of shards"),
        (cut_in_half, "truncated or no safetensors"),
        (changed("config.json", "{"), "no valid JSON"),
        (
            changed("config.json", lambda text: json.dumps(json.loads(text) | {"model_type": "rwkv"})),
            "Orca's own decoders lack the architecture 'rwkv'.* a state beside",
        ),
        (lambda path: (path / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (changed("tokenizer.json", "{}"), "damaged or of an unknown kind"),
        (of_another_dtype, "type I8"),
    ],
)
def test_a_damaged_directory_is_refused(path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(path)
    with pytest.raises(InvalidInputError, match=message):
        load_model(path, dtype="fp32")
