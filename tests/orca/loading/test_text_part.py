"""Directories of models that also see pictures, as transformers saves them: their text part, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "sliding_window": 6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE: dict[str, Any] = VISION | {"image_size": 28, "patch_size": 14}
QWEN: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LAYERS = ["sliding_attention", "full_attention"]


def write_directory(path: Path, name: str, *, is_tied: bool) -> Any:
    import transformers

    torch.manual_seed(9)
    if name == "gemma3":
        text = TEXT | {"layer_types": LAYERS, "tie_word_embeddings": is_tied}
        config: Any = transformers.Gemma3Config(
            text_config=text, vision_config=PICTURE, mm_tokens_per_image=4, tie_word_embeddings=is_tied
        )
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    elif name == "qwen3_5":
        text = {key: value for key, value in TEXT.items() if key != "sliding_window"} | QWEN
        picture = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=picture, tie_word_embeddings=is_tied)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        text = TEXT | {"model_type": "mistral", "tie_word_embeddings": is_tied}
        picture = PICTURE | {"model_type": "pixtral"}
        config = transformers.Mistral3Config(text_config=text, vision_config=picture, tie_word_embeddings=is_tied)
        model = transformers.Mistral3ForConditionalGeneration(config)
    if not is_tied:
        model.lm_head.weight.data.mul_(15)  # it starts small, and nearly all tokens would be as likely
    model.eval().save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(96)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    return model


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_5"])
def test_the_text_part_computes_as_the_whole_does_on_text(tmp_path: Path, name: str, is_tied: bool) -> None:
    model = write_directory(tmp_path, name, is_tied=is_tied)
    loaded = load_model(tmp_path, dtype="fp32")
    assert loaded.config.windows == {"gemma3": (6, None), "mistral3": (6, 6), "qwen3_5": None}[name]
    prompt = [(5 * i + 3) % 96 for i in range(21)]
    cache = new_kv_cache(loaded.model, num_blocks=4)
    builder = BatchBuilder()
    builder.add("a", prompt, num_computed_tokens=0, block_table=(0, 1, 2, 3), sampling=SamplingParams())
    inputs = ForwardInputs(builder.build(), block_size=cache.block_size, device="cpu", wanted=range(len(prompt)))
    with torch.inference_mode():
        ours = loaded.model(inputs, cache).log_softmax(-1)
        theirs = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert theirs.std() > 0.3
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-5)


def test_a_text_part_that_no_family_of_ours_runs_is_refused(tmp_path: Path) -> None:
    raw = {"model_type": "mistral3", "text_config": {"model_type": "olmo"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInputError, match=r"Orca's own decoders lack the architecture 'olmo'.* beside its text"):
        load_model(tmp_path)
    raw = {"model_type": "gemma3", "text_config": {}, "quantization_config": {"bits": 4}}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInputError, match="quantised by other tools"):
        load_model(tmp_path)
