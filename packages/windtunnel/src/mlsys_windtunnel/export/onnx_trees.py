"""Operators that torch's ONNX exporter lacks or gets wrong: trees, and functions in ONNX's own operators.

Trees are one ``TreeEnsemble`` node of ``ai.onnx.ml`` 5, whose thresholds are in the network's own dtype.

The node sums the leaves' values itself where each leaf has one, as in boosting. Where a leaf has several, or single
trees' answers are wanted, the node gives the index of each row's leaf within each tree; values are gathered and summed
outside it, in the order in which the sources add. (A leaf of the node has one value, and walking a tree once for each
value takes twice as long.) Imported by ``onnx.py`` only when there is something to export: it needs onnxscript.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir
import onnxscript
import torch
from onnxscript.onnx_opset import opset_ai_onnx_ml5
from torch import Tensor, nn

from mlsys_windtunnel.modules.tree.ensemble import Integers, TreeEnsemble
from mlsys_windtunnel.modules.tree.trees import Trees

ml: Any = opset_ai_onnx_ml5  # its types are of ONNX's tensors
LEQ, MEMBER = 0, 6  # of TreeEnsemble's modes
SUM, NONE = 1, 0  # of its ways to join trees, and of its transformations of sums


class OnnxLeaves(nn.Module):
    """Stand-in for a form of :class:`Trees` that finds leaves: an operator that only an exporter can translate.

    Args:
        ensemble: The trees.
        number: By which the exporter finds them again.
    """

    leaf_start: Tensor

    tree_dim = 1  # of what find() returns

    def __init__(self, ensemble: TreeEnsemble, number: int) -> None:
        super().__init__()
        self.number = number
        self.register_buffer("leaf_start", torch.from_numpy(ensemble.leaf_start[:-1].copy()), persistent=False)

    def columns(self, x: Tensor) -> Tensor:
        """Clean inputs as they are."""
        return x

    def find(self, columns: Tensor, threshold: Tensor) -> Tensor:
        """Find the leaf of each row in each tree, ``[rows, trees]`` int64."""
        index: Tensor = _operators()[0](columns, self.number, len(self.leaf_start))
        return index.long() + self.leaf_start


class OnnxTrees(Trees):
    """Trees whose sums an operator computes; as :class:`Trees` otherwise."""

    number: int  # by which the exporter finds them again

    def forward(self, x: Tensor) -> Tensor:
        """Return sums ``[rows, outputs]``."""
        if self.leaf_value.shape[1] > 1:
            return super().forward(x)
        sums: Tensor = _operators()[1](self._clean(x), self.number, self.num_groups)
        return sums / self.divisor if self.divisor != 1 else sums


def replace_finders(module: nn.Module) -> list[OnnxTrees]:
    """Make all trees within a module answer by operators; their numbers are indices in what is returned."""
    found: list[OnnxTrees] = []
    for part in module.modules():
        if isinstance(part, Trees):
            part.finder = OnnxLeaves(part.ensemble, len(found))  # type: ignore[assignment]
            part.__class__ = OnnxTrees
            assert isinstance(part, OnnxTrees)
            part.number = len(found)
            found.append(part)
    return found


def translations(trees: Sequence[OnnxTrees], dtype: torch.dtype) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the exporter's translations of the operators; ``dtype`` is that of the network."""

    def leaf_indices(x: Any, number: int, num_trees: int) -> Any:
        return ml.TreeEnsemble(x, n_targets=num_trees, **indices(trees[number].ensemble, _NUMPY[dtype]))

    def leaf_sums(x: Any, number: int, num_outputs: int) -> Any:
        return ml.TreeEnsemble(x, n_targets=num_outputs, **sums(trees[number], _NUMPY[dtype]))

    of_leaves, of_sums = _operators()
    return {of_leaves: leaf_indices, of_sums: leaf_sums}


def indices(ensemble: TreeEnsemble, dtype: npt.DTypeLike) -> dict[str, Any]:
    """Return the attributes of a ``TreeEnsemble`` node that gives, for each tree, the index of the row's leaf."""
    tree_of_leaf = _trees_of_leaves(ensemble)
    index = np.arange(len(tree_of_leaf)) - ensemble.leaf_start[tree_of_leaf]
    return attributes(ensemble, tree_of_leaf, index, dtype)


def sums(trees: OnnxTrees, dtype: npt.DTypeLike) -> dict[str, Any]:
    """Return the attributes of a ``TreeEnsemble`` node that gives the sums of the leaves' values."""
    ensemble = trees.ensemble
    tree_of_leaf, values = _trees_of_leaves(ensemble), ensemble.leaf_value.copy()
    if trees.bias is not None:  # added to the first tree of each output, as the sources do
        bias = trees.bias.double().numpy(force=True)
        for tree in range(trees.num_groups):
            values[tree_of_leaf == tree] += bias[tree]
    return attributes(ensemble, tree_of_leaf % trees.num_groups, values[:, 0], dtype)


def _trees_of_leaves(ensemble: TreeEnsemble) -> Integers:
    found: Integers = np.repeat(np.arange(ensemble.num_trees), np.diff(ensemble.leaf_start))
    return found


def attributes(
    ensemble: TreeEnsemble, targets: Integers, weights: npt.NDArray[Any], dtype: npt.DTypeLike
) -> dict[str, Any]:
    """Return the attributes of a ``TreeEnsemble`` node.

    Args:
        ensemble: The trees' structure.
        targets: Output that each leaf counts for.
        weights: Value of each leaf.
        dtype: Dtype of the network.
    """
    ensemble = _rooted_in_splits(ensemble)
    is_member = ensemble.category_set >= 0
    found = {
        "aggregate_function": SUM,
        "post_transform": NONE,
        "tree_roots": ensemble.root.tolist(),
        "nodes_featureids": ensemble.feature.tolist(),
        "nodes_modes": onnx_ir.tensor(np.where(is_member, MEMBER, LEQ).astype(np.uint8)),
        "nodes_splits": onnx_ir.tensor(np.where(is_member, 0, ensemble.threshold).astype(dtype)),
        "nodes_truenodeids": _node(ensemble.left).tolist(),
        "nodes_falsenodeids": _node(ensemble.right).tolist(),
        "nodes_trueleafs": (ensemble.left < 0).astype(int).tolist(),
        "nodes_falseleafs": (ensemble.right < 0).astype(int).tolist(),
        "nodes_missing_value_tracks_true": ensemble.missing_left.astype(int).tolist(),
        "leaf_targetids": targets.tolist(),
        "leaf_weights": onnx_ir.tensor(weights.astype(dtype)),
    }
    if is_member.any():
        found["membership_values"] = onnx_ir.tensor(_members(ensemble).astype(dtype))
    return found


def _rooted_in_splits(ensemble: TreeEnsemble) -> TreeEnsemble:
    """Put a split above each lone leaf, both ways of which lead to it: ONNX has no other root."""
    lone = np.flatnonzero(ensemble.root < 0)
    leaf, none = ensemble.root[lone], np.zeros(len(lone), np.int64)
    root = ensemble.root.copy()
    root[lone] = len(ensemble.feature) + np.arange(len(lone))
    return replace(
        ensemble,
        feature=np.append(ensemble.feature, none),
        threshold=np.append(ensemble.threshold, none),
        left=np.append(ensemble.left, leaf),
        right=np.append(ensemble.right, leaf),
        missing_left=np.append(ensemble.missing_left, none == 1),
        category_set=np.append(ensemble.category_set, none - 1),
        root=root,
    )


def _node(child: Integers) -> Integers:
    nodes: Integers = np.where(child >= 0, child, ~child)
    return nodes


def _members(ensemble: TreeEnsemble) -> npt.NDArray[np.float64]:
    """Return the codes that go left of each split by categories, each list ended by NaN."""
    lists = []
    for number in ensemble.category_set[ensemble.category_set >= 0]:
        start, end = ensemble.category_start[number : number + 2]
        lists.append(np.append(np.flatnonzero(ensemble.category_left[start:end]), np.nan))
    return np.concatenate(lists)


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


@lru_cache(maxsize=1)
def _operators() -> tuple[Any, Any]:
    """Return the operators, registered once; they have a shape and no kernel, since they are only ever traced."""
    library: Any = torch.library.Library("mlsys_windtunnel", "DEF")  # type: ignore[no-untyped-call]
    for name in ("leaf_indices", "leaf_sums"):
        library.define(f"{name}(Tensor x, int number, int width) -> Tensor")
        library.impl(name, _empty, "Meta")
    _LIBRARIES.append(library)  # the registration would end with it
    operators = torch.ops.mlsys_windtunnel
    return operators.leaf_indices.default, operators.leaf_sums.default


def _empty(x: Tensor, _number: int, width: int) -> Tensor:
    return x.new_empty(x.shape[0], width)


_LIBRARIES: list[Any] = []


op: Any = onnxscript.opset18  # its types are of ONNX's tensors; while it traces it takes Python's numbers too
FLOAT, INT64, DOUBLE = 1, 7, 11  # of onnx.TensorProto


def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Count the entries of the sequence below each value (``right``: not above it); NaN comes after all."""
    assert sorter is None
    assert not out_int32
    edges, values = op.Unsqueeze(sorted_sequence, [-2]), op.Unsqueeze(self, [-1])
    below = op.LessOrEqual(edges, values) if right or side == "right" else op.Less(edges, values)
    everywhere = op.Or(below, op.IsNaN(values))
    return op.ReduceSum(op.Cast(everywhere, to=INT64), [-1], keepdims=0)


def repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:  # noqa: ARG001
    """Repeat each element of a flat tensor, ``repeats`` times in turn."""
    assert dim in (None, 0)
    times = op.Constant(value_ints=[repeats]) if isinstance(repeats, int) else op.Reshape(repeats, [1])
    shape = op.Concat(op.Constant(value_ints=[1]), times, axis=0)
    table = op.Expand(op.Unsqueeze(op.Reshape(self, [-1]), [1]), shape)
    return op.Reshape(table, [-1])


def sort_stable(self: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:  # noqa: ARG001
    """Return sorted values and their indices; ONNX's TopK puts equals in their order, so it is stable."""
    length = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, length, axis=dim, largest=int(descending), sorted=1)


def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:  # noqa: ARG001
    """Compute distances ``[..., rows of x1, rows of x2]`` of order ``p``."""
    apart = op.Abs(op.Sub(op.Unsqueeze(x1, [-2]), op.Unsqueeze(x2, [-3])))
    if p == 1:
        return op.ReduceSum(apart, [-1], keepdims=0)
    if p == float("inf"):
        return op.ReduceMax(apart, [-1], keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), [-1], keepdims=0))
    order = op.CastLike(op.Constant(value_float=p), apart)
    return op.Pow(op.ReduceSum(op.Pow(apart, order), [-1], keepdims=0), op.Reciprocal(order))


def scalar_tensor(s: Any, dtype: int = FLOAT, **_: Any) -> Any:
    """Return a number as a tensor, exactly: torch's own translation rounds it to float32 on the way to float64."""
    if not isinstance(s, bool | int | float):
        return op.Cast(s, to=dtype)
    if dtype != DOUBLE:
        return op.Cast(op.Constant(value_int=s) if isinstance(s, int) else op.Constant(value_float=s), to=dtype)
    return op.Constant(value=onnx_ir.tensor(np.array(s, np.float64)))


def erf(self: Any) -> Any:
    """Compute the error function by Gauss and Legendre's quadrature: runtimes have ``Erf`` for float32 alone.

    ``erf(z) = 2 z / sqrt(pi)`` times the integral of ``exp(-z^2 t^2)`` for t from 0 to 1; beyond 6 it is 1 to the last
    bit.
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def constant(values: Any) -> Any:
        return op.CastLike(op.Constant(value=onnx_ir.tensor(np.asarray(values, np.float64))), self)

    z = op.Clip(self, constant(-6.0), constant(6.0))
    squares = op.Mul(op.Unsqueeze(op.Mul(z, z), [-1]), constant(((nodes + 1) / 2) ** 2))
    integral = op.ReduceSum(op.Mul(op.Exp(op.Neg(squares)), constant(weights / 2)), [-1], keepdims=0)
    return op.Mul(op.Mul(z, integral), constant(2 / math.sqrt(math.pi)))


def _coefficients(text: str) -> list[float]:
    return [float(each) for each in text.split()]


_CENTRAL = (
    _coefficients(
        "-59.9633501014107895267 98.0010754185999661536 -56.6762857469070293439 13.9312609387279679503 "
        "-1.23916583867381258016"
    ),
    _coefficients(
        "1 1.95448858338141759834 4.67627912898881538453 86.3602421390890590575 -225.462687854119370527 "
        "200.260212380060660359 -82.0372256168333339912 15.9056225126211695515 -1.18331621121330003142"
    ),
)
_TAIL = (
    _coefficients(
        "4.05544892305962419923 31.5251094599893866154 57.1628192246421288162 44.0805073893200834700 "
        "14.6849561928858024014 2.18663306850790267539 -0.140256079171354495875 -0.0350424626827848203418 "
        "-8.57456785154685413611e-4"
    ),
    _coefficients(
        "1 15.7799883256466749731 45.3907635128879210584 41.3172038254672030440 15.0425385692907503408 "
        "2.50464946208309415979 -0.142182922854787788574 -0.0380806407691578277194 -9.33259480895457427372e-4"
    ),
)


def ndtri(self: Any) -> Any:
    """Compute the inverse of the normal distribution function from exp(-32) to 1 - exp(-32), as Cephes does."""

    def constant(value: float) -> Any:
        return op.CastLike(op.Constant(value=onnx_ir.tensor(np.array(value, np.float64))), self)

    def ratio(z: Any, coefficients: tuple[list[float], list[float]]) -> Any:
        above, below = (constant(each[0]) for each in coefficients)
        for number in coefficients[0][1:]:
            above = op.Add(op.Mul(above, z), constant(number))
        for number in coefficients[1][1:]:
            below = op.Add(op.Mul(below, z), constant(number))
        return op.Div(above, below)

    centred = op.Sub(self, constant(0.5))
    square = op.Mul(centred, centred)
    central = op.Add(centred, op.Mul(centred, op.Mul(square, ratio(square, _CENTRAL))))
    central = op.Mul(central, constant(math.sqrt(2 * math.pi)))
    is_low = op.Less(self, constant(0.5))
    near = op.Where(is_low, self, op.Sub(constant(1.0), self))  # how far from the nearer end
    size = op.Sqrt(op.Mul(constant(-2.0), op.Log(near)))
    inverse = op.Reciprocal(size)
    tail = op.Sub(op.Sub(size, op.Div(op.Log(size), size)), op.Mul(inverse, ratio(inverse, _TAIL)))
    tail = op.Where(is_low, op.Neg(tail), tail)
    return op.Where(op.Greater(near, constant(math.exp(-2))), central, tail)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.searchsorted.Tensor: searchsorted,
    torch.ops.aten.repeat_interleave.self_int: repeat_interleave,
    torch.ops.aten.scalar_tensor.default: scalar_tensor,
    torch.ops.aten.sort.stable: sort_stable,
    torch.ops.aten._cdist_forward.default: cdist,
    torch.ops.aten.erf.default: erf,
    torch.ops.prims.ndtri.default: ndtri,
}
