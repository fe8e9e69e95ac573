"""Docstrings as the documentation's generator reads them: an extension of griffe, named in mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension


class Docstrings(Extension):
    """Rewrites what is written for readers of the source."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute; griffe calls it."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """Return a docstring with its example as code, and roles as plain names.

    Example:
        >>> readable("See :class:`~a.b.C`.")
        'See `C`.'
    """
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":\w+:`~([\w.]*\.)?(\w+)`", r"`\2`", text)
    text = re.sub(r":\w+:`\.?([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`")
