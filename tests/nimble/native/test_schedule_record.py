"""The record of a schedule that the native executor made."""

from __future__ import annotations

import json

import torch
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.ir.operators import Convolution, Slice
from mlsys_nimble.ir.program import Operator, Program, ValueType


def test_the_record_is_json_and_names_every_operator() -> None:
    image, weight = ValueType((1, 4, 6, 6), "float32"), ValueType((4, 4, 1, 1), "float32")
    kind = Convolution((1, 1), ((0, 0), (0, 0)), (1, 1), 1, has_bias=False)
    program = Program(
        (image, weight, image, ValueType((1, 2, 6, 6), "float32")),
        (Operator("conv", kind, (0, 1), (2,)), Operator("half", Slice(1, 2), (2,), (3,))),
        inputs=(0,),
        outputs=(3,),
        constants={1: torch.ones(4, 4, 1, 1)},
    )
    schedule = NativeExecutor(program, num_threads=2).schedule
    record = json.loads(json.dumps(schedule.record()))
    by_name = {operator["name"]: operator for operator in record["operators"]}
    assert by_name["half"]["in_place"]
    assert by_name["conv"]["seconds"] > 0
    [result], [half] = by_name["conv"]["outputs"], by_name["half"]["outputs"]
    assert record["values"][half]["offset"] == record["values"][result]["offset"] + 2 * 4
    assert record["values"][result]["strides"][1] == 4  # channels last
    run = {piece["operator"] for worker in record["stretches"][0]["workers"] for piece in worker}
    assert run == set(by_name) - {"half"}
