from __future__ import annotations

import numpy as np
import pytest
from mlsys_open_inference.classification import classified
from mlsys_serving.models.datatypes import DataType
from mlsys_serving.models.spec import TensorSpec


@pytest.mark.parametrize("datatype", [DataType.INT64, DataType.UINT64])
def test_whole_numbers_that_share_a_double_keep_their_order_and_equals_come_in_theirs(datatype: DataType):
    values = np.array([[2**53, 2**53 + 1, 5, 2**53 + 1]], datatype.dtype)
    told = classified(values, TensorSpec("y", datatype, (-1, 4)), 3, has_batch=True)
    assert told.tolist() == [[b"9007199254740993:1", b"9007199254740993:3", b"9007199254740992:0"]]


def test_nan_comes_last_and_no_rows_give_none():
    spec = TensorSpec("y", DataType.FP32, (-1, -1))
    told = classified(np.array([[1, np.nan, np.inf]], np.float32), spec, 9, has_batch=True)
    assert told.tolist() == [[b"inf:2", b"1.000000:0", b"nan:1"]]
    assert not classified(np.zeros((0, 3), np.float32), spec, 2, has_batch=True).size
