"""Lists of names written as one text of words, for readability."""

from __future__ import annotations


def words(text: str, *, prefix: str = "") -> frozenset[str]:
    """Return the words of ``text``, each after ``prefix``.

    Example:
        >>> sorted(words("add sub", prefix="_operator."))
        ['_operator.add', '_operator.sub']
    """
    return frozenset(prefix + word for word in text.split())
