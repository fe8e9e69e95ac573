"""Operators that stay on the host as plain data, so that files can hold them: imputers of text, vectorisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlsys_windtunnel.host.fill import Filler
from mlsys_windtunnel.host.lookup import is_missing
from mlsys_windtunnel.host.words import PATTERNS, Words
from mlsys_windtunnel.parse.names import public_name


def as_data(estimator: Any) -> Filler | Words | None:
    """Return a fitted estimator as plain data that transforms as it does; None where it stays as it is."""
    rule = _RULES.get(public_name(type(estimator)))
    return None if rule is None else rule(estimator)


def _simple_imputer(estimator: Any) -> Filler | None:
    kind = estimator._fit_dtype.kind
    if estimator.add_indicator or kind not in "Ofiu" or estimator._fit_dtype == np.float32:
        return None
    marker = _plain(estimator.missing_values)
    values = [_plain(value) for value in estimator.statistics_.tolist()]
    if not _is_cell(marker) or not all(map(_is_cell, values)) or estimator.keep_empty_features:
        return None
    kept = tuple(index for index, value in enumerate(values) if not is_missing(value))
    takes_all = is_missing(marker) and not isinstance(marker, float)
    return Filler(
        marker=np.nan if is_missing(marker) else marker,
        kept=kept,
        values=tuple(values[index] for index in kept),
        is_of_numbers=kind != "O",
        takes_all_missing=takes_all,
        refuses_none=marker is not None and _hands_frames_on(estimator),
    )


def _hands_frames_on(estimator: Any) -> bool:
    """Return whether ``set_output``, or scikit-learn's setting for all, makes frames of what it transforms."""
    from sklearn.utils._set_output import _get_output_config

    return bool(_get_output_config("transform", estimator)["dense"] != "default")


def _vectoriser(estimator: Any) -> Words | None:
    options = ("preprocessor", "tokenizer", "strip_accents", "analyzer")
    has_code = any(callable(getattr(estimator, option)) for option in options)
    is_of_words = estimator.analyzer == "word"
    if has_code or estimator.input != "content" or (is_of_words and estimator.token_pattern not in PATTERNS):
        return None
    if np.dtype(estimator.dtype) not in (np.dtype(np.int64), np.dtype(np.float64)):
        return None
    is_weighted = type(estimator).__name__ == "TfidfVectorizer"
    return Words(
        vocabulary={str(word): int(index) for word, index in estimator.vocabulary_.items()},
        analyzer=estimator.analyzer,
        ngrams=(int(estimator.ngram_range[0]), int(estimator.ngram_range[1])),
        pattern=estimator.token_pattern if is_of_words else "",
        stop_words=tuple(sorted(estimator.get_stop_words() or ())) if is_of_words else (),
        lowercase=bool(estimator.lowercase),
        strip_accents=estimator.strip_accents or None,
        is_binary=bool(estimator.binary),
        idf=tuple(map(float, estimator.idf_)) if is_weighted and estimator.use_idf else None,
        norm=estimator.norm if is_weighted else None,
        sublinear=bool(is_weighted and estimator.sublinear_tf),
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_cell(value: Any) -> bool:
    return value is None or is_missing(value) or isinstance(value, str | bool | int | float)


_RULES: dict[str, Callable[[Any], Filler | Words | None]] = {
    "sklearn.impute.SimpleImputer": _simple_imputer,
    "sklearn.feature_extraction.text.CountVectorizer": _vectoriser,
    "sklearn.feature_extraction.text.TfidfVectorizer": _vectoriser,
}
