"""Operators' forms: functions from tables ``[rows, width]`` float64 to such a table, as their modules compute.

They share memory with the parameters or are derived from them, so they hold while the parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.checks.values import is_tame
from mlsys_windtunnel.modules.base import Classifier, Regressor
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding, Impute, Scale, Select
from mlsys_windtunnel.modules.columns.scale import Chain, ElementwiseAffine, Rescale
from mlsys_windtunnel.modules.combine.combine import Beside
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.linear.neural import Layers, activate
from mlsys_windtunnel.modules.native import Guard, NativeLinear, Weights, kernel
from mlsys_windtunnel.modules.tree.heads import OUTPUTS, Mapped, TreeClassifier
from mlsys_windtunnel.modules.tree.trees import Trees, native_form
from torch import Tensor, nn

if TYPE_CHECKING:
    from mlsys_windtunnel.modules.linear.neural import Activation
    from mlsys_windtunnel.modules.native import NativeTrees

Floats = npt.NDArray[np.float64]
Form = Callable[..., Floats]


def form(module: nn.Module) -> Form | None:
    """Return the form of a module as it is now, or None. A subclass has none, since it may compute something else."""
    make = _MAKERS.get(type(module))
    return None if make is None else make(module)


def side_by_side(embeddings: Sequence[CategoryEmbedding | None]) -> Form:
    """Return the form that puts tables side by side, after the embedding of those for which there is one."""
    makers = [None if each is None else _rows_of(each) for each in embeddings]
    makers_of_one = [None if each is None else _row_of(each) for each in embeddings]

    def join_one(tables: Sequence[Floats]) -> Floats:
        """Join tables of one row: without arrays of indices, which take longer than the rows."""
        parts: list[Floats] = []
        for make, table in zip(makers_of_one, tables, strict=True):
            parts.extend(table if make is None else make(table))
        return np.concatenate(parts).reshape(1, -1)

    def join(*tables: Floats) -> Floats:
        if len(tables[0]) == 1:
            return join_one(tables)
        parts: list[Floats] = []
        for make, table in zip(makers, tables, strict=True):
            parts.extend([table] if make is None else make(table))
        return np.concatenate(parts, axis=1)

    return join


def affine_of(
    affine: Affine, embeddings: Sequence[CategoryEmbedding | None], *, guard: Guard | None = None
) -> Form | None:
    """Return the form of ``affine`` over tables side by side, without putting them so.

    Where the affine map reads rows of an embedding, it is done to the embedding's tables beforehand: a category then
    costs one addition for each output. None where the columns of each table are unknown. ``guard`` looks at
    the tables where a value of the map is not finite, or very large.
    """
    widths = [None if each is None else sum(table.shape[1] for table in each.tables) for each in embeddings]
    if widths.count(None) > 1:
        return None
    weight, bias = _array(affine.weight).T, _array(affine.bias)
    rest = len(weight) - sum(width for width in widths if width is not None)
    starts = np.cumsum([0, *(rest if width is None else width for width in widths)])
    slices = np.split(weight, starts[1:-1])
    library = kernel()
    if len(bias) == 1 and library is not None:
        weights = [_weights(each, part) for each, part in zip(embeddings, slices, strict=True)]
        return NativeLinear(library, weights, float(bias[0]), guard=guard)
    products = [_product(each, part) for each, part in zip(embeddings, slices, strict=True)]

    def add(*tables: Floats) -> Floats:
        total = products[0](tables[0])
        total += bias
        for product, table in zip(products[1:], tables[1:], strict=True):
            total += product(table)
        if guard is not None and not is_tame(total):
            guard(tables)
        return total

    return add


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array


def _product(embedding: CategoryEmbedding | None, weight: Floats) -> Form:
    if embedding is None:
        return lambda x: x @ weight
    rows, first = _rows_times(embedding, weight)
    return lambda codes: np.add.reduce(rows.take(codes.astype(np.intp) + first, axis=0), axis=1)


def _weights(embedding: CategoryEmbedding | None, weight: Floats) -> Weights:
    """Return the weights of one output over one table."""
    if embedding is None:
        return Weights(weight[:, 0])
    rows, first = _rows_times(embedding, weight)
    return Weights(rows[:, 0], first)


def _rows_times(embedding: CategoryEmbedding, weight: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Multiply the rows of an embedding's tables by ``weight``; return the products and where each table begins."""
    tables = [_array(table) for table in embedding.tables]
    ends = np.cumsum([table.shape[1] for table in tables])
    parts = np.split(weight, ends[:-1])
    rows = np.concatenate([table @ part for table, part in zip(tables, parts, strict=True)])
    return rows, np.cumsum([0, *map(len, tables[:-1])])


def _rows_of(embedding: CategoryEmbedding) -> Callable[[Floats], list[Floats]]:
    """Return a function from codes to the rows of each column's table."""
    tables = [_array(table) for table in embedding.tables]

    def rows(codes: Floats) -> list[Floats]:
        indices = codes.astype(np.intp)
        return [table.take(indices[:, column], axis=0) for column, table in enumerate(tables)]

    return rows


def _row_of(embedding: CategoryEmbedding) -> Callable[[Floats], list[Floats]]:
    """Return a function from the codes of one row, ``[1, columns]``, to the row of each column's table."""
    tables = [_array(table) for table in embedding.tables]

    def row(codes: Floats) -> list[Floats]:
        (found,) = codes.tolist()
        return [table[int(code)] for table, code in zip(tables, found, strict=True)]

    return row


def _affine(module: Affine) -> Form:
    weight, bias = _array(module.weight).T, _array(module.bias)
    return lambda x: x @ weight + bias


def _elementwise_affine(module: ElementwiseAffine) -> Form:
    shift, scale = _array(module.shift), _array(module.scale)

    def scaled(x: Floats) -> Floats:
        result = x - shift
        result /= scale
        return result

    return scaled


def _rescale(module: Rescale) -> Form:
    scale, offset = _array(module.scale), _array(module.offset)
    return lambda x: x * scale + offset


def _impute(module: Impute) -> Form:
    fill, marker = _array(module.fill), module.marker.item()
    kept, indicated = module.kept.numpy(), module.indicated.numpy()
    keeps_first = bool((kept == np.arange(len(kept))).all())

    def run(x: Floats) -> Floats:
        is_missing = np.isnan(x) if module.is_marked_by_nan else x == marker
        if keeps_first and x.shape[1] == len(kept) and not len(indicated):
            return np.where(is_missing, fill, x)
        filled = np.where(is_missing.take(kept, axis=1), fill, x.take(kept, axis=1))
        return np.concatenate([filled, is_missing.take(indicated, axis=1)], axis=1) if len(indicated) else filled

    return run


def _select(module: Select) -> Form:
    columns = module.columns.numpy()
    return lambda x: x.take(columns, axis=1)


def _scale(module: Scale) -> Form:
    weight = module.weight.item()
    return lambda x: x * weight


def _body(module: Classifier | Regressor) -> Form | None:
    """Return the form of a predictor's scores."""
    return form(module.body)


def _chain(module: nn.Sequential) -> Form | None:
    steps = [step for step in map(form, module) if step is not None]

    def run(x: Floats) -> Floats:
        for step in steps:
            x = step(x)
        return x

    return run if len(steps) == len(module) else None


def _mapped(module: Mapped) -> Form | None:
    """Return the form of mapped scores; the function stays torch's, so that the bits are its own."""
    scores = form(module.body) if type(module.body) in (Beside, Trees) else None
    if scores is None or (module.output == "identity" and module.slope == 1):
        return scores
    function, slope = OUTPUTS[module.output], module.slope

    def run(x: Floats) -> Floats:
        with torch.inference_mode():
            result: Floats = function(torch.from_numpy(scores(x)) * slope).numpy()
        return result

    return run


Layer = tuple[Tensor, Tensor, "Activation"]  # weight [outputs, inputs], bias [outputs], and what follows them


class TreesAndNetworks:
    """Scores ``[rows, outputs]`` of :class:`.Beside` as its parameters are now.

    Args:
        module: Shares its memory with this form.
        trees: The kernel's form of its trees.
        networks: The layers of each network.
    """

    def __init__(self, module: Beside, trees: NativeTrees, networks: list[list[Layer]]) -> None:
        self._fill, self._low, self._high = (each.numpy() for each in (module.fill, module.low, module.high))
        self._trees = trees
        self._networks = networks

    def __call__(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores of ``[rows, columns]`` float64."""
        bounded = np.minimum(np.maximum(np.where(np.isnan(x), self._fill, x), self._low), self._high)
        with torch.inference_mode():
            scores, table = torch.from_numpy(self._trees(x)), torch.from_numpy(bounded)
            for layers in self._networks:
                hidden = table
                for weight, bias, activation in layers:
                    hidden = activate(torch.nn.functional.linear(hidden, weight, bias), activation)
                scores += hidden
        result: npt.NDArray[np.float64] = scores.numpy()
        return result


def beside_form(module: Beside) -> TreesAndNetworks | None:
    """Return the form of a module; None without a kernel, or with networks that are no :class:`.Layers`."""
    trees = native_form(module.trees) if type(module.trees) is Trees else None
    networks = [_layers(network) for network in module.networks]
    whole = [layers for layers in networks if layers is not None]
    return TreesAndNetworks(module, trees, whole) if trees is not None and len(whole) == len(networks) else None


def _layers(network: nn.Module) -> list[Layer] | None:
    if type(network) is not Layers:
        return None
    affine = [layer for layer in network.layers if type(layer) is Affine]
    if len(affine) != len(network.layers):
        return None
    follows: list[Activation] = [network.hidden] * (len(affine) - 1) + [network.last]
    return [(layer.weight.detach(), layer.bias.detach(), each) for layer, each in zip(affine, follows, strict=True)]


_MAKERS: dict[type[nn.Module], Callable[[Any], Form | None]] = {
    Affine: _affine,
    Beside: beside_form,
    Chain: lambda module: _chain(module.steps),
    Classifier: _body,
    ElementwiseAffine: _elementwise_affine,
    Impute: _impute,
    Mapped: _mapped,
    Regressor: _body,
    Rescale: _rescale,
    Scale: _scale,
    Select: _select,
    TreeClassifier: _body,
    Trees: native_form,
    nn.Identity: lambda _: lambda x: x,
    nn.Sequential: _chain,
}
