import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.gguf_tokenizer import DISTINCT_NAMES, PRE_TOKENIZERS, tokenizer_from_gguf
from mlsys_orca.loading.huggingface import read_tokenizer
from mlsys_orca.text.tokenizer import Detokenizer, Tokenizer
from tokenizers import decoders, models, pre_tokenizers


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


ALPHABET = byte_alphabet()
# 0 and 1 are control tokens, 2 to 257 the bytes in order, then merged ones and one that the user defined.
TOKENS = [
    "<s>",
    "</s>",
    *ALPHABET,
    "he",
    "hel",
    "ĠĠ",
    "Ġ1",
    "12",
    "123",
    "e\u0301".encode().decode("latin1"),
    "<think>",
]


def fields(**changes: Any) -> dict[str, Any]:
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [3, 3] + [1] * (len(TOKENS) - 3) + [4],
        "merges": ["h e", "he l", "Ġ Ġ", "Ġ 1", "1 2", "12 3"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items() if value is not None}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(fields())


def spelled(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [TOKENS[token_id] for token_id in tokenizer.encode(text, **options)]


def test_merges_apply_in_order(tokenizer: Tokenizer) -> None:
    assert spelled(tokenizer, "hello he") == ["hel", "l", "o", "Ġ", "he"]
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.eos_ids == {1}


def test_control_tokens_are_text_unless_allowed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("</s>h", allow_special=True)[0] == 1
    assert spelled(tokenizer, "</s>h") == ["<", "/", "s", ">", "h"]
    assert tokenizer.control_tokens == {"<s>": 0, "</s>": 1}
    for allow in (True, False):  # user-defined tokens are whole either way
        assert spelled(tokenizer, "h<think>e", allow_special=allow) == ["h", "<think>", "e"]


def test_tokens_added_beyond_the_vocabulary_keep_their_ids() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "<": 1}, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>"])
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, eos_ids=())
    assert tokenizer.encode("a<s><think></s>", allow_special=True) == [0, 2, 3, 4]
    assert tokenizer.encode("a<s><think></s>") == [0, 1, 3, 1]


def test_decoding_leaves_control_tokens_out_or_in(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>hé</s>", allow_special=True)
    assert tokenizer.decode(ids) == "hé"
    assert tokenizer.decode(ids, skip_special=False) == "<s>hé</s>"
    assert tokenizer.token_id("he") == TOKENS.index("he")
    assert tokenizer.token_id("absent") is None


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "  123", ["Ġ", "Ġ1", "2", "3"]),  # the last space joins the number
        ("smollm", "  123", ["ĠĠ", "1", "2", "3"]),  # digits stand alone
        ("llama-bpe", "1234", ["123", "4"]),  # threes
        ("qwen2", "123", ["1", "2", "3"]),
        ("default", "12", ["12"]),
        ("dbrx", "1234", ["123", "4"]),
        ("tekken", "12", ["1", "2"]),
        ("tekken", "hehel", ["he", "hel"]),
        ("tekken", "hHe", ["h", "H", "e"]),
    ],
)
def test_each_pre_tokenizer_cuts_its_way(pre: str, text: str, pieces: list[str]) -> None:
    assert spelled(tokenizer_from_gguf(fields(pre=pre)), text) == pieces


def test_tekken_cuts_words_before_capitals_and_dbrx_does_not() -> None:
    """The cut depends on whether `l H` may join; Tekken then takes whole tokens first."""
    joins = {"tokens": [*TOKENS[:-1], "lH", "<think>"], "token_type": [3, 3] + [1] * (len(TOKENS) - 2) + [4]}
    for pre, expected in (("dbrx", ["he", "lH", "e"]), ("tekken", ["hel", "H", "e"])):
        cut = tokenizer_from_gguf(fields(pre=pre, **joins, merges=["h e", "l H"]))
        assert [cut.decode([token_id]) for token_id in cut.encode("helHe")] == expected


def test_qwen2_composes_characters_and_llama_takes_whole_tokens_first() -> None:
    decomposed = "e\u0301"
    assert len(tokenizer_from_gguf(fields(pre="qwen2")).encode(decomposed)) == 2  # U+00E9 is two bytes
    assert len(tokenizer_from_gguf(fields(pre="gpt-2")).encode(decomposed)) == 3
    without_steps = fields(pre="llama-bpe", merges=["h e"])
    assert spelled(tokenizer_from_gguf(without_steps), "hel") == ["hel"]
    assert spelled(tokenizer_from_gguf(without_steps | {"tokenizer.ggml.pre": "gpt-2"}), "hel") == ["he", "l"]


def test_a_prompt_starts_with_bos_where_the_file_says_so() -> None:
    assert tokenizer_from_gguf(fields(add_bos_token=True)).encode("h", add_bos=True)[0] == 0
    assert tokenizer_from_gguf(fields(add_bos_token=True)).encode("h", add_bos=True, allow_special=True)[0] == 0
    assert tokenizer_from_gguf(fields(add_bos_token=True)).encode("h")[0] != 0
    assert tokenizer_from_gguf(fields()).encode("h", add_bos=True)[0] != 0
    assert tokenizer_from_gguf(fields(pre="llama-bpe")).encode("h", add_bos=True)[0] == 0


def test_every_end_token_counts() -> None:
    assert tokenizer_from_gguf(fields(eot_token_id=0)).eos_ids == {0, 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'.*tokenizer.json"),
        ({"model": None}, "None"),
        ({"pre": "kimi-k2"}, "'kimi-k2' is not known; known are a.x-4.0, bailingmoe"),
        ({"tokens": []}, "0 tokens"),
        ({"merges": None}, "0 merges"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": ["q zz"]}, "do not fit"),
    ],
)
def test_other_vocabularies_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tokenizer_from_gguf(fields(**changes))


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match="valid Unicode"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("pre", DISTINCT_NAMES)
@settings(max_examples=25)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(pre: str, text: str) -> None:
    import unicodedata

    tokenizer = tokenizer_from_gguf(fields(pre=pre))
    expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].composes_unicode else text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == expected


def test_a_character_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in tokenizer.encode("né€😀h")] == [
        *("n", "", "é", "", "", "€", "", "", "", "😀", "h")
    ]
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(2 + 0xE2) == ""
    assert detokenizer.push(2 + 0x82) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_can_begin_no_character_come_at_once(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(2 + byte) for byte in (0xFF, 0xE2, 0x68)] == ["\ufffd", "", "\ufffdh"]


def test_the_prompts_end_is_context() -> None:
    """A SentencePiece decoder drops the first space of a text, which is not the first space of an answer."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, eos_ids=())
    after_prompt = Detokenizer(tokenizer, prompt_ids=[1])
    assert [after_prompt.push(token) for token in (2, 3, 2, 2)] == [" world", "!", " world", " world"]
    at_the_start = Detokenizer(tokenizer)
    assert [at_the_start.push(token) for token in (2, 2)] == ["world", " world"]


@pytest.mark.parametrize("splits", [True, False])
def test_a_directory_may_say_that_control_tokens_in_a_text_are_text(tmp_path: Path, splits: bool) -> None:
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(byte_alphabet())}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "split_special_tokens": splits}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("a<s>b")["input_ids"]
    assert read_tokenizer(tmp_path, options).encode("a<s>b", allow_special=True) == theirs
    assert len(theirs) == (5 if splits else 3)
