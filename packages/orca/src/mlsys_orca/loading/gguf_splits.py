"""Ways of cutting text before merging, by the name that a GGUF file has for them (``tokenizer.ggml.pre``).

Read by :mod:`.gguf_tokenizer`. A name is a line of :data:`PRE_TOKENIZERS`. Patterns are those of the models' own
``tokenizer.json``; ``tests/oracles/gguf_splits`` compares the tokens with llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
