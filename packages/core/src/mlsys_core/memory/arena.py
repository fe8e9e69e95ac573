"""One allocation with tensors at planned offsets: the thin executor of a :class:`MemoryPlan`.

Importing this module imports no torch; making an arena does.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mlsys_core.errors import DeviceError, InvalidInputError, MemoryPlanError
from mlsys_core.memory.plan import Lifetime, MemoryPlan, format_nbytes, plan_offsets

if TYPE_CHECKING:
    import torch

POISON = 0xFF  # each byte: NaN in every IEEE float and float8 type, -1 in signed integers, the maximum in unsigned ones
BASE_ALIGNMENT = 64  # the base suits every dtype and a cache line, however small the plan's own alignment


class Arena:
    """The memory of one plan on one device.

    Views share the arena's memory and keep it alive; the plan says whether two of them may be used at the same time.
    With ``poison`` on, memory that nobody should read holds NaN (or -1), so a test sees a read of a dead tensor.

    Args:
        plan: the plan, or a size in bytes (0 or more) for one region, index 0, aligned to 64.
        device: where; anything ``torch.device`` takes.
        poison: fill everything at creation and :meth:`close`, and a tensor's region at :meth:`release`. For tests.

    Raises:
        InvalidInputError: the size is negative or no integer.
        DeviceError: the device is not there, or has too little memory.

    Example:
        >>> import torch
        >>> plan = plan_offsets([Lifetime(16, 0, 2), Lifetime(16, 1, 3)])
        >>> with Arena(plan, "cpu", poison=True) as arena:
        ...     hidden = arena.view(0, torch.float32, (2, 2))
        ...     _ = hidden.fill_(1.0)
        ...     arena.release(0)
        ...     bool(hidden.isnan().all())
        True
    """

    def __init__(self, plan: MemoryPlan | int, device: torch.device | str = "cpu", *, poison: bool = False) -> None:
        self._plan = plan if isinstance(plan, MemoryPlan) else plan_offsets([Lifetime(plan, 0, 1)])
        self._poison = poison
        self._buffer: torch.Tensor | None = _allocate(self._plan.peak_nbytes, self._plan.alignment, device)
        if poison:
            self._buffer.fill_(POISON)

    @property
    def plan(self) -> MemoryPlan:
        """The plan of this arena's memory."""
        return self._plan

    @property
    def nbytes(self) -> int:
        """Bytes from the arena's aligned base to its end: the plan's peak."""
        return self._plan.peak_nbytes

    @property
    def buffer(self) -> torch.Tensor:
        """The whole arena, ``uint8[nbytes]``, from its aligned base."""
        if self._buffer is None:
            raise MemoryPlanError("this arena is closed: take views of it before close(), or make a new one")
        return self._buffer

    def view(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return tensor ``index`` of the plan as ``dtype`` and ``shape``; no copy, the same memory on each call.

        Args:
            index: which tensor of the plan.
            dtype: any torch dtype.
            shape: dimensions, each 0 or more.
            strides: in elements, each 0 or more; None is contiguous.

        Raises:
            MemoryPlanError: the arena is closed, or there is no such tensor in the plan, or it is smaller than the
                view, or its offset is no multiple of the element size.
            InvalidInputError: a dimension or stride is negative, or their numbers differ.
        """
        region = self._region(index)
        strides = _contiguous_strides(shape) if strides is None else strides
        needed = _extent(shape, strides) * dtype.itemsize
        if needed > region.numel():
            raise MemoryPlanError(
                f"tensor {index} has {region.numel()} bytes and a view as {dtype} of shape {tuple(shape)} with strides "
                f"{tuple(strides)} needs {needed}: plan it larger, or view it smaller"
            )
        if self._plan.offsets[index] % dtype.itemsize:
            raise MemoryPlanError(
                f"tensor {index} is at offset {self._plan.offsets[index]}, no multiple of the {dtype.itemsize} bytes "
                f"of {dtype}: plan with an alignment of at least {dtype.itemsize}, not {self._plan.alignment}"
            )
        whole = region[: region.numel() // dtype.itemsize * dtype.itemsize]
        return whole.view(dtype).as_strided(tuple(shape), tuple(strides))

    def release(self, index: int) -> None:
        """Mark tensor ``index`` as dead: with ``poison`` its bytes are overwritten, else nothing happens.

        Call it when its lifetime ends, before another tensor of the same bytes is written. It may live again after.

        Raises:
            MemoryPlanError: the arena is closed, or there is no such tensor in the plan.
        """
        region = self._region(index)
        if self._poison:
            region.fill_(POISON)

    def close(self) -> None:
        """Release the memory; idempotent. It is free once the last view is gone too."""
        if self._buffer is not None and self._poison:
            self._buffer.fill_(POISON)
        self._buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _region(self, index: int) -> torch.Tensor:
        buffer = self.buffer
        count = len(self._plan.offsets)
        if not 0 <= index < count:
            raise MemoryPlanError(
                f"there is no tensor {index} in a plan of {count}: indices follow the planner's input"
            )
        offset = self._plan.offsets[index]
        return buffer[offset : offset + self._plan.nbytes[index]]


def _allocate(nbytes: int, alignment: int, device: torch.device | str) -> torch.Tensor:
    """Return ``uint8[nbytes]`` on ``device``, uninitialised; its address is a multiple of ``alignment`` and of 64."""
    import torch

    alignment = max(alignment, BASE_ALIGNMENT)
    try:
        raw = torch.empty(
            nbytes + alignment, dtype=torch.uint8, device=torch.device(device)
        )  # whole elements of any dtype
    except (RuntimeError, AssertionError) as error:  # torch raises either, by the reason why the device is not there
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"cannot make an arena of {format_nbytes(nbytes)} on {str(device)!r}: {reason}. "
            f"Choose another device, or plan less memory"
        ) from error
    shift = -raw.data_ptr() % alignment
    return raw[shift : shift + nbytes]


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a strided tensor, inclusive."""
    if len(shape) != len(strides):
        raise InvalidInputError(
            f"shape {tuple(shape)} and strides {tuple(strides)} differ in length: give one per dimension"
        )
    if any(size < 0 for size in shape) or any(stride < 0 for stride in strides):
        raise InvalidInputError(f"shape {tuple(shape)}, strides {tuple(strides)}: each must be 0 or more")
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
