"""Tiny models that see, with random weights: every architecture, the tokenizer of SmolLM2 and the marks of images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from tests.installed import installed_model

SIDE, PATCH, FACTOR = 32, 4, 2  # of a tile: 64 patches, 16 tokens
TEMPLATE = (  # in the manner of the architecture's own: contents are lists of parts
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
MARKS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
ARCHITECTURES = ("smolvlm", "idefics3", "idefics3-helium")  # the last has a text part that no family of ours has


def tokenizer_json() -> str:
    """SmolLM2's tokenizer with the tokens that images need."""
    from mlsys_orca.loading.gguf_tokenizer import tokenizer_from_gguf
    from mlsys_orca.model.weights.gguf_file import GgufFile

    backend = tokenizers.Tokenizer.from_str(
        tokenizer_from_gguf(GgufFile(installed_model("smollm2-135m-instruct")).metadata).to_json()
    )
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in MARKS + tiles])
    return str(backend.to_str())


def write_model(path: Path, architecture: str, tokenizer: str) -> Path:
    """Write a checkpoint as ``transformers`` and its users do."""
    import transformers

    (path / "tokenizer.json").write_text(tokenizer)
    backend = tokenizers.Tokenizer.from_str(tokenizer)
    special = {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "unk_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({**special, "pad_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    ends = backend.token_to_id("<end_of_utterance>")
    architecture, _, text_type = architecture.partition("-")
    text = {
        "model_type": text_type or "llama",
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "pad_token_id": backend.token_to_id("<|im_end|>"),
        "eos_token_id": ends,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.3,
    }
    names = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
    config = getattr(transformers, f"{names[architecture]}Config")(
        text_config=text,
        vision_config=vision,
        scale_factor=FACTOR,
        image_token_id=backend.token_to_id("<image>"),
        tie_word_embeddings=architecture == "smolvlm",
        initializer_range=0.3,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{names[architecture]}ForConditionalGeneration")(config).eval()
    with torch.no_grad():  # features as large as embeddings, so that images matter
        model.model.connector.modality_projection.proj.weight.normal_(0, 0.5)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(path)
    processor = getattr(transformers, f"{names[architecture]}ImageProcessorPil")(
        size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    if architecture == "smolvlm":  # files as older versions wrote them
        processor.save_pretrained(path)
        (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    else:
        tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **special)
        whole = transformers.Idefics3Processor(
            processor, tokens, image_seq_len=(SIDE // PATCH // FACTOR) ** 2, chat_template=TEMPLATE
        )
        whole.save_pretrained(path)
    return path


def picture(width: int, height: int, seed: int) -> Any:
    """A Pillow image in RGB of blocks of random colours."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def data_url(image: Any, kind: str = "PNG") -> str:
    """The image as a client sends it."""
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(image: Any, **fields: Any) -> dict[str, Any]:
    """The image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(image), **fields}}
