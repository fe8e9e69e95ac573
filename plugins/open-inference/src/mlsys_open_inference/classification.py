"""The classification extension: the largest elements of an output, as ``"value:index:label"``."""

from __future__ import annotations

import math

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_serving.models.datatypes import Array, DataType
from mlsys_serving.models.spec import TensorSpec


def classified(array: Array, spec: TensorSpec, num_classes: int, *, has_batch: bool) -> Array:
    """Return the ``num_classes`` largest elements of each row.

    Args:
        array: [rows, ...] with a batch dimension, else [...]; the rest is taken as one vector of classes.
        spec: of the output; its labels are added where there are as many.
        num_classes: at most; fewer if there are fewer elements.
        has_batch: whether there is a batch dimension.

    Returns:
        BYTES, [rows, classes] or [classes], largest first, the first of equals first.

    Raises:
        InvalidInputError: the output does not consist of numbers.

    Example:
        >>> spec = TensorSpec("y", DataType.FP32, (-1, 3), labels=("cat", "dog", "owl"))
        >>> classified(np.array([[0.5, 2, 1]], np.float32), spec, 2, has_batch=True).tolist()
        [[b'2.000000:1:dog', b'1.000000:2:owl']]
    """
    if spec.datatype in (DataType.BYTES, DataType.BOOL):
        raise InvalidInputError(f"output {spec.name!r} is {spec.datatype.value} and cannot be classified")
    num_rows = array.shape[0] if has_batch else 1
    rows = array.reshape(num_rows, math.prod(array.shape) // max(num_rows, 1))
    if spec.datatype.is_floating:
        order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")  # NaN comes last
    else:  # not all have a negative, or a double of their own: sorted from the last to the first
        order = rows.shape[1] - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    order = order[:, :num_classes]
    classes = np.empty(order.shape, np.object_)
    for row, indices in enumerate(order.tolist()):
        for rank, index in enumerate(indices):
            value = rows[row, index]
            text = f"{value:f}" if spec.datatype.is_floating else str(value)
            label = f":{spec.labels[index]}" if index < len(spec.labels) else ""
            classes[row, rank] = f"{text}:{index}{label}".encode()
    return classes if has_batch else classes[0]
