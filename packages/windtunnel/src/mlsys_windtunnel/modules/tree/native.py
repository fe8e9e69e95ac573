"""Sums of tree leaves by the kernel: what answers without gradients, on a CPU in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.native import new
from mlsys_windtunnel.modules.native import address
from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from mlsys_windtunnel.modules.tree.layout import lay_out

ZERO = float(np.float32(1e-35))  # LightGBM's kZeroThreshold: what is no larger counts as zero


class NativeTrees:
    """An ensemble laid out for the kernel.

    Args:
        library: The kernel.
        ensemble: The trees.
        bias: ``[outputs]`` or None; as in :class:`.trees.Trees`, like the rest.
    """

    def __init__(
        self,
        library: Any,
        ensemble: TreeEnsemble,
        *,
        bias: npt.NDArray[np.float64] | None = None,
        num_groups: int = 1,
        divisor: float = 1.0,
    ) -> None:
        layout = lay_out(ensemble)
        arrays = {
            **{name: getattr(layout, name) for name in ("nodes", "features", "edges", "root", "leaf")},
            **{name: getattr(layout, name) for name in ("set_start", "set_size", "member")},
            "leaf_value": np.ascontiguousarray(ensemble.leaf_value),
            "bias": bias,
        }
        self._arrays = arrays  # kept, since the kernel is given their addresses
        self._record = new(
            library.structs["Ensemble"],
            **{name: None if array is None else array.ctypes.data for name, array in arrays.items()},
            divisor=divisor,
            zero=ZERO,
            num_nodes=len(layout.nodes),
            num_features=len(layout.features),
            num_columns=layout.num_columns,
            num_trees=ensemble.num_trees,
            num_outputs=ensemble.num_outputs,
            num_groups=num_groups,
            is_wide=layout.is_wide,
            has_categories=bool(layout.set_size.any()),
            rounds_to_float32=ensemble.rounds_to_float32,
        )
        self._address = ctypes.addressof(self._record)
        self._num_features = ensemble.num_features
        self._width = num_groups if num_groups > 1 else ensemble.num_outputs
        self._sum_trees = library.mlsys_sum_trees

    def __call__(self, x: npt.NDArray[np.float64], *, slope: float = 0.0) -> npt.NDArray[np.float64]:
        """Return ``[rows, outputs]`` from inputs ``[rows, features]``.

        Args:
            x: The inputs.
            slope: If not 0, probabilities ``[rows, 2]`` are answered: the logistic function of the sums of one output
                times this number, after what they lack to 1.
        """
        x = np.ascontiguousarray(x)
        num_rows, num_features = x.shape
        if num_features < self._num_features:
            raise InvalidInputError(f"the trees read {self._num_features} columns; the table has {num_features}")
        out = np.empty((num_rows, 2 if slope else self._width))
        num_threads = torch.get_num_threads()
        self._sum_trees(self._address, address(x), num_rows, num_features, num_threads, slope, address(out))
        return out
