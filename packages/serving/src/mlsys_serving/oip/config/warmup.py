"""Run a model's warm-up requests, before it is ready."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_serving.oip.binding import WireRequest, WireTensor, bind
from mlsys_serving.oip.config.settings import Warmup
from mlsys_serving.oip.datatypes import Array, DataType
from mlsys_serving.oip.models.version import Version


async def warm_up(version: Version) -> None:
    """Run all warm-up requests of a version.

    Raises:
        InvalidInputError: One does not fit the model.
        Exception: The model's own.
    """
    for warmup in version.settings.warmups:
        if warmup.num_rows > 1 and not version.spec.max_batch_size:
            raise InvalidInputError(
                f"warm-up {warmup.name!r} has batch_size {warmup.num_rows}, and model {version.spec.name!r} takes no "
                "batches: give the whole shape in dims"
            )
        for seed in range(warmup.count):
            request = bind(_wire(warmup, version, seed), version, now=0.0, deadline_s=None)
            if version.unary is not None:
                await version.unary.infer(request)
                continue
            assert version.streaming is not None
            async with aclosing(version.streaming.stream(request)) as responses:
                async for _ in responses:
                    pass


def _wire(warmup: Warmup, version: Version, seed: int) -> WireRequest:
    rng = np.random.default_rng(seed)
    rows = (max(1, warmup.num_rows),) if version.spec.max_batch_size else ()
    tensors = []
    for each in warmup.inputs:

        def read(datatype: DataType, shape: Any, _: str, is_random: bool = each.is_random) -> Array:
            return _values(datatype, tuple(shape), rng if is_random else None)

        tensors.append(WireTensor(each.name, each.datatype, (*rows, *each.dims), read))
    return WireRequest(inputs=tensors)


def _values(datatype: DataType, shape: tuple[int, ...], rng: np.random.Generator | None) -> Array:
    if datatype is DataType.BYTES:
        texts = np.empty(shape, np.object_)
        texts.fill(b"" if rng is None else b"warm up")
        return texts
    if rng is None:
        return np.zeros(shape, datatype.dtype)
    if datatype.is_floating:
        return rng.standard_normal(shape).astype(datatype.dtype)
    return rng.integers(0, 2, shape).astype(datatype.dtype)  # small: they may be indices
