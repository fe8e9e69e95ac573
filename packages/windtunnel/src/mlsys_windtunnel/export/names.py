"""Names that files hold for good: types and fields by what they are, whatever Python calls them today.

``types.json`` maps each type to the class that stands for it now; ``_FIELDS`` does so for attributes that are private.
Rename a class or an attribute at will, and change the right-hand side here: files stay as they are. A name that was
released is never given to another type. Classes of other packages go by their path, ``"package.module:Name"``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources

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
