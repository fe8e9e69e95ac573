"""Nesting of a program's inputs and outputs: tuples, lists and dicts only, so that nothing is imported.

torch keeps it as JSON within JSON ("treespec"), in which an entry may name any enum of any module. Here it is rebuilt
from plain containers.
"""

from __future__ import annotations

import json
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.expressions import KEY

_SEQUENCES = frozenset(
    {"builtins.tuple", "builtins.list", "torch.fx.immutable_collections.immutable_list", "torch.Size"}
)
_MAPPINGS = frozenset({"builtins.dict", "collections.OrderedDict", "torch.fx.immutable_collections.immutable_dict"})
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_MAX_DEPTH = 64
_VERSION = 1  # of torch's treespec


def structure(text: str) -> str:
    """Return a treespec written anew.

    Raises:
        InvalidInputError: it is damaged, or holds another container than a tuple, list or dict.
    """
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError("the structure of the inputs or outputs is damaged") from error
    if version != _VERSION:
        raise InvalidInputError(f"the structure of the inputs or outputs is of version {version!r}, not {_VERSION}")
    return json.dumps([_VERSION, _node(tree, _MAX_DEPTH)])


def _node(tree: Any, depth: int) -> dict[str, Any]:
    if not isinstance(tree, dict) or depth == 0 or not isinstance(tree.get("children_spec"), list):
        raise InvalidInputError("the structure of the inputs or outputs is damaged")
    kind, children = tree.get("type"), tree["children_spec"]
    if kind is None and not children:
        return _LEAF
    if kind in _SEQUENCES:
        context = "null"
    elif kind in _MAPPINGS:
        context = json.dumps(_keys(tree.get("context"), len(children)))
    else:
        raise InvalidInputError(
            f"its inputs or outputs hold a {kind!r}, which only code can rebuild; "
            "export it with tuples, lists and dicts"
        )
    return {"type": kind, "context": context, "children_spec": [_node(child, depth - 1) for child in children]}


def _keys(context: Any, number: int) -> list[str | int]:
    try:
        keys = json.loads(context)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError("the structure of the inputs or outputs is damaged") from error
    if not isinstance(keys, list) or len(keys) != number:
        raise InvalidInputError("the structure of the inputs or outputs is damaged")
    for key in keys:
        if not (type(key) is int or (isinstance(key, str) and KEY.fullmatch(key))):
            raise InvalidInputError(f"its inputs or outputs have a dict with the key {key!r}; use letters and digits")
    return keys
