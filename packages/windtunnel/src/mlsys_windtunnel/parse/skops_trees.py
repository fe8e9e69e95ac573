"""The tables of scikit-learn's trees in a skops file, looked at before native code takes them.

``Tree.__setstate__`` copies tables by sizes that it reads first: one without dimensions ends the process. What the
nodes say is looked at afterwards (:mod:`.tree_safety`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

_NODE = "TreeNode"  # skops' name of what it reads trees with


@contextmanager
def checked_trees() -> Iterator[None]:
    """Have skops look at trees' tables while the context is open.

    Raises:
        InvalidInputError: raised by the load within; tables of other dimensions, types or sizes than a tree has.
    """
    from skops.io._audit import NODE_TYPE_MAPPING

    replaced = {key: node for key, node in NODE_TYPE_MAPPING.items() if key[0] == _NODE}
    NODE_TYPE_MAPPING.update({key: _checked(node) for key, node in replaced.items()})
    try:
        yield
    finally:
        NODE_TYPE_MAPPING.update(replaced)


def _checked(base: Any) -> Any:
    class CheckedTreeNode(base):  # type: ignore[misc]  # skops has no types
        def _construct(self) -> Any:
            _check(self.args.construct(), self.attrs.construct())
            return super()._construct()

    return CheckedTreeNode


def _check(args: Any, state: Any) -> None:
    from sklearn.tree._tree import NODE_DTYPE

    if not isinstance(args, tuple) or len(args) != 3 or not isinstance(state, dict):
        raise InvalidInputError("a tree in it is damaged: it has no tables")
    num_features, num_classes, num_outputs = args
    tables: list[Any] = [state.get(name) for name in ("nodes", "values", "node_count")]
    nodes, values, count = tables
    shape = (getattr(nodes, "shape", None), getattr(values, "shape", (None,))[:1])
    is_right = (
        _is_table(num_classes, 1, np.dtype(np.intp))
        and _is_table(nodes, 1, NODE_DTYPE)
        and _is_table(values, 3, np.dtype(np.float64))
        and all(type(each) is int for each in (num_features, num_outputs, count, state.get("max_depth")))
        and num_features >= 0
        and len(num_classes) == num_outputs == values.shape[1]
        and len(nodes) == len(values) == count
    )
    if not is_right:
        raise InvalidInputError(f"a tree in it is damaged: its tables have shapes {shape} for {count!r} nodes")


def _is_table(table: Any, num_dimensions: int, dtype: Any) -> bool:
    return type(table) is np.ndarray and table.ndim == num_dimensions and table.dtype == dtype
