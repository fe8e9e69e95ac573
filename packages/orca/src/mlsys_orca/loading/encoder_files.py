"""Contents of an encoder's directory beside its weights: configuration, family, pooling, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_orca.loading.huggingface import read_json, read_tokenizer
from mlsys_orca.loading.load import check_dtype
from mlsys_orca.loading.pooling import Pooling, PoolingMode, read_pooling
from mlsys_orca.model.encoder_family import EncoderConfig, EncoderFamily
from mlsys_orca.model.families import encoder_family
from mlsys_orca.model.limits import check_numbers
from mlsys_orca.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFiles:
    """An encoder without its weights."""

    name: str
    path: Path  # where config.json and the weights are
    family: EncoderFamily
    config: EncoderConfig
    pooling: Pooling

    def tokenizer(self) -> Tokenizer:
        """Read its tokenizer."""
        return read_tokenizer(self.path, read_json(self.path / "tokenizer_config.json", optional=True))


def encoder_directory(path: Path | str, *, dtype: str | None) -> Path:
    """Return the directory at ``path``.

    Raises:
        InvalidInputError: there is none, or the dtype is unknown.
    """
    where = Path(path).expanduser()
    check_dtype(dtype)
    if not where.is_dir():
        raise InvalidInputError(f"{where} is no directory; encoders are read from Hugging Face directories")
    return where


def read_encoder_files(
    where: Path, *, pooling: PoolingMode | None = None, normalize: bool | None = None
) -> EncoderFiles:
    """Read all of an encoder but its weights and tokenizer.

    Args:
        where: Its directory.
        pooling: In place of the directory's.
        normalize: Likewise.

    Raises:
        InvalidInputError: a file is missing or damaged, or the model needs something that is not implemented.
    """
    steps = read_pooling(where)
    steps = replace(
        steps,
        mode=steps.mode if pooling is None else pooling,
        normalize=steps.normalize if normalize is None else normalize,
    )
    files = where / steps.encoder
    raw = read_json(files / "config.json")
    check_numbers(raw)
    family = encoder_family(str(raw.get("model_type")))
    config = replace(family.from_huggingface(raw), scores_pairs=_scores_pairs(raw))
    return EncoderFiles(name=where.name, path=files, family=family, config=config, pooling=steps)


def _scores_pairs(raw: Mapping[str, Any]) -> bool:
    """Return whether ``config.json`` is that of a classifier with one number for an answer."""
    is_classifier = any(str(name).endswith("ForSequenceClassification") for name in raw.get("architectures") or ())
    return is_classifier and len(raw.get("id2label") or range(raw.get("num_labels", 2))) == 1
