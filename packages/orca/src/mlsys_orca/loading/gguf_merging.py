"""Convert a GGUF file's SentencePiece vocabulary of merged pieces (kind "llama") to a ``tokenizers`` backend.

Called by :func:`~mlsys_orca.loading.gguf_tokenizer.tokenizer_from_gguf`. A space is spelt ``▁``, and one is put before
a text, and after a control token, unless the file says otherwise. Of neighbouring pieces the two are joined whose joint
piece scores highest, until none makes a piece (Kudo & Richardson, 2018); what is in no piece becomes bytes. As
byte-pair merges that is every pair of pieces that makes a piece, in the order of its score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlsys_core.errors import InvalidInputError
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

_NORMAL, _UNKNOWN, _BYTE = 1, 2, 6  # tokenizer.ggml.token_type
_SPACE = "▁"


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
