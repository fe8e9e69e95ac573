"""Sums of tree leaves by a C++ kernel: what answers many rows without gradients, on a CPU in float64.

The kernel is ``native/trees.cpp``; where there is no compiler the forms in torch answer.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.config import settings
from mlsys_core.errors import MlsysError
from mlsys_core.native import load_kernel
from torch import Tensor

from mlsys_windtunnel.modules.tree_ensemble import Integers, TreeEnsemble

if TYPE_CHECKING:
    from mlsys_windtunnel.modules.trees import Trees

_log = logging.getLogger(__name__)
_NODE = np.dtype([("threshold", "f8"), ("feature", "i4"), ("first_child", "i4")])  # as in trees.cpp
_MISSING_LEFT = np.int32(-(2**31))


@lru_cache(maxsize=1)
def kernel() -> ctypes.CDLL | None:
    """The compiled kernel, built on the first call ever on this machine (seconds); None where it cannot be."""
    source = Path(__file__).parent.parent / "native" / "trees.cpp"
    try:
        library = load_kernel(source, cache_dir=settings().cache_dir)
    except MlsysError as error:
        _log.warning("trees are answered by torch, which is slower: %s", error)
        return None
    return library


def native_sums(trees: Trees, x: Tensor) -> Tensor | None:
    """What ``trees.forward`` answers for clean inputs, by the kernel; None where a form in torch has to.

    The layout is kept beside the module, not in it, and made anew when its parameters have changed.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float64:
        return None
    library = kernel()
    if library is None:
        return None
    parameters = [trees.threshold, trees.leaf_value, *([] if trees.bias is None else [trees.bias])]
    state = tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)
    kept = _LAYOUTS.get(trees)
    if kept is None or kept[0] != state:
        bias = None if trees.bias is None else np.ascontiguousarray(trees.bias.double().numpy(force=True))
        layout = NativeTrees(trees.ensemble, bias=bias, num_groups=trees.num_groups, divisor=float(trees.divisor))
        kept = _LAYOUTS[trees] = state, layout
    return kept[1].sums(library, x)


class NativeTrees:
    """An ensemble laid out for the kernel.

    Args:
        ensemble: The trees.
        bias: ``[outputs]`` or None; as in :class:`.trees.Trees`, like the rest.
    """

    def __init__(
        self, ensemble: TreeEnsemble, *, bias: npt.NDArray[np.float64] | None, num_groups: int, divisor: float
    ) -> None:
        order, place = _siblings_together(ensemble)
        num_splits = len(ensemble.feature)
        is_split = order < num_splits
        split = order[is_split]
        nodes = np.zeros(len(order), _NODE)
        nodes["threshold"] = np.nan
        nodes["threshold"][is_split] = ensemble.threshold[split]
        missing_left = np.where(ensemble.missing_left[split], _MISSING_LEFT, 0).astype(np.int32)
        nodes["feature"][is_split] = ensemble.feature[split].astype(np.int32) | missing_left
        nodes["first_child"] = np.arange(len(order))
        nodes["first_child"][is_split] = place[_node(ensemble.right[split], num_splits)]
        leaf_value = np.zeros((len(order), ensemble.num_outputs))
        leaf_value[~is_split] = ensemble.leaf_value[order[~is_split] - num_splits]
        set_start, set_size, member = _category_sets(ensemble, place)
        root = place[_node(ensemble.root, num_splits)].astype(np.int32)
        # the arrays are kept, since the kernel is given their addresses
        self._arrays = (nodes, root, ensemble.depths().astype(np.int32), set_start, set_size, member, leaf_value)
        self._bias = bias  # likewise
        self._width = num_groups if num_groups > 1 else ensemble.num_outputs
        self._fixed = (
            *map(_pointer, self._arrays),
            *map(ctypes.c_int64, (ensemble.num_trees, ensemble.num_outputs, num_groups)),
            ctypes.c_int32(bool(set_size.any())),
            _pointer(bias),
            ctypes.c_double(divisor),
        )

    def sums(self, library: ctypes.CDLL, x: Tensor) -> Tensor:
        """``[rows, outputs]`` from clean inputs ``[rows, features]`` float64 on the CPU."""
        x = x.contiguous()
        out = x.new_empty((x.shape[0], self._width))
        library.mlsys_sum_trees(
            *self._fixed,
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_int64(x.shape[1]),
            ctypes.c_int32(torch.get_num_threads()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out


def _node(child: Integers, num_splits: int) -> Integers:
    """Splits keep their places, leaves stand behind all splits."""
    nodes: Integers = np.where(child >= 0, child, num_splits + ~child)
    return nodes


def _siblings_together(ensemble: TreeEnsemble) -> tuple[Integers, Integers]:
    """An order of nodes, tree by tree, in which the children of a split stand side by side, the right one first.

    Returns:
        The node at each place, and the place of each node.
    """
    num_splits = len(ensemble.feature)
    level, tree = _node(ensemble.root, num_splits), np.arange(ensemble.num_trees)
    nodes, trees = [level], [tree]
    while len(level):
        is_split = level < num_splits
        split, tree = level[is_split], np.repeat(tree[is_split], 2)
        level = _node(np.stack([ensemble.right[split], ensemble.left[split]], axis=1).ravel(), num_splits)
        nodes.append(level)
        trees.append(tree)
    order = np.concatenate(nodes)[np.argsort(np.concatenate(trees), kind="stable")]
    place = np.zeros(len(order), np.int64)
    place[order] = np.arange(len(order))
    return order, place


def _category_sets(ensemble: TreeEnsemble, place: Integers) -> tuple[Any, Any, Any]:
    """Start and size of each node's set of categories (size 0: numeric), and the sets' bytes."""
    set_start, set_size = np.zeros((2, len(place)), np.int32)
    members = [np.zeros(0, bool)]
    start = 0
    for split in np.flatnonzero(ensemble.category_set >= 0):
        first, last = ensemble.category_start[ensemble.category_set[split] :][:2]
        members.append(np.append(ensemble.category_left[first:last], False))  # codes the set does not hold: right
        set_start[place[split]], set_size[place[split]] = start, len(members[-1])
        start += len(members[-1])
    return set_start, set_size, np.concatenate(members).astype(np.uint8)


def _pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


_LAYOUTS: WeakKeyDictionary[Trees, tuple[tuple[tuple[int, int], ...], NativeTrees]] = WeakKeyDictionary()
