"""Exported programs answer as the module does, whatever the structure of their inputs: keywords, dicts, constants."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.serve.spec import wire_form
from mlsys_dvabatch.stages.slicing.program import load_program
from mlsys_dvabatch.stages.zoo import Loading, load
from torch import Tensor, nn
from torch.export import Dim, export, save
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", min=1, max=64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
LEAVES = st.sampled_from([*DTYPES, None, True, 3, 0.5])
KEYS = st.sampled_from(["a", "b", "x.y", "class"])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2).map(tuple)
        | st.lists(inner, min_size=1, max_size=2)
        | st.dictionaries(KEYS, inner, min_size=1, max_size=2)
    ),
    max_leaves=3,
)


class Sums(nn.Module):
    """Add all inputs, each with its own factor."""

    def forward(
        self, first: Any = None, second: Any = None, *, mask: Any = None, flags: Any = None, last: Tensor
    ) -> dict[str, Any]:
        total: Any = 0
        for factor, leaf in enumerate(tree_leaves((first, second, mask, flags, last)), 1):
            if isinstance(leaf, Tensor):
                total = total + leaf.to(torch.float32) * factor
            elif leaf is not None:
                total = total + float(leaf) * factor
        return {"total": total, "rest": (None, total.sum(1).to(torch.bfloat16))}


def drawn(like: Any, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    if not isinstance(like, torch.dtype):
        return like
    return torch.from_numpy(rng.integers(0, 2 if like is torch.bool else 9, shape)).to(like)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(TREES, max_size=2),
    st.dictionaries(st.sampled_from(["mask", "flags"]), TREES, max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_the_tensors_within_a_programs_inputs_are_served_by_name(args, kwargs, is_sized, is_trusted):
    tree, spec = tree_flatten((tuple(args), kwargs))
    tree = [*tree, torch.float32]  # one tensor at least
    axes = {0: BATCH, 1: LENGTH} if is_sized else {0: BATCH}

    def called(leaves: list[Any], last: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own_args, own_kwargs = tree_unflatten(leaves, spec)
        return own_args, {**own_kwargs, "last": last}

    def of(rng: np.random.Generator, rows: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        *leaves, last = (drawn(each, rng, (rows, length)) for each in tree)
        return called(leaves, last)

    rng = np.random.default_rng(0)
    example = of(rng, 3, 4)
    *leaves, last = (axes if isinstance(each, torch.dtype) else None for each in tree)
    dims_args, dims_kwargs = called(leaves, last)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "sums.pt2"
        dims = dict(zip(("first", "second"), dims_args, strict=False)) | dims_kwargs
        save(export(Sums(), *example, dynamic_shapes=dims), path)
        loaded = load(str(path), Path(folder), Loading(trust_code=is_trusted))
    form = wire_form(loaded, max_batch_size=8)
    staged: Any = loaded.model
    given = of(rng, 5, 6 if is_sized else 4)
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    assert len(form.spec.inputs) == len({each.name for each in form.spec.inputs}) == len(tensors)
    arrays = [(each.float() if each.dtype is torch.bfloat16 else each).numpy() for each in tensors]
    for tensor, array in zip(form.spec.inputs, arrays, strict=True):
        assert tensor.datatype.dtype == array.dtype
    rows = form.wire.payloads(dict(zip((each.name for each in form.spec.inputs), arrays, strict=True)), 5)
    for row in rows:
        staged.check(row)
    expected = [each for each in tree_leaves(Sums()(*given[0], **given[1])) if each is not None]
    for got, number in zip(staged.answers(rows), range(5), strict=True):
        outer = got[-len(expected) :]
        assert [each.tolist() for each in outer] == [each[number].float().tolist() for each in expected]


def test_a_number_among_the_inputs_is_refused_by_name(tmp_path: Path):
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: Tensor) -> Tensor:
            return x * factor

    program = export(Scaled(), (torch.ones(2, 3), torch.tensor(2.0)), dynamic_shapes=({0: BATCH}, None))
    save(program, tmp_path / "scaled.pt2")
    with pytest.raises(InvalidInputError, match=r"scaled\.pt2: input 'factor' is one number"):
        load_program(tmp_path / "scaled.pt2")
