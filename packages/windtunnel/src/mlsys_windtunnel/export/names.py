"""Names that files hold for good: types and fields by what they are, whatever Python calls them today.

``types.json`` maps each type to the class that stands for it now; ``_FIELDS`` does so for attributes that are private.
Rename a class or an attribute at will, and change the right-hand side here: files stay as they are. A name that was
released is never given to another type. Classes of other packages go by their path, ``"package.module:Name"``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

from mlsys_core.errors import InvalidInputError

_FIELDS = {
    "frontend": {
        "input": "_input",
        "is_by_column": "_is_by_column",
        "is_plain": "_is_plain",
        "operators": "_operators",
        "takes_text": "_takes_text",
    },
    "torch-parameter-dict": {"keys": "_keys"},
    "torch-parameter-list": {"size": "_size"},
    "trees": {"category_columns": "_is_category", "zero_is_missing_columns": "_zero_is_missing"},
    "vocabulary": {
        "codes": "_code_of",
        "code_of_missing": "_code_of_missing",
        "numbers": "_numbers",
        "codes_of_numbers": "_codes_of_numbers",
    },
}


@lru_cache(maxsize=1)
def types() -> dict[str, str]:
    """Return the path of the class of each type."""
    text = resources.files("mlsys_windtunnel.export").joinpath("types.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    return {path: name for name, path in types().items()}


def type_name(path: str) -> str:
    """Return what files call the class or function under ``path``.

    Raises:
        InvalidInputError: It is one of ours and has no name in files.

    Example:
        >>> type_name("mlsys_windtunnel.modules.tree.trees:Trees"), type_name("theirs.part:Thing")
        ('trees', 'theirs.part:Thing')
    """
    name = _names().get(path)
    if name is None and path.startswith("mlsys_windtunnel."):
        raise InvalidInputError(f"{path} has no name for files: add one to export/types.json")
    return name or path


def path_of(name: str) -> str:
    """Return the path of the class or function that files call ``name``.

    Raises:
        InvalidInputError: There is none.
    """
    if ":" in name:
        return name
    if name not in types():
        raise InvalidInputError(f"there is no type {name!r} in this version; a later one may have written the file")
    return types()[name]


def field_name(name: str, attribute: str) -> str:
    """Return what files call an attribute of a type.

    Raises:
        InvalidInputError: It is private to a type of ours and has no name in files.

    Example:
        >>> field_name("vocabulary", "_code_of"), field_name("vocabulary", "size")
        ('codes', 'size')
    """
    found = next((field for field, each in _FIELDS.get(name, {}).items() if each == attribute), None)
    if found is None and attribute.startswith("_") and ":" not in name:
        raise InvalidInputError(
            f"the attribute {attribute} of {name} has no name for files: add one to export/names.py"
        )
    return found or attribute


def attribute_of(name: str, field: str) -> str:
    """Return the attribute that files call ``field``."""
    return _FIELDS.get(name, {}).get(field, field)


_MOVED = {
    "backends.soft": {
        **{f"soft.{name}": name for name in ("native", "options", "plan", "trees")},
        **dict.fromkeys(("soft.columns", "backends.soft.columns"), "trees"),
    },
    "convert": {"converters.trees_lookup": "trees_lookup"},
    "finetune": {"soft.residual": "residual"},
    "host": {"lookup": "lookup", "host.words": "fill"},
    "modules": {
        "network": "network",
        **dict.fromkeys(
            ("modules.linear_native", "modules.tree_native", "modules.linear.native", "modules.tree.native"), "native"
        ),
    },
    "modules.columns": {
        **{f"modules.{name}": name for name in ("columns", "preprocess", "scale")},
        **dict.fromkeys(
            (f"modules.{old}" for old in ("impute", "columns.impute", "embedding", "columns.embedding")), "columns"
        ),
    },
    "modules.combine": {
        **{f"modules.{name}": name for name in ("calibrate", "combine", "multiclass")},
        **dict.fromkeys(("modules.multioutput", "modules.combine.multioutput"), "multiclass"),
        **dict.fromkeys(("modules.isotonic", "modules.combine.isotonic"), "calibrate"),
        "modules.combine.beside": "combine",
    },
    "modules.kernel": {
        **{f"modules.{name}": name for name in ("cluster", "covariance", "decompose", "kernels", "neighbors", "svm")},
        "modules.kernel.centroid": "neighbors",
        "modules.kernel.laplace": "covariance",
        "modules.linear.latent": "decompose",
    },
    "modules.linear": {
        **{f"modules.{name}": name for name in ("discriminant", "linear", "neural")},
        **dict.fromkeys(("modules.factorization", "modules.linear.factorization"), "linear"),
        **dict.fromkeys(
            ("modules.naive_bayes", "modules.linear.naive_bayes", "modules.gaussians", "modules.kernel.gaussians"),
            "discriminant",
        ),
    },
    "modules.tree": {
        "modules.trees": "trees",
        **{f"modules.tree_{name}": name for name in ("bits", "ensemble", "heads", "layout", "walk")},
        **dict.fromkeys(("modules.tree_codes", "modules.tree.codes", "modules.tree.linear_leaves"), "heads"),
    },
    "parse": {"graph": "graph"},
}
RENAMED = {
    f"mlsys_windtunnel.{old}": f"mlsys_windtunnel.{folder}.{new}"
    for folder, moved in _MOVED.items()
    for old, new in moved.items()
} | {  # to a plugin
    "mlsys_windtunnel.modules.catboost": "mlsys_windtunnel_catboost.convert.heads",
    "mlsys_windtunnel.modules.tree.catboost_heads": "mlsys_windtunnel_catboost.convert.heads",
    "mlsys_windtunnel.convert.catboost_lookup": "mlsys_windtunnel_catboost.convert.lookup",
    "mlsys_windtunnel.converters.catboost_lookup": "mlsys_windtunnel_catboost.convert.lookup",
}


def current_path(path: str) -> str:
    """Return the path ``"package.module:Name"`` that ``path`` has today.

    Example:
        >>> current_path("mlsys_windtunnel.modules.trees:Trees")
        'mlsys_windtunnel.modules.tree.trees:Trees'
    """
    module, colon, name = path.partition(":")
    return f"{RENAMED.get(module, module)}{colon}{name}"


def current_state(path: str, state: Any) -> Any:
    """Return the fields that a record of the class ``path``, of today, has by its ``state`` in a file.

    ``takes_categories`` became ``category_columns``: all columns of a frame may be of pandas' category, or none.

    Example:
        >>> current_state("mlsys_windtunnel.checks.table:InputRules", {"takes_categories": False})
        {'category_columns': (), 'labels_are_names': False}
    """
    if path == "mlsys_windtunnel.host.fill:Words":  # its column and kind were for a loader of raw rows
        return {name: value for name, value in state.items() if name not in ("column", "kind")}
    if path != "mlsys_windtunnel.checks.table:InputRules" or "takes_categories" not in state:
        return state
    kept = {name: value for name, value in state.items() if name != "takes_categories"}
    return kept | {"category_columns": None if state["takes_categories"] else (), "labels_are_names": False}
