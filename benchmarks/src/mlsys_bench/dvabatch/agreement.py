"""Measure how far vectors agree with a reference's: cosines, and what a search among them returns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HIDDEN = re.compile(r"```.*?```|<!--.*?-->|^[|#].*?$", re.DOTALL | re.MULTILINE)
_PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'()-]{30,300}\.")


def sentences(folder: Path, most: int) -> list[str]:
    """Return at most ``most`` different plain sentences of a folder's Markdown pages, spread over all of them."""
    found: dict[str, None] = {}
    for page in sorted(folder.glob("*.md")):
        text = " ".join(_HIDDEN.sub(" ", page.read_text(encoding="utf-8")).split())
        found |= dict.fromkeys(part for part in re.split(r"(?<=\.) ", text) if _PLAIN.fullmatch(part))
    texts = list(found)
    return texts[:: max(1, -(-len(texts) // most))]


def nearest_kept(vectors: NDArray[Any], expected: NDArray[Any], most: int = 10) -> float:
    """Return how much of each text's nearest others stays: their common part of the nearest ``most``, on average.

    Args:
        vectors: Of a contestant, [texts, features].
        expected: Of the reference, in the same order.
        most: Texts that a search returns.
    """
    most, orders = min(most, len(vectors) - 1), []
    for each in (vectors, expected):
        unit = each / np.linalg.norm(each, axis=1, keepdims=True)
        alike = unit @ unit.T
        np.fill_diagonal(alike, -2)
        orders.append(np.argsort(-alike, axis=1, kind="stable")[:, :most])
    pairs = zip(*(each.tolist() for each in orders), strict=True)
    return float(np.mean([len(set(ours) & set(theirs)) / most for ours, theirs in pairs]))


def cosines(vectors: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any]:
    """Return each vector's cosine to the expected one: two of [texts, features] -> [texts]."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    found: NDArray[Any] = (vectors * expected).sum(1) / lengths
    return found


def agreement(vectors: NDArray[Any], expected: NDArray[Any]) -> dict[str, float]:
    """Return the least and the mean cosine of vectors to the expected ones, and how much of a search stays.

    Args:
        vectors: Of a contestant, [texts, features].
        expected: Of the reference, in the same order.
    """
    found = cosines(vectors, expected)
    return {
        "least_cosine": float(found.min()),
        "mean_cosine": float(found.mean()),
        "nearest_1_kept": nearest_kept(vectors, expected, 1),
        "nearest_10_kept": nearest_kept(vectors, expected),
    }
