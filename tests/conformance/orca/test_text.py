"""The real file's tokenizer and chat template against what transformers makes of the same file."""

from __future__ import annotations

from typing import Any

import pytest
from mlsys_orca.loading.gguf_tokenizer import tokenizer_from_gguf
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.weights.gguf_file import GgufFile
from tokenizers import pre_tokenizers

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2-conformance")]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces,\ttabs\tand\n\nlines \n \r\n end  ",
    "don't we'll I'VE they'd",
    "naïve café Ångström straße",
    "Привет, мир! Γειά σου Κόσμε",
    "日本語のテキスト 中文文本 한국어",
    "مرحبا بالعالم שלום",
    "नमस्ते दुनिया ไทย",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 ☃️",
    "e\u0301 a\u0308 zero\u200bwidth \u00a0nbsp \u3000ideographic",
    "def f(x):\n\treturn [i**2 for i in range(x)]  # comment\n",
    '{"key": [true, null, "v\\n"]}',
    "SELECT * FROM t WHERE a<>b;-- --",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|><repo_name>x<file_sep>",
    "<|im_start|<|im_end|>|>",
    "\x00\x07\x7f\ufeff\ufffd",
    "x" * 300,
    "ﬁ ligature",
]
NUMBERS = [
    "12345",
    "  42",
    "a1b22 333",
    "3.14159e-10",
    "\n\n7",
    "1,000,000 € 50%",
    "٣٤٥ १२३",
    "Ⅷ ½ x² ①",
    "x = 10\n    y  = 20",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(smollm2: LoadedModel, reference_tokenizer: Any, text: str) -> None:
    expected = reference_tokenizer.encode(text, add_special_tokens=False)
    assert smollm2.tokenizer.encode(text, allow_special=True) == expected
    plain = reference_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert smollm2.tokenizer.encode(text) == plain
    for skip in (True, False):
        decoded = reference_tokenizer.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert smollm2.tokenizer.decode(expected, skip_special=skip) == decoded


@pytest.mark.parametrize("text", NUMBERS)
def test_digits_stand_alone_as_the_models_own_tokenizer_has_them(
    smollm2: LoadedModel, reference_tokenizer: Any, text: str
) -> None:
    """transformers does not know the name 'smollm' and cuts as GPT-2; SmolLM2's tokenizer.json says digits first."""
    backend = reference_tokenizer.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        assert smollm2.tokenizer.encode(text) == reference_tokenizer.encode(text, add_special_tokens=False)
    finally:
        backend.pre_tokenizer = before


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2"])
def test_the_other_pre_tokenizers_cut_as_transformers_does(model_path: Any, pre: str) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    metadata = GgufFile(model_path).metadata | {"tokenizer.ggml.pre": pre}
    names = {"tokens": "tokens", "merges": "merges", "token_type": "token_type", "tokenizer_type": "model"}
    fields = {name: metadata[f"tokenizer.ggml.{key}"] for name, key in names.items()}
    reference, _ = convert_gguf_tokenizer("llama", fields | {"pre_tokenizer_type": pre})
    tokenizer = tokenizer_from_gguf(metadata)
    for text in [*TEXTS, *NUMBERS]:
        if pre == "qwen2" and "\u0301" in text:
            continue  # Qwen2's own tokenizer.json composes characters first, the conversion does not
        assert tokenizer.encode(text, allow_special=True) == reference.encode(text, add_special_tokens=False).ids, text


def test_every_token_decodes_alike(smollm2: LoadedModel, reference_tokenizer: Any) -> None:
    assert smollm2.tokenizer.vocab_size == len(reference_tokenizer) == 49152
    for start in range(0, 49152, 1000):
        ids = list(range(start, min(start + 1000, 49152)))
        assert smollm2.tokenizer.decode(ids, skip_special=False) == reference_tokenizer.decode(ids)
    assert smollm2.tokenizer.eos_ids == {2}
    assert smollm2.tokenizer.control_tokens["<|im_end|>"] == 2


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n there "}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "é😀"},
        ],
        [{"role": "tool", "content": "{'a': 1}", "name": "f"}],
    ],
)
def test_chats_render_as_in_transformers(
    smollm2: LoadedModel, reference_tokenizer: Any, messages: Any, add_generation_prompt: bool
) -> None:
    template = smollm2.chat_template
    assert template is not None
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    text = reference_tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert template.render(messages, **options) == text
    ids = reference_tokenizer.apply_chat_template(messages, return_dict=False, **options)
    assert template.encode(messages, smollm2.tokenizer, **options) == ids
