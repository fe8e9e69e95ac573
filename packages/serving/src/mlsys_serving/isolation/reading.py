"""Follow requests through a model's operators, and name one that computes a value of several of them.

The check by value (:mod:`.check`) sees what its requests show, and a bound may hide the rest: counts divided by
``counts.max().clamp(min=1000)`` mix only beyond a thousand. So here each operator that runs is tried by itself: it gets
numbers drawn for one request after another, and what changes in its result belongs to that request, or to several.
Two kinds of mixing are told apart:

- **Mixed**: a value of several requests, as their largest number is. Where an answer follows from it, the operator is
  named: values prove nothing, as the next request may lie beyond any that was tried.
- **Moved**: the place of a row depends on other requests, as where rows are sorted and later put back. Nothing hides
  that, so values decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from mlsys_serving.isolation.check import ADVICE

_ROWS = 2  # requests that are followed
_MOVED, _MIXED = _ROWS + 1, _ROWS + 2  # owners of an element, beside the numbers of requests from 1, and 0: nobody
_FEW, _SOME, _MANY = 2, 3, 17  # times that an operator is tried: a large one; any; one behind which a bound may hide
_SMALL, _LARGE, _PERIOD = 1 << 8, 1 << 18, 8191  # numbers; those after which the ones that are drawn come again
_MOVING = {
    *("index", "_unsafe_index", "index_put", "_unsafe_index_put", "index_select", "index_copy", "gather", "scatter"),
    *("masked_select", "masked_scatter", "nonzero", "sort", "argsort", "topk", "take", "take_along_dim"),
    *("unique_dim", "_unique2", "repeat_interleave"),
    *("gatherelements", "gathernd", "scatterelements", "scatternd", "compress", "unique"),  # ONNX's, in small letters
}
_UNFILLED = ("empty", "new_empty", "resize")


class _UnreadError(Exception):
    """An operator takes none of the numbers that were drawn for it."""


def require_followed(name: str, run: Callable[..., Any], rows: Sequence[Tensor]) -> None:
    """Refuse a model by the name of the operator that mixes requests; see :func:`mixing_operator`.

    Raises:
        InvalidInputError: It has one.
    """
    if (operator := mixing_operator(run, rows)) is not None:
        raise InvalidInputError(
            f"{name} mixes requests: the operator {operator!r} computes a value of several, and answers follow from "
            f"it. {ADVICE}"
        )


def mixing_operator(run: Callable[..., Any], rows: Sequence[Tensor]) -> str | None:
    """Return the name of an operator that mixes requests on the way to an answer; None: none was seen.

    Args:
        run: The model as a function of its inputs ``[requests, ...]``, in host memory and not compiled.
        rows: Inputs of one request, ``[1, ...]`` each.

    Example:
        >>> mixing_operator(lambda x: x / x.max().clamp(min=1000), [torch.zeros(1, 4)])
        'max'
        >>> mixing_operator(lambda x: x / x.amax(1, keepdim=True).clamp(min=1000), [torch.zeros(1, 4)])
    """
    follower = _Follower()
    inputs = [torch.cat([row] * _ROWS) for row in rows]
    for value in inputs:
        numbers = torch.arange(1, _ROWS + 1, dtype=torch.int8)
        follower.mark(value, numbers.view(-1, *[1] * (value.ndim - 1)).expand(value.shape))
    try:
        with torch.no_grad(), follower:
            outputs = tree_leaves(run(*inputs))
    except Exception:  # noqa: BLE001 - of the user's model under numbers that nobody sends: then values alone decide
        return None
    is_mixed = any(bool((follower.owners(one) == _MIXED).any()) for one in outputs if isinstance(one, Tensor))
    return follower.blamed if is_mixed else None


def is_following() -> bool:
    """Return whether requests are followed now: who runs what is no operator of torch calls :func:`as_operator`."""
    return isinstance(_get_current_dispatch_mode(), _Follower)


def as_operator(name: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Run a function of tensors as one operator, which is followed as torch's are.

    Args:
        name: Its name in messages, and in the table of those that move rows.
        function: Returns new tensors, and writes to none.
        tensors: Its arguments.
    """
    function.__name__ = name
    with _pop_mode_temporarily() as mode:
        return mode.__torch_dispatch__(function, (), tensors)


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Owners of each tensor's memory, by parts of 4 bytes at most: views share it and in-place operators change it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blamed: str | None = None
        self._owners: dict[int, tuple[int, Tensor]] = {}  # by address of a storage: bytes of a part, owners of each
        self._random = torch.Generator().manual_seed(0)

    def owners(self, value: Tensor) -> Tensor:
        """Return the owner of each element."""
        found = self._parts(value)
        return torch.zeros(value.shape, dtype=torch.int8) if found is None else found.amax(-1)

    def mark(self, value: Tensor, owners: Tensor) -> None:
        """Set the owner of each element."""
        storage = value.untyped_storage()
        if storage.nbytes():
            if storage.data_ptr() not in self._owners:
                size = min(4, value.element_size())
                parts = torch.zeros(storage.nbytes() // size, dtype=torch.int8)
                self._owners[storage.data_ptr()] = size, parts
            found = self._parts(value)
            assert found is not None
            found.copy_(owners.unsqueeze(-1).expand(found.shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        name = getattr(func, "overloadpacket", func).__name__.rstrip("_")
        if name == "lift_fresh":  # a tensor made of numbers of Python, where another's memory was
            self._owners.pop(given[0].untyped_storage().data_ptr(), None)
        own = [self.owners(one) for one in given]
        written = [one for one in given if any(one is each for each in _written(func, args, kwargs or {}))]
        known = {one.untyped_storage().data_ptr() for one in given}
        found: list[Tensor] | None = None
        if any(bool(each.any()) for each in own) and not name.startswith(_UNFILLED) and not _is_view(func):
            found = self._tried(func, name, args, kwargs or {}, own, written)
        result = func(*args, **kwargs or {})
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        for number, one in enumerate([*made, *written]):
            is_new = one.untyped_storage().data_ptr() not in known
            if is_new:
                self._owners.pop(one.untyped_storage().data_ptr(), None)  # of memory that was let go
            if found and (is_new or number >= len(made)):
                same = found[number].shape == one.shape
                self.mark(one, found[number] if same else found[number].amax().expand(one.shape))
        return result

    def _tried(
        self, func: Any, name: str, args: Any, kwargs: Any, own: Sequence[Tensor], written: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the owners of the elements of all results, and of what is written to."""
        present = [code for code in range(1, _MIXED + 1) if any(bool((each == code).any()) for each in own)]
        is_moving = name.lower() in _MOVING
        conflict, tries = _MOVED if is_moving else _MIXED, 0
        found: list[Tensor] = []
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if is_moving:  # rows are followed to where they are moved
            own = [each * (each != _MOVED) if _is_index(one) else each for one, each in zip(given, own, strict=True)]
        size = sum(one.numel() for one, each in zip(given, own, strict=True) if each.any())
        num_tries = _MANY if _MIXED in present or size < _SMALL else _FEW if size > _LARGE else _SOME

        def run(values: Sequence[Tensor]) -> list[Tensor]:
            is_kept = [any(old is each for each in written) for old in given]
            left = iter([value.clone() if is_in else value for value, is_in in zip(values, is_kept, strict=True)])
            mine = tree_map_only(Tensor, lambda _: next(left), (args, kwargs))
            wanted = [new for new, is_in in zip(_tensors(mine), is_kept, strict=True) if is_in]
            return [*_tensors(func(*mine[0], **mine[1])), *wanted]

        for style in range(num_tries):
            base = [self._drawn(*each, None, style) for each in zip(given, own, strict=True)]
            try:
                before = run(base)
                after = [
                    run([self._drawn(*each, owner, style) for each in zip(base, own, strict=True)]) for owner in present
                ]
            except Exception:  # noqa: BLE001 - it takes no such numbers
                continue
            tries += 1
            found = found or [torch.zeros(one.shape, dtype=torch.int8) for one in before]
            for owner, others in zip(present, after, strict=True):
                for number, (one, other) in enumerate(zip(before, others, strict=True)):
                    changed = _changed(one, other, found[number])
                    both = changed & (found[number] != 0) & (found[number] != owner)
                    worst = torch.clamp(found[number], min=owner)
                    is_met = both & (worst <= _ROWS)  # one request's meets another's
                    if conflict == _MIXED and self.blamed is None and bool(is_met.any()):
                        self.blamed = name
                    found[number] = torch.where(is_met, conflict, torch.where(changed, worst, found[number]))
        if not tries:
            raise _UnreadError(name)
        return found

    def _drawn(self, value: Tensor, own: Tensor, owner: int | None, style: int) -> Tensor:
        """Return ``value`` with other numbers where ``owner`` is; None: where anybody is.

        Args:
            value: Numbers.
            own: Their owners.
            owner: The one whose numbers are drawn.
            style: 0: normal; 1: positive; 2: a thousand times as large; from 3 on the owner's are far above or below 0,
                up to a trillion, and all others normal.
        """
        is_other = own != 0 if owner is None else own == owner
        if not is_other.any():
            return value
        shape, dtype, is_far = value.shape, value.dtype, style >= _SOME and owner is not None
        scale = 1000 if style == 2 else 100 ** ((style - _SOME) // 2) if is_far else 1
        if not _is_index(value):
            some = torch.randn(min(value.numel(), _PERIOD), generator=self._random, dtype=torch.float32)
            new = some.repeat(-(-value.numel() // max(1, len(some))))[: value.numel()].view(shape)
            new = (new.abs() * (-1) ** style if is_far else new.abs() + 0.5 if style == 1 else new).mul(scale).to(dtype)
        elif dtype == torch.bool:
            new = torch.randint(0, 2, shape, generator=self._random).to(dtype)
            if owner is None and style % _SOME:  # then one request alone makes ``any`` or ``all`` another
                new = torch.full_like(new, style % _SOME == 2)
        elif scale > 1:
            ends = max(torch.iinfo(dtype).min, -scale), min(torch.iinfo(dtype).max, scale)
            first, last = (ends[0], 0) if is_far and style % 2 == 0 else (0, ends[1])
            new = torch.randint(first, last + 1, shape, generator=self._random).to(dtype)
        else:
            known = torch.cat([value.reshape(-1), value.new_tensor([0, 1])])
            new = known[torch.randint(0, len(known), shape, generator=self._random)]
        return torch.where(is_other, new, value)

    def _parts(self, value: Tensor) -> Tensor | None:
        """Return the owners of the parts of each element, which lie in the last dimension."""
        found = self._owners.get(value.untyped_storage().data_ptr())
        if found is None:
            return None
        each, rest = divmod(value.element_size(), found[0])
        if rest or not each:
            raise _UnreadError("a view of other bytes")
        strides = [stride * each for stride in value.stride()]
        return found[1].as_strided([*value.shape, each], [*strides, 1], value.storage_offset() * each)


def _changed(one: Tensor, other: Tensor, like: Tensor) -> Tensor:
    """Return the elements that differ; all, where a shape does."""
    if one.shape != other.shape or one.shape != like.shape:
        return torch.ones_like(like, dtype=torch.bool)
    return (one != other) & ~((one != one) & (other != other))


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _is_index(value: Tensor) -> bool:
    return not (value.dtype.is_floating_point or value.dtype.is_complex)


def _is_view(func: Any) -> bool:
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """Return the arguments that an operator writes to."""
    for number, each in enumerate(getattr(getattr(func, "_schema", None), "arguments", ())):
        if each.alias_info is not None and each.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else kwargs.get(each.name))
