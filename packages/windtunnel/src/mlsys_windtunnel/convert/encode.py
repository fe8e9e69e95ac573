"""Encoders of categories: a look-up on the host, and a trainable table per column that starts as the encoder's rows.

Categories that an encoder groups (infrequent ones, those of one bucket) have equal rows of their own, so that training
can tell them apart (dissertation, section 5.2.3). ``FeatureHasher`` and ``HashingVectorizer`` are not here: they take
free text, of which there is no list of categories to embed, so they stay fallbacks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.host.lookup import SEARCHABLE, CategoryLookup, HashLookup, Vocabulary
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.columns.columns import BinEmbedding, CategoryEmbedding

CONVERTERS = Converters()

Rows = npt.NDArray[np.float64]

_UNSEARCHABLE = (
    "categories that are no numbers, texts, truth values or dates of one kind; convert the column with astype(str)"
)
MAX_TABLE_NBYTES = 1 << 30  # a one-hot table is square: above about 11,000 categories the encoder itself is smaller


@CONVERTERS.of("sklearn.preprocessing", "OneHotEncoder")
def one_hot_encoder(estimator: Any) -> Converted | Unsupported:
    """Convert with infrequent categories, dropped ones, and any treatment of unknown ones."""
    if not _is_searchable(estimator):
        return Unsupported(_UNSEARCHABLE)
    drops = [None] * estimator.n_features_in_ if estimator.drop_idx_ is None else estimator.drop_idx_
    goes_to_infrequent = estimator.handle_unknown in ("infrequent_if_exist", "warn")
    tables = []
    for index, drop in enumerate(drops):
        groups, infrequent = _groups(estimator, index)
        num_groups = int(groups.max()) + 1
        if len(groups) * num_groups * 8 > MAX_TABLE_NBYTES:
            return Unsupported(
                f"{len(groups):,} categories in column {index}, whose table would take more than {MAX_TABLE_NBYTES:,} "
                "bytes; group rare ones with min_frequency or max_categories"
            )
        unit = np.vstack([np.eye(num_groups), np.zeros(num_groups)])
        unknown = infrequent if goes_to_infrequent and infrequent is not None else num_groups
        rows = unit[[*groups, unknown]]
        tables.append(rows if drop is None else np.delete(rows, groups[drop], axis=1))
    warns = estimator.handle_unknown == "warn" or (estimator.drop is not None)
    return _converted(estimator, tables, warns=warns)


@CONVERTERS.of("sklearn.preprocessing", "OrdinalEncoder")
def ordinal_encoder(estimator: Any) -> Converted | Unsupported:
    """Convert to codes as the encoder gives them, one column each; missing and unknown ones as it is configured."""
    if not _is_searchable(estimator):
        return Unsupported(_UNSEARCHABLE)
    unknown = estimator.unknown_value if estimator.handle_unknown == "use_encoded_value" else 0.0
    tables = []
    for index in range(estimator.n_features_in_):
        groups, _ = _groups(estimator, index)
        missing = [estimator.encoded_missing_value] if index in estimator._missing_indices else []
        tables.append(np.array([*groups, *missing, unknown], np.float64)[:, None])
    return _converted(estimator, tables)


@CONVERTERS.of("sklearn.preprocessing", "TargetEncoder")
def target_encoder(estimator: Any) -> Converted | Unsupported:
    """Convert to means of the target, per class if there are three or more; unknown categories have the mean of all."""
    if not _is_searchable(estimator):
        return Unsupported(_UNSEARCHABLE)
    num_outputs = len(estimator.classes_) if estimator.target_type_ == "multiclass" else 1
    unknown = np.reshape(estimator.target_mean_, (1, num_outputs))
    tables = []
    for index in range(estimator.n_features_in_):
        means = estimator.encodings_[index * num_outputs : (index + 1) * num_outputs]
        tables.append(np.vstack([np.stack(means, axis=1), unknown]))
    return _converted(estimator, tables)


@CONVERTERS.of("mlsys_windtunnel.estimators.categories", "BinaryEncoder", "TwoHotEncoder")
def table_encoder(estimator: Any) -> Converted | Unsupported:
    """Convert our own binary and two-hot encoders."""
    return _converted(estimator, estimator.tables_) if _is_searchable(estimator) else Unsupported(_UNSEARCHABLE)


@CONVERTERS.of("mlsys_windtunnel.estimators.categories", "HashEncoder")
def hash_encoder(estimator: Any) -> Converted | Unsupported:
    """Convert our own hash encoder: a row for each category seen, and one for each bucket."""
    if not _is_searchable(estimator):
        return Unsupported(_UNSEARCHABLE)
    vocabularies = [Vocabulary(categories) for categories in estimator.categories_]
    lookup = HashLookup(vocabularies, num_buckets=estimator.n_components)
    return Converted(CategoryEmbedding(estimator.tables_), lookup, num_codes=len(vocabularies))


@CONVERTERS.of("sklearn.preprocessing", "KBinsDiscretizer")
def k_bins_discretizer(estimator: Any) -> OperatorModule:
    """Convert numbers to bins, in the network; the bins' rows are trainable."""
    if estimator.encode == "ordinal":
        tables: list[Rows] = [np.arange(num_bins)[:, None] for num_bins in estimator.n_bins_]
    else:
        tables = [np.eye(num_bins) for num_bins in estimator.n_bins_]
    inner_edges = [edges[1:-1] for edges in estimator.bin_edges_]
    return BinEmbedding(inner_edges, tables, rounds_to_float32=estimator.dtype == np.float32)


def _groups(estimator: Any, index: int) -> tuple[npt.NDArray[np.int64], int | None]:
    """Return the group of each category of a column, and the group of infrequent ones, which comes last.

    An ordinal encoder does not group a missing category, its last: that one is left out.
    """
    categories = estimator.categories_[index]
    leaves_out_missing = index in getattr(estimator, "_missing_indices", {})
    num_categories = len(categories) - leaves_out_missing
    infrequent = estimator._infrequent_indices[index] if estimator._infrequent_enabled else None
    if infrequent is None:
        return np.arange(num_categories), None
    is_frequent = np.ones(num_categories, bool)
    is_frequent[infrequent] = False
    num_frequent = int(is_frequent.sum())
    groups = np.full(num_categories, num_frequent)
    groups[is_frequent] = np.arange(num_frequent)
    return groups, num_frequent


def _is_searchable(estimator: Any) -> bool:
    return all(categories.dtype.kind in SEARCHABLE for categories in estimator.categories_)


def _converted(estimator: Any, tables: list[Rows], *, warns: bool = False) -> Converted:
    """Return look-up and embedding for tables with a row per category and one for unknown ones."""
    refuses = getattr(estimator, "handle_unknown", "ignore") == "error"
    lookup = CategoryLookup(
        [Vocabulary(categories) for categories in estimator.categories_],
        unknown="refuse" if refuses else "warn" if warns else "accept",
        names=[str(name) for name in getattr(estimator, "feature_names_in_", ())],
    )
    return Converted(CategoryEmbedding(tables), lookup, num_codes=len(tables))
