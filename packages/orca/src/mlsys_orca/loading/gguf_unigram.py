"""Convert a GGUF file's Unigram vocabulary (kind "t5": SentencePiece's other model) to a tokenizer.

Called by :func:`~mlsys_orca.loading.gguf_tokenizer.tokenizer_from_gguf`. The file has pieces with log-probabilities and
SentencePiece's compiled normaliser; the rest is what the kind implies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_core.errors import InvalidInputError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlsys_orca.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # tokenizer.ggml.token_type
_SPACE = "▁"  # how a piece spells a space


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
    for added_type, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        texts = [token for token, token_type in zip(tokens, types, strict=True) if token_type == added_type]
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add([AddedToken(text, normalized=False, special=is_special) for text in texts])
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
