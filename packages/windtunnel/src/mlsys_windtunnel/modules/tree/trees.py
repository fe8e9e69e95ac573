"""Sums of tree leaves: what forests and boosted trees have in common.

A row's leaf in each tree is found exactly, by comparing the values that the source compares; the leaves' values are
then gathered and summed, so gradients reach leaf values and none reach thresholds. Two ways to find leaves, one answer:
:mod:`.bits` for small trees, :mod:`.walk` for others. Without gradients, on a CPU in float64, the kernel of
``modules/native.py`` gives the same answer, quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.native import ZERO, NativeTrees, kernel
from mlsys_windtunnel.modules.tree.bits import BitTables, bin_edges, mask_bits
from mlsys_windtunnel.modules.tree.ensemble import Floats, TreeEnsemble
from mlsys_windtunnel.modules.tree.walk import Walk
from torch import Tensor, nn

Layout = Literal["bits", "walk"]

_MOST_TABLE_BYTES = 32 * 2**20
_ROW_TREES_PER_BLOCK = 32_768  # torch splits an operation of more elements over threads, which costs more than it gains
_MOST_MASK_BITS = 256
_NO_CATEGORY = float(2**24)  # XGBoost's end of categories, which no set holds
_STRUCTURE = (
    *("feature", "left", "right", "missing_left", "root", "leaf_start"),
    *("category_set", "category_start", "category_left"),
)
# Measured on one core, in nanoseconds: by hand
_NS_PER_LEVEL, _NS_PER_SEARCH, _NS_PER_MASK_BYTE = 3.7, 40.0, 0.09


class Trees(OperatorModule):
    """``(bias + sum over trees of the leaf's values) / divisor``.

    Args:
        ensemble: The trees.
        bias: Added to the sums, ``[outputs]``; None adds nothing.
        num_groups: Boosting for k outputs grows one tree of one value for each output in turn: trees t, t + k, ... are
            summed to output t.
        divisor: Number of trees that the sum is the mean of.
        layout: Method of finding leaves; None chooses what costs less.

    Attributes:
        leaf_value: ``[leaves, outputs]``, trainable.
        threshold: ``[splits]``; a parameter for training that softens the splits. After changing it call
            :meth:`use_layout`, since tables are built from it.
    """

    feature: Tensor  # as in TreeEnsemble, and so on
    left: Tensor
    right: Tensor
    missing_left: Tensor
    root: Tensor
    leaf_start: Tensor
    category_set: Tensor
    category_start: Tensor
    category_left: Tensor
    finder: BitTables | Walk
    _zero_is_missing: Tensor
    _is_category: Tensor

    def __init__(
        self,
        ensemble: TreeEnsemble,
        *,
        bias: npt.ArrayLike | None = None,
        num_groups: int = 1,
        divisor: float = 1.0,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        if ensemble.num_trees % num_groups or (num_groups > 1 and ensemble.num_outputs > 1):
            raise InvalidInputError(
                f"{ensemble.num_trees} trees of {ensemble.num_outputs} values cannot take turns "
                f"for {num_groups} outputs"
            )
        self.num_groups = num_groups
        self.divisor = divisor
        self.num_features = ensemble.num_features
        self.rounds_to_float32 = ensemble.rounds_to_float32
        self.zero_is_missing = ensemble.zero_is_missing
        self.threshold = nn.Parameter(torch.from_numpy(ensemble.threshold.copy()))
        self.leaf_value = nn.Parameter(torch.from_numpy(ensemble.leaf_value.copy()))
        self.bias = None if bias is None else nn.Parameter(torch.from_numpy(np.array(bias, np.float64).reshape(-1)))
        for name in _STRUCTURE:
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(getattr(ensemble, name))))
        clean = np.zeros((2, ensemble.num_features), bool)
        clean[0, list(ensemble.zero_is_missing)] = True
        clean[1, ensemble.categorical_features] = True
        self.register_buffer("_zero_is_missing", torch.from_numpy(clean[0]), persistent=False)
        self.register_buffer("_is_category", torch.from_numpy(clean[1]), persistent=False)
        self.use_layout(layout or cheapest_layout(ensemble))
        self.register_load_state_dict_post_hook(_rebuild)  # type: ignore[no-untyped-call]

    @property
    def ensemble(self) -> TreeEnsemble:
        """The trees as they are now, after training too."""
        return TreeEnsemble(
            **{name: getattr(self, name).numpy(force=True) for name in _STRUCTURE},
            threshold=self.threshold.double().numpy(force=True),
            leaf_value=self.leaf_value.double().numpy(force=True),
            num_features=self.num_features,
            rounds_to_float32=self.rounds_to_float32,
            zero_is_missing=self.zero_is_missing,
        )

    @property
    def bias_values(self) -> Floats:
        """Bias of each group, added to the sums of leaves, ``[groups]``; zeros where there is none."""
        zeros = np.zeros(self.num_groups)
        return zeros if self.bias is None else zeros + self.bias.double().numpy(force=True)

    def use_layout(self, layout: Layout) -> None:
        """Find leaves in this way from now on; builds what it needs from the thresholds."""
        finder = BitTables(self.ensemble) if layout == "bits" else Walk(self.ensemble)
        self.layout: Layout = layout
        self.finder = finder.to(device=self.threshold.device, dtype=self.threshold.dtype)

    def leaves(self, x: Tensor) -> Tensor:
        """Return the index in ``leaf_value`` of each row's leaf in each tree, ``[rows, trees]`` int64."""
        leaves: Tensor = self.finder.find(self.finder.columns(self._clean(x)), self.threshold)
        return leaves if self.finder.tree_dim == 1 else leaves.t()

    def leaf_weights(self, x: Tensor) -> Tensor:
        """Return 1 for each leaf that a row reaches, 0 for others: ``[rows, leaves]``."""
        return x.new_zeros(x.shape[0], len(self.leaf_value)).scatter(1, self.leaves(x), 1.0)

    def tree_values(self, x: Tensor) -> Tensor:
        """Return the answer of each tree, ``[rows, trees, outputs]``."""
        return self._values(self.leaves(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return sums ``[rows, outputs]``."""
        if (sums := native_sums(self, x)) is not None:
            return sums
        clean = self._clean(x)

        def answer(block: Tensor) -> Tensor:
            return self._sums(self.finder.columns(block))

        if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.is_cuda:
            sums = answer(clean)
        else:
            sums = map_row_blocks(answer, clean, max(32, _ROW_TREES_PER_BLOCK // len(self.root)))
        return sums / self.divisor if self.divisor != 1 else sums

    def _clean(self, x: Tensor) -> Tensor:
        """Return inputs as the source compares them."""
        x = x.detach()
        if self.rounds_to_float32:
            x = _rounded_to_float32(x)
        if self.zero_is_missing:
            x = x.masked_fill((x.abs() <= ZERO) & self._zero_is_missing, torch.nan)
        if len(self.category_start) > 1:
            code = x.trunc()
            if self.rounds_to_float32:  # XGBoost: whatever is below 0 is a category that no set holds
                code = code.masked_fill(x < 0, _NO_CATEGORY)
            x = torch.where(self._is_category, code.masked_fill(code < 0, torch.nan), x)
        return x

    def _sums(self, columns: Tensor) -> Tensor:
        tree_dim = self.finder.tree_dim
        values = self._values(self.finder.find(columns, self.threshold))
        if self.num_groups > 1 and tree_dim == 1:  # from trees of one value each to rounds of num_groups values
            values = values.reshape(values.shape[0], -1, self.num_groups)
        elif self.num_groups > 1:
            values = values.reshape(-1, self.num_groups, values.shape[1]).transpose(1, 2)
        if self.bias is not None:
            first, others = torch.split(values, [1, values.shape[tree_dim] - 1], tree_dim)
            values = torch.cat([first + self.bias, others], tree_dim)
        if torch.is_grad_enabled():
            return values.sum(tree_dim)
        # One after another, as the sources add: what is a tie there is a tie here.
        return values.cumsum(tree_dim).select(tree_dim, -1)

    def _values(self, leaves: Tensor) -> Tensor:
        return self.leaf_value.index_select(0, leaves.reshape(-1)).reshape(*leaves.shape, self.leaf_value.shape[1])


def tree_parts(module: nn.Module) -> list[tuple[nn.Module, str, Trees]]:
    """Return all trees within a module, each with its owner and its name there."""
    return [
        (owner, name, part)
        for owner in module.modules()
        for name, part in owner.named_children()
        if isinstance(part, Trees)
    ]


def _rounded_to_float32(x: Tensor) -> Tensor:
    """Round the numbers of ``x`` to float32; keep its dtype.

    Where nothing is traced or trained by numpy, on one thread: torch would wake its threads for this one small
    operation, which takes longer than all trees when the machine is shared.
    """
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if is_traced or torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float64:
        return x.to(torch.float32).to(x.dtype)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, as it does in torch
        return torch.from_numpy(x.numpy().astype(np.float32).astype(np.float64))


def cheapest_layout(ensemble: TreeEnsemble) -> Layout:
    """Return the layout that costs less a row, by the figures measured."""
    features = np.unique(ensemble.feature)
    bits = mask_bits(ensemble)
    if not len(features) or bits > _MOST_MASK_BITS:
        return "walk"
    mask_bytes = ensemble.num_trees * bits // 8
    if sum(len(bin_edges(ensemble, feature)) + 2 for feature in features) * mask_bytes > _MOST_TABLE_BYTES:
        return "walk"
    search = len(features) * (_NS_PER_SEARCH + _NS_PER_MASK_BYTE * mask_bytes)
    return "bits" if search < _NS_PER_LEVEL * int(ensemble.depths().sum()) else "walk"


def _rebuild(module: nn.Module, _: object) -> None:
    """Rebuild what is derived from thresholds when a state dict is loaded."""
    assert isinstance(module, Trees)
    module.use_layout(module.layout)


def map_row_blocks(function: Callable[[Tensor], Tensor], x: Tensor, rows_per_block: int) -> Tensor:
    """Apply ``function`` to ``x`` block by block; rows come first in ``x`` and in what it returns.

    Runs without gradients, on as many threads as torch is set to use.
    """
    blocks = torch.split(x, rows_per_block)

    def run(block: Tensor) -> Tensor:
        with torch.inference_mode():  # is a property of the thread
            return function(block)

    num_threads = min(torch.get_num_threads(), len(blocks))
    if num_threads < 2:
        return torch.cat([run(block) for block in blocks])
    with ThreadPoolExecutor(num_threads) as pool:
        return torch.cat(list(pool.map(run, blocks)))


def native_sums(trees: Trees, x: Tensor) -> Tensor | None:
    """Compute ``trees.forward`` by the kernel; None where a form in torch has to."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float64:
        return None
    native = native_form(trees)
    return None if native is None else torch.from_numpy(native(x.detach().numpy()))


def native_form(trees: Trees) -> NativeTrees | None:
    """Return the kernel's form of a module as it is now; None where there is no kernel.

    It is kept beside the module, not in it, and made anew when the module's parameters have changed.
    """
    parameters = trees._parameters
    state = tuple([(each.data_ptr(), each._version) for each in parameters.values() if each is not None])
    kept = _FORMS.get(trees)
    if kept is not None and kept[0] == state:
        return kept[1]
    library = kernel()
    if library is None:
        return None
    bias = None if trees.bias is None else np.ascontiguousarray(trees.bias.double().numpy(force=True))
    options: dict[str, Any] = {"bias": bias, "num_groups": trees.num_groups, "divisor": float(trees.divisor)}
    _FORMS[trees] = state, NativeTrees(library, trees.ensemble, **options)
    return _FORMS[trees][1]


_FORMS: WeakKeyDictionary[Trees, tuple[tuple[tuple[int, int], ...], NativeTrees]] = WeakKeyDictionary()
