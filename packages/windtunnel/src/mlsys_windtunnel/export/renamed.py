"""Modules and fields that have changed their names: files name both, and old files stay readable."""

from __future__ import annotations

from typing import Any

_MOVED = {
    "backends.soft": {f"soft.{name}": name for name in ("columns", "gates", "native", "options", "plan", "trees")},
    "convert": {"converters.trees_lookup": "trees_lookup"},
    "finetune": {"soft.residual": "residual"},
    "host": {"lookup": "lookup"},
    "modules": {"network": "network"},
    "modules.columns": {f"modules.{name}": name for name in ("columns", "embedding", "impute", "preprocess", "scale")},
    "modules.combine": {
        f"modules.{name}": name for name in ("calibrate", "combine", "isotonic", "multiclass", "multioutput")
    },
    "modules.kernel": {
        f"modules.{name}": name
        for name in ("cluster", "covariance", "decompose", "gaussians", "kernels", "neighbors", "svm")
    },
    "modules.linear": {
        "modules.linear_native": "native",
        **{f"modules.{name}": name for name in ("discriminant", "factorization", "linear", "naive_bayes", "neural")},
    },
    "modules.tree": {
        "modules.trees": "trees",
        **{
            f"modules.tree_{name}": name
            for name in ("bits", "codes", "ensemble", "heads", "layout", "native", "rows", "walk")
        },
    },
    "parse": {"graph": "graph"},
}
RENAMED = {
    f"mlsys_windtunnel.{old}": f"mlsys_windtunnel.{folder}.{new}"
    for folder, moved in _MOVED.items()
    for old, new in moved.items()
} | {  # to a plugin
    "mlsys_windtunnel.modules.catboost": "mlsys_windtunnel_catboost.convert.heads",
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

    ``takes_categories`` became ``category_columns``: all columns of a frame may be of pandas' category, or none. Before
    ``takes_tuples``, all sources took them, and before ``passed_columns`` and ``refuses_none`` NA and None were not
    looked for.

    Example:
        >>> current_state("mlsys_windtunnel.checks.table:InputRules", {"takes_categories": False})
        {'takes_tuples': True, 'passed_columns': (), 'category_columns': (), 'labels_are_names': False}
    """
    if path == "mlsys_windtunnel.host.fill:Filler":
        return {"refuses_none": False} | state
    if path == "mlsys_windtunnel.host.words:Words":  # its column and kind were for a loader of raw rows
        return {name: value for name, value in state.items() if name not in ("column", "kind")}
    if path != "mlsys_windtunnel.checks.table:InputRules":
        return state
    state = {"takes_tuples": True, "passed_columns": ()} | state
    if "takes_categories" not in state:
        return state
    kept = {name: value for name, value in state.items() if name != "takes_categories"}
    return kept | {"category_columns": None if state["takes_categories"] else (), "labels_are_names": False}
