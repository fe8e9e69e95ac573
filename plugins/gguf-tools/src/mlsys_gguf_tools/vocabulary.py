"""A directory's tokenizer as a GGUF file's metadata.

Called by :mod:`.huggingface`. GGUF names how a byte-level vocabulary cuts text instead of spelling it, so a name is
found as llama.cpp's converter finds it: by the tokens of texts that the known ways cut differently. What is written is
read back by :mod:`mlsys_orca.loading.gguf_tokenizer` and compared with the original; where they differ, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.gguf_tokenizer import DISTINCT_NAMES, PRE_TOKENIZERS, tokenizer_from_gguf
from mlsys_orca.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eot", "eom")  # for ends beside the end of text
_PROBES = (
    "Hello, world! It's 2024; they'll WON'T I'd've.",
    "  two  spaces\n\nlines \r\n\t tabs   \n   end  ",
    "12345678901 3.14159 1,000,000 x2y3 ٣٤٥ ²³ Ⅷ",
    "naïve café Ünïcödé e\u0301 ﬁ Ａ 日本語の文章です。中文字符 한국어 ไทย हिन्दी العربية עברית",
    "camelCaseWordsHTTPServer snake_case_words __init__ a/b\\c <tag attr='1'>{}[]()#$%^&*~`",
    "🙂👩‍👩‍👧‍👦🇩🇪 \u200b\u00a0\u3000 … “quoted” – dash",
    "def f(x):\n    return x ** 2  # comment\n\n\n'''s''' \"t\" 's 'S 'll'LL",
    "",
    "a",
    " leading",
)


def vocabulary_metadata(
    state: Mapping[str, Any], tokenizer: Tokenizer, *, vocab_size: int, template: str | None
) -> dict[str, Any]:
    """Return the metadata's entries about tokens.

    Args:
        state: The object in ``tokenizer.json``.
        tokenizer: The same, as Orca reads it.
        vocab_size: Rows of the embedding table.
        template: The chat template.

    Raises:
        InvalidInputError: a GGUF cannot say what this tokenizer does.
    """
    tokens, types = _tokens(state, vocab_size)
    shared: dict[str, Any] = {"tokens": tokens, "token_type": types, **_ids(tokenizer, tokens)}
    found: dict[str, Any] = {}
    for rules in _candidates(state, tokens, types):
        found = {f"tokenizer.ggml.{key}": value for key, value in (shared | rules).items()}
        if _agree(tokenizer, tokenizer_from_gguf(found)):
            break
    else:
        raise InvalidInputError(
            "no kind of tokenizer that a GGUF can name gives the tokens of this directory's: "
            f"of byte-level ones {', '.join(sorted(PRE_TOKENIZERS))}, and SentencePiece's, were compared"
        )
    return found if template is None else found | {"tokenizer.chat_template": template}


def _tokens(state: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token; rows of the table that have none get a placeholder."""
    model = state.get("model") or {}
    kind, vocab = model.get("type"), model.get("vocab")
    if kind != "BPE" or not isinstance(vocab, dict):
        raise InvalidInputError(f"a tokenizer of kind {kind!r} is not written to GGUF; byte-pair encodings are (BPE)")
    by_id = {token_id: (text, _NORMAL) for text, token_id in vocab.items()}
    if model.get("byte_fallback"):
        by_id |= {i: (text, _BYTE) for i, (text, _) in by_id.items() if len(text) == 6 and text.startswith("<0x")}
        unknown = model.get("unk_token")
        by_id |= {i: (text, _UNKNOWN) for i, (text, _) in by_id.items() if text == unknown}
    for added in state.get("added_tokens") or ():
        known = by_id.get(added["id"], ("", _NORMAL))[1]
        kind_of = _CONTROL if added.get("special") else _USER_DEFINED
        by_id[added["id"]] = (added["content"], _UNKNOWN if known == _UNKNOWN else kind_of)
    if by_id and max(by_id) >= vocab_size:
        raise InvalidInputError(f"the tokenizer has the token {max(by_id)}, and the embedding table {vocab_size} rows")
    pairs = [by_id.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(vocab_size)]
    return [text for text, _ in pairs], [kind_of for _, kind_of in pairs]


def _ids(tokenizer: Tokenizer, tokens: list[str]) -> dict[str, Any]:
    """Return the ids of the tokens with a role."""
    id_of = {text: i for i, text in reversed(list(enumerate(tokens)))}
    roles = {role: id_of[text] for role, text in tokenizer.special_tokens.items() if text in id_of}
    ids = {f"{_ROLES[role]}_token_id": token_id for role, token_id in roles.items()}
    ends = sorted(tokenizer.eos_ids - {ids.get("eos_token_id")})
    if ends and "eos_token_id" not in ids:
        ids["eos_token_id"] = ends.pop(0)
    if len(ends) > len(_END_KEYS):
        raise InvalidInputError(
            f"generation ends at {len(tokenizer.eos_ids)} tokens; a GGUF has room for {len(_END_KEYS) + 1}"
        )
    ids |= {f"{key}_token_id": token_id for key, token_id in zip(_END_KEYS, ends, strict=False)}
    bare, marked = (tokenizer.encode("a", add_bos=add) for add in (False, True))
    return ids | {"add_bos_token": bare != marked and marked[:1] == [ids.get("bos_token_id")]}


def _candidates(state: Mapping[str, Any], tokens: list[str], types: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the kinds of tokenizer that a GGUF can name, with what each needs beside the tokens."""
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)  # written either way, by version
        for merge in state["model"].get("merges") or ()
    ]
    if state["model"].get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault("".join(merge.split(" ")), rank)
        plain = float(-len(merges))  # of what no merge makes
        scores = [
            float(-ranks[text]) if text in ranks else plain if kind == _NORMAL else 0.0
            for text, kind in zip(tokens, types, strict=True)
        ]
        for prefix in (False, True):
            yield {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}
    else:
        takes_whole_words = bool(state["model"].get("ignore_merges"))
        for name in (each for each in DISTINCT_NAMES if PRE_TOKENIZERS[each].whole_words_first == takes_whole_words):
            yield {"model": "gpt2", "pre": name, "merges": merges}


def _agree(given: Tokenizer, read: Tokenizer) -> bool:
    unknown = given.special_tokens.get("unk_token")  # which no one spells
    texts = [*_PROBES, *(f"a{text} b" for text in given.control_tokens if text != unknown)]
    ways = [(special, bos) for special in (False, True) for bos in (False, True)]
    for text in texts:
        for special, bos in ways:
            ids = given.encode(text, allow_special=special, add_bos=bos)
            if read.encode(text, allow_special=special, add_bos=bos) != ids or read.decode(ids) != given.decode(ids):
                return False
    return given.eos_ids == read.eos_ids
