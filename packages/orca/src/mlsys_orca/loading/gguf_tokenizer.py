"""Convert a GGUF file's vocabulary, merges and token types to a :class:`~mlsys_orca.text.tokenizer.Tokenizer`.

Byte-level vocabularies, and SentencePiece's of both kinds: pieces that merge, and unigrams. For a
byte-level one a GGUF names the pre-tokenizer (how text is cut before merging) instead of spelling it; a wrong one would
change ids silently, so one that :data:`PRE_TOKENIZERS` does not know is refused. Patterns are those of the models' own
``tokenizer.json``; ``tests/oracles/gguf_splits`` compares the tokens with llama.cpp's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlsys_core.errors import InvalidInputError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlsys_orca.text.tokenizer import Tokenizer

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

# DeepSeek's: numbers, ideographs, then a sign with a word behind it.
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+", _DEEPSEEK_WORDS)
_IDEOGRAPHS = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _words(*, number: str) -> str:
    """Return the pattern of words with at most one leading sign, numbers, signs, line ends, spaces."""
    return rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _capitals(*, number: str, ending: str = "") -> str:
    """Return the same, with words cut before capitals (Mistral's Tekken, OpenAI's o200k)."""
    sign, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{sign}{upper}*{lower}+{ending}|{sign}{upper}+{lower}*{ending}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Text splitting of one family of byte-level vocabularies."""

    splits: tuple[str, ...] = (_GPT2_SPLIT,)  # each cuts the pieces of the one before at its matches
    whole_words_first: bool = False  # a piece that is a token is taken whole, without merging
    composes_unicode: bool = False  # text is brought to Unicode NFC
    adds_bos: bool = False  # unless the file says otherwise


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer((r"\p{N}", _GPT2_SPLIT))
_CL100K = PreTokenizer((_words(number=r"\p{N}{1,3}"),))
_LLAMA3 = replace(_CL100K, whole_words_first=True, adds_bos=True)
_QWEN2 = PreTokenizer((_words(number=r"\p{N}"),), composes_unicode=True)
_O200K = PreTokenizer((_capitals(number=r"\p{N}{1,3}", ending=_ENDING + "?"),))
_BY_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "default", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "trillion", "exaone4"): _GPT2,
    ("mpt", "olmo"): replace(_GPT2, composes_unicode=True),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): _DIGITS,
    ("command-r",): replace(_DIGITS, composes_unicode=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): _CL100K,  # dbrx: Phi-4 too
    ("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): _LLAMA3,
    ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"): _QWEN2,
    ("stablelm2", "hunyuan", "solar-open", "grok-2"): replace(_QWEN2, composes_unicode=False),
    ("qwen35",): PreTokenizer((_MARKED,), composes_unicode=True),
    ("tekken",): PreTokenizer((_capitals(number=r"\p{N}"),), whole_words_first=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): _O200K,
    ("seed-coder",): PreTokenizer((_SEED,)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((_BAILING,)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): PreTokenizer(_DEEPSEEK3),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    ("falcon",): PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2_SPLIT, r"[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM, r"\p{N}")),
}
DISTINCT_NAMES = tuple(names[0] for names in _BY_NAMES)  # one for each way
PRE_TOKENIZERS = {name: rules for names, rules in _BY_NAMES.items() for name in names}


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
_SPACE = "▁"  # how a piece of SentencePiece spells a space


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a file's metadata describes.

    Raises:
        InvalidInputError: the vocabulary is neither byte-level BPE nor SentencePiece's, its pre-tokenizer is unknown,
            or its fields are missing or inconsistent.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    _check_vocabulary(get)
    if get("suppress_tokens"):
        raise InvalidInputError("the file has tokenizer.ggml.suppress_tokens, which is not implemented")
    if (kind := get("model")) == "t5":
        return unigram_from_gguf(metadata)
    if kind == "llama":
        backend, adds_bos = merging_backend(metadata), True
    elif kind == "gpt2":
        rules = _rules(get("pre", "default"))
        backend, adds_bos = _backend(get("tokens", []), get("merges", []), get("token_type", []), rules), rules.adds_bos
    else:
        raise InvalidInputError(
            f"the file's tokenizer is of kind {kind!r}; byte-level BPE ('gpt2') and SentencePiece ('llama', 't5') are "
            f"supported. {_ELSEWHERE}"
        )
    tokens = get("tokens")
    _add_tokens(backend, tokens, get("token_type", []))
    without = _WITHOUT_IDS if kind == "llama" and len(tokens) > max(_WITHOUT_IDS.values()) else {}
    ids = {role: get(f"{key}_token_id", without.get(role)) for role, key in _ROLES.items()}
    special = {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}
    begins = [special["bos_token"]] if get("add_bos_token", adds_bos) and "bos_token" in special else []
    ends_text = [special["eos_token"]] if get("add_eos_token", False) and "eos_token" in special else []
    if begins or ends_text:
        backend.post_processor = processors.TemplateProcessing(
            single=[*begins, "$A", *ends_text],
            special_tokens=[(token, tokens.index(token)) for token in {*begins, *ends_text}],
        )
    ends = (ids["eos_token"], get("eot_token_id"), get("eom_token_id"))
    return Tokenizer(backend, eos_ids=(end for end in ends if end is not None), special_tokens=special)


def _add_tokens(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Have ``backend`` know control tokens and those that users defined, by the types of ``tokens``."""
    for added_type, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        texts = [token for token, token_type in zip(tokens, types, strict=False) if token_type == added_type]
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add([AddedToken(text, normalized=False, special=is_special) for text in texts])


def _check_vocabulary(get: Callable[..., Any]) -> None:
    """See that every part of a vocabulary is of its type and that ids are of its tokens.

    Raises:
        InvalidInputError: one is not.
    """
    tokens = get("tokens", [])
    if not _all_are(tokens, {str}) or not _all_are(get("merges", []), {str}):
        raise InvalidInputError("the file's vocabulary is damaged: tokens and merges are lists of texts")
    if max(map(len, tokens), default=0) > _MAX_TOKEN_CHARS:
        raise InvalidInputError(
            f"the file's vocabulary is damaged: a token has {max(map(len, tokens))} characters, and none has more than "
            f"{_MAX_TOKEN_CHARS}"
        )
    if not _all_are(get("token_type", []), {int, bool}) or not _all_are(get("scores", []), {int, bool, float}):
        raise InvalidInputError("the file's vocabulary is damaged: token types and scores are lists of numbers")
    if not all(map(math.isfinite, get("scores", []))):
        raise InvalidInputError("the file's vocabulary is damaged: a score is not finite")
    for key in (*_ROLES.values(), "eot", "eom"):
        token_id = get(f"{key}_token_id")
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
            raise InvalidInputError(
                f"the file's vocabulary is damaged: {key}_token_id is {str(token_id)[:50]}, and there are "
                f"{len(tokens)} tokens"
            )


def _all_are(values: object, kinds: set[type]) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= kinds


_MAX_TOKEN_CHARS = 4096
_ELSEWHERE = "Load the model's Hugging Face directory instead: its tokenizer.json spells every rule"
_WITHOUT_IDS = {"bos_token": 1, "eos_token": 2}  # of a file that merges pieces and does not say
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _rules(name: object) -> PreTokenizer:
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise InvalidInputError(
            f"the file's pre-tokenizer {name!r} is not known; known are {', '.join(sorted(PRE_TOKENIZERS))}. "
            f"{_ELSEWHERE}"
        )
    return PRE_TOKENIZERS[name]


def _backend(tokens: list[str], merges: list[str], types: list[int], rules: PreTokenizer) -> Backend:
    if not tokens or not merges or len(types) not in (0, len(tokens)):
        raise InvalidInputError(
            f"the file's vocabulary is incomplete: {len(tokens)} tokens, {len(merges)} merges, {len(types)} token types"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rules.whole_words_first))
    except Exception as error:  # tokenizers raises bare Exception when a merge is not in the vocabulary
        raise InvalidInputError(f"the file's merges do not fit its vocabulary: {error}") from error
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rules.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.composes_unicode:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def unigram_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a file's metadata describes.

    Raises:
        InvalidInputError: its fields are missing or inconsistent.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, scores, types = get("tokens", []), get("scores", []), get("token_type", [])
    if not tokens or len(scores) != len(tokens) or len(types) != len(tokens):
        raise InvalidInputError(
            f"the file's vocabulary is incomplete: {len(tokens)} tokens, {len(scores)} scores, {len(types)} token types"
        )
    unknown, eos = get("unknown_token_id", 2), get("eos_token_id", 1)
    pieces = list(zip(tokens, map(float, scores), strict=True))
    try:
        backend = Backend(models.Unigram(pieces, unknown, _BYTE in types))
        backend.normalizer = _normalizer(bytes(get("precompiled_charsmap", [])), get("remove_extra_whitespaces", True))
    except Exception as error:  # tokenizers raises bare Exception for an unknown token out of range, or a damaged map
        raise InvalidInputError(f"the file's vocabulary is damaged: {error}") from error
    scheme = "always" if get("add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    spaces = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), spaces]) if _BYTE in types else spaces
    _add_tokens(backend, tokens, types)
    if get("add_eos_token", True):
        backend.post_processor = processors.TemplateProcessing(
            single=["$A", tokens[eos]], special_tokens=[(tokens[eos], eos)]
        )
    special = {"eos_token": tokens[eos], "unk_token": tokens[unknown]}
    return Tokenizer(backend, eos_ids=[eos], special_tokens=special)


def _normalizer(charsmap: bytes, collapses_spaces: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if collapses_spaces:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def merging_backend(metadata: Mapping[str, Any]) -> Backend:
    """Return the model, its normaliser and its decoder; control tokens and templates are the caller's.

    Raises:
        InvalidInputError: fields are missing or inconsistent.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, scores = get("tokens", []), get("scores", [])
    types = get("token_type") or [_NORMAL] * len(tokens)
    if not tokens or not len(tokens) == len(scores) == len(types):
        raise InvalidInputError(
            f"the file's vocabulary is incomplete: {len(tokens)} tokens, {len(scores)} scores, {len(types)} token types"
        )
    unknown = get("unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else None)
    backend = Backend(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=_merges(tokens, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    has_prefix = bool(get("add_space_prefix", True))
    prefix: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return all pairs of plain pieces that make one, the highest score first.

    No merge makes a control token, so a text that spells one stays a text.
    """
    plain = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL and token
    }
    found = [
        (-score, token[:cut], token[cut:])
        for token, score in plain.items()
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    return [(left, right) for _, left, right in sorted(found)]
