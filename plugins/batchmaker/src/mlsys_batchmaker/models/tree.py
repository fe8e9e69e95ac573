"""A binary TreeLSTM: leaves are words, inner nodes join two subtrees, the root's hidden state is the answer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from numpy.typing import ArrayLike

from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.tree import TreeInnerCell, TreeLeafCell
from mlsys_batchmaker.models.model import Model, Payload, Tensor, sequence
from mlsys_batchmaker.plan import CellGraph
from mlsys_batchmaker.plan.spec import DEFAULT_BATCH_SIZES
from mlsys_batchmaker.scheduling.requests import Values

BATCH_SIZES = (*DEFAULT_BATCH_SIZES, 128)  # a tree's levels are wide: fewer tasks for the same rows


class BinaryTree:
    """words [n], children [n - 1, 2] -> the root's hidden state [hidden].

    Nodes 0 to n - 1 are the leaves, n + i is inner node i, joining the nodes ``children[i]``; the last is the root.

    Args:
        hidden_size: width of the states.
    """

    name = "tree-lstm"
    inputs: tuple[Tensor, ...] = (
        Tensor("words", "int64", (-1,)),
        Tensor("children", "int64", (-1, 2), is_optional=True),
    )

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.outputs: tuple[Tensor, ...] = (Tensor("hidden", "float32", (hidden_size,)),)

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add a leaf cell for each word, and an inner cell for each pair."""
        words = sequence(request, "words")
        children = np.asarray(request.get("children", np.empty((0, 2), dtype=np.int64)))
        count = len(words)
        if children.size == 0 and count == 1:
            graph.result(graph.add_many("leaf", 1, each={"word": words}))
            return
        if children.shape != (count - 1, 2) or children.dtype.kind not in "iu":
            raise InvalidInputError(
                f"children: {count} words need whole numbers of shape [{count - 1}, 2], got {list(children.shape)}"
            )
        if sorted(children.ravel().tolist()) != list(range(2 * count - 2)):
            raise InvalidInputError(
                f"children: every node but the root, 0 to {2 * count - 3}, must be the child of exactly one other; "
                "the graph is no tree, or has a cycle"
            )
        graph.add_many("leaf", count, each={"word": words})
        left, right = np.array(children.T, dtype=np.int64, order="C")
        wires = {"h_left": (left, "h"), "h_right": (right, "h"), "c_left": (left, "c"), "c_right": (right, "c")}
        graph.result(graph.add_many("inner", count - 1, wires=wires) + count - 2)

    def structure_key(self, request: Payload) -> tuple[Hashable, Sequence[ArrayLike]]:
        """Return shape and words: trees of one shape unfold alike."""
        words = sequence(request, "words")
        children = np.asarray(request.get("children", ()))
        return (len(words), children.shape, children.dtype.char, children.tobytes()), (words,)

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the root's state."""
        return {"hidden": np.asarray(values[0][0])}

    def example(self) -> Payload:
        """Return a tree of three leaves."""
        return {"words": np.zeros(3, dtype=np.int64), "children": np.array([[0, 1], [3, 2]])}

    def config(self) -> Mapping[str, Any]:
        """See :class:`mlsys_batchmaker.models.model.Architecture`."""
        return {"hidden_size": self.hidden_size}


def tree_model(
    *,
    num_words: int = 2000,
    hidden_size: int = 1024,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seed: int = 0,
    name: str = "tree-lstm",
) -> Model:
    """Make a TreeLSTM with random weights; inner cells go before leaves."""
    torch.manual_seed(seed)
    leaf = make_cell("leaf", TreeLeafCell(num_words, hidden_size), batch_sizes=batch_sizes)
    inner = make_cell("inner", TreeInnerCell(hidden_size), priority=1, batch_sizes=batch_sizes)
    return Model(name, [leaf, inner], BinaryTree(hidden_size))


def random_tree(rng: np.random.Generator, *, num_leaves: int, num_words: int) -> Payload:
    """Return a binary tree of random shape: neighbours are joined at random positions."""
    roots = list(range(num_leaves))
    children = []
    for number in range(num_leaves - 1):
        at = int(rng.integers(0, len(roots) - 1)) if len(roots) > 2 else 0
        children.append([roots[at], roots[at + 1]])
        roots[at : at + 2] = [num_leaves + number]
    words = rng.integers(0, num_words, num_leaves)
    return {"words": words, "children": np.array(children, dtype=np.int64).reshape(-1, 2)}
