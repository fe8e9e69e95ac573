"""Chains of reshapes and permutations of a training graph, each as one view of its root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod

from mlsys_nimble.ir.operators import Kind, Permute, Reshape
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.passes.rewrite import Rewriter


@dataclass(frozen=True, slots=True)
class _Chain:
    """View of a root: its elements split into ``sizes``, and the sizes that make up each dimension."""

    root: ValueId
    sizes: tuple[int, ...]  # in the root's order
    dims: tuple[tuple[int, ...], ...]  # of the view: indices into sizes


def straighten(program: Program) -> Program:
    """Replace each chain of reshapes and permutations by at most one split, one permutation and one merge.

    Dimensions that are merged in between and split again would be copied for nothing.
    """
    rewriter = Rewriter(program)
    chains: dict[ValueId, _Chain] = {}
    for position, operator in rewriter:
        if not isinstance(operator.kind, Reshape | Permute):
            continue
        chain = _extended(chains, operator, rewriter.values)
        if chain is not None and chain.root != operator.inputs[0]:
            _put(rewriter, position, operator, chain)
    return rewriter.build()


def _extended(chains: dict[ValueId, _Chain], operator: Operator, values: Sequence[ValueType]) -> _Chain | None:
    """Add the chain of a reshape's or permutation's result to ``chains`` and return it; None if none expresses it."""
    source, value = operator.inputs[0], operator.outputs[0]
    inner = chains.get(source) or _whole(source, values[source].shape)
    if isinstance(operator.kind, Permute):
        chain: _Chain | None = replace(inner, dims=tuple([inner.dims[dim] for dim in operator.kind.dims]))
    else:
        chain = _reshaped(inner, values[value].shape) if 0 not in inner.sizes else None
    if chain is not None:
        chains[value] = chain = _coalesced(chain)
    return chain


def _whole(value: ValueId, shape: tuple[int, ...]) -> _Chain:
    return _Chain(value, shape, tuple([(dim,) for dim in range(len(shape))]))


def _reshaped(chain: _Chain, shape: tuple[int, ...]) -> _Chain | None:
    """Regroup the dimensions of a chain; None if a boundary falls where no size can be split."""
    sizes = {index: (size,) for index, size in enumerate(chain.sizes)}  # by index, the parts of each size
    left = [index for dim in chain.dims for index in dim if chain.sizes[index] != 1]
    flat = [(index, chain.sizes[index]) for index in left]
    dims: list[list[tuple[int, int]]] = []  # (index, part)
    counts = dict.fromkeys(sizes, 0)
    parts: dict[int, list[int]] = {index: [] for index in sizes}
    for wanted in shape:
        dim: list[tuple[int, int]] = []
        while wanted > 1:
            index, size = flat.pop(0)
            part = size if wanted % size == 0 else wanted
            if size % part:
                return None
            parts[index].append(part)
            dim.append((index, counts[index]))
            counts[index] += 1
            wanted //= part
            if size != part:
                flat.insert(0, (index, size // part))
        dims.append(dim)
    starts, total, all_sizes = {}, 0, []
    for index, size in enumerate(chain.sizes):
        starts[index] = total
        some = parts[index] or [size]
        all_sizes += some
        total += len(some)
    return _Chain(
        chain.root, tuple(all_sizes), tuple([tuple([starts[index] + part for index, part in dim]) for dim in dims])
    )


def _coalesced(chain: _Chain) -> _Chain:
    """Merge sizes that stay side by side in one dimension, and drop those of 1."""
    dims = [[index for index in dim if chain.sizes[index] != 1] for dim in chain.dims]
    follows = {a: b for dim in dims for a, b in pairwise(dim)}
    kept = [index for index in range(len(chain.sizes)) if chain.sizes[index] != 1]
    sizes: list[int] = []
    number: dict[int, int] = {}
    for previous, index in zip([None, *kept], kept, strict=False):
        if previous is not None and follows.get(previous) == index:
            sizes[-1] *= chain.sizes[index]
        else:
            number[index] = len(sizes)
            sizes.append(chain.sizes[index])
    return _Chain(chain.root, tuple(sizes), tuple([tuple([number[p] for p in dim if p in number]) for dim in dims]))


def _put(rewriter: Rewriter, position: int, operator: Operator, chain: _Chain) -> None:
    """Replace an operator by the chain, at most three views."""
    value, dtype = chain.root, rewriter.type(chain.root).dtype
    order = tuple([index for dim in chain.dims for index in dim])
    wanted = rewriter.type(operator.outputs[0]).shape
    views: list[tuple[Reshape | Permute, tuple[int, ...]]] = []
    shape = rewriter.type(value).shape
    if order != tuple(range(len(order))):
        if chain.sizes != shape:
            views.append((Reshape(), chain.sizes))
        shape = tuple([chain.sizes[index] for index in order])
        views.append((Permute(order), shape))
    if shape != wanted:
        views.append((Reshape(), wanted))
    if not views:
        rewriter.substitute(operator, value)
        return
    for kind, some in views[:-1]:
        value = insert_before(rewriter, position, operator, kind, (value,), ValueType(some, dtype))
    rewriter.replace(position, replace(operator, kind=views[-1][0], inputs=(value,)))


def insert_before(
    rewriter: Rewriter, position: int, operator: Operator, kind: Kind, inputs: tuple[ValueId, ...], type_: ValueType
) -> ValueId:
    """Insert an operator before another, named after it and numbered."""
    return rewriter.insert(position, f"{operator.name}_{len(rewriter.values)}", kind, inputs, type_)


def columns_of(program: Program) -> Callable[[ValueId], object]:
    """Return a key function of values: equal for views whose last dimension shows the same elements of one root."""
    chains: dict[ValueId, _Chain] = {}
    for operator in program.operators:
        if isinstance(operator.kind, Reshape | Permute):
            _extended(chains, operator, program.values)
    return partial(_columns, chains, program)


def _columns(chains: dict[ValueId, _Chain], program: Program, value: ValueId) -> object:
    """Return the root of a view, and the sizes and strides of its columns in the root."""
    chain = chains.get(value) or _whole(value, program.values[value].shape)
    strides = [prod(chain.sizes[index + 1 :]) for index in range(len(chain.sizes))]
    last: list[tuple[int, int]] = []  # (size, stride), neighbours merged
    for index in chain.dims[-1]:
        size, stride = chain.sizes[index], strides[index]
        if size == 1:
            continue
        if last and last[-1][1] == size * stride:
            last[-1] = (last[-1][0] * size, stride)
        else:
            last.append((size, stride))
    return chain.root, tuple(last)
