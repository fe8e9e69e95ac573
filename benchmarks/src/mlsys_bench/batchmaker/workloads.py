"""Requests of the experiments: sentences of WMT-like lengths, clipped and fixed ones, pairs, trees (section 7.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from mlsys_batchmaker.models.model import Payload
from mlsys_batchmaker.models.tree import random_tree
from mlsys_batchmaker.replay.trace import Request, Run
from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_bench.workload.lengths import WMT_SENTENCES, Constant, Lengths

NUM_WORDS = 2000
TOLERANCE = 1e-3  # between systems' hidden states


def lengths_of(kind: str) -> Lengths:
    """Return lengths: ``wmt`` (mean 24, p99 97, at most 330), ``fixed24``, ``clip50`` or ``clip100`` (section 7.3)."""
    if kind == "wmt":
        return WMT_SENTENCES
    if kind == "fixed24":
        return Constant(24)
    return _Clipped(int(kind.removeprefix("clip")))


class _Clipped:
    """WMT-like lengths of sentences no longer than ``bound``: longer ones are not sampled, as in the paper."""

    def __init__(self, bound: int) -> None:
        self._bound = bound

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray:
        found = np.empty(0, dtype=np.int64)
        while len(found) < n:
            drawn = WMT_SENTENCES.sample(2 * n, rng)
            found = np.concatenate([found, drawn[drawn <= self._bound]])
        return found[:n]


def sentences(count: int, *, kind: str = "wmt", num_words: int = NUM_WORDS, seed: int = 0) -> list[Request]:
    """Return sentences of random words."""
    rng = np.random.default_rng(seed)
    lengths = lengths_of(kind).sample(count, rng).tolist()
    return [{"words": rng.integers(0, num_words, length)} for length in lengths]


def pairs(count: int, *, num_words: int, seed: int = 0) -> list[Request]:
    """Return sentences with the number of steps to decode: the length of another sentence of about that length."""
    rng = np.random.default_rng(seed + 1)
    made: list[Request] = []
    for request in sentences(count, num_words=num_words, seed=seed):
        steps = max(1, round(len(request["words"]) * float(rng.normal(1.0, 0.15))))
        made.append({**request, "steps": np.array([min(steps, 330)], dtype=np.int64)})
    return made


def trees(count: int, *, file: Path | None = None, num_words: int = NUM_WORDS, seed: int = 0) -> list[Request]:
    """Parse trees of a file, one a line in brackets; else binary trees of random shape and treebank-like sizes.

    Raises:
        InvalidInputError: the file holds no tree.
    """
    rng = np.random.default_rng(seed)
    if file is None:
        leaves = np.clip(np.rint(rng.lognormal(2.85, 0.45, count)), 2, 52).astype(int).tolist()
        return [dict(random_tree(rng, num_leaves=size, num_words=num_words)) for size in leaves]
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be read: {error}") from error
    if not lines:
        raise InvalidInputError(f"{file} holds no tree")
    tokens = sorted({token for line in lines for token in line.replace(")", " ").split() if "(" not in token})
    words = {token: 1 + number % (num_words - 1) for number, token in enumerate(tokens)}
    parsed = [parse_tree(line, words) for line in lines]
    whole = [dict(tree) for tree in parsed if len(tree["words"]) > 1]
    return [whole[int(place)] for place in rng.integers(0, len(whole), count)]


def identical_trees(count: int, *, num_leaves: int = 16, num_words: int = NUM_WORDS, seed: int = 0) -> list[Request]:
    """Complete binary trees of one shape."""
    rng = np.random.default_rng(seed)
    return [dict(complete_tree(num_leaves, rng.integers(0, num_words, num_leaves))) for _ in range(count)]


def complete_tree(num_leaves: int, words: np.ndarray) -> Payload:
    """Return the complete binary tree of a power of two leaves."""
    children = np.arange(2 * num_leaves - 2).reshape(-1, 2)
    return {"words": words, "children": children}


def parse_tree(text: str, words: Mapping[str, int]) -> Payload:
    """Parse a tree of the Stanford TreeBank, ``(3 (2 a) (4 (3 lovely) (2 film)))``; labels are ignored.

    Args:
        text: one tree.
        words: their numbers; what is not in it becomes word 0.

    Raises:
        InvalidInputError: it is no binary tree.
    """
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()
    leaves: list[int] = []
    pairs: list[tuple[int, int]] = []  # children; an inner node is -1 - its index until the leaves are counted
    stack: list[list[int]] = [[]]
    try:
        for before, token in zip(["", *tokens], tokens, strict=False):
            if token == "(":
                stack.append([])
            elif token == ")":
                parts = stack.pop()
                if len(parts) == 2:
                    pairs.append((parts[0], parts[1]))
                    parts = [-len(pairs)]
                (node,) = parts
                stack[-1].append(node)
            elif before != "(":
                leaves.append(words.get(token, 0))
                stack[-1].append(len(leaves) - 1)
        ((_,),) = stack
    except (ValueError, IndexError):
        raise InvalidInputError(f"no binary tree in brackets: {text[:80]!r}") from None
    children = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return {
        "words": np.array(leaves, dtype=np.int64),
        "children": np.where(children < 0, len(leaves) - 1 - children, children),
    }


def require_equal(runs: Sequence[Run]) -> None:
    """Check that all systems gave the same outputs.

    Raises:
        MlsysError: two differ; the message names them.
    """
    reference = runs[0]
    for other in runs[1:]:
        for number, expected in reference.outputs.items():
            got = other.outputs[number]
            if got.shape != expected.shape or not np.allclose(got, expected, rtol=0, atol=TOLERANCE):
                raise MlsysError(f"{other.name} and {reference.name} differ on request {number}: times mean nothing")
