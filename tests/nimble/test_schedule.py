"""The schedule: stretches between what torch runs, and the record that is written down."""

from __future__ import annotations

import json

from mlsys_nimble.schedule import stretches_of


def test_operators_go_into_the_first_stretch_that_has_what_they_need() -> None:
    # 0 and 1 native; torch runs 2 on 0's result; 3 needs 2, 4 needs 1 only, 5 (torch) needs 2, 6 needs 5.
    needed = [(), (), (0,), (2,), (1,), (2,), (5,)]
    first, second = stretches_of(needed, frozenset({2, 5}), frozenset())
    assert first.operators == (0, 1, 4)
    assert first.then_torch == (2, 5)
    assert second.operators == (3, 6)
    assert second.then_torch == ()


def test_what_lies_in_place_is_in_no_stretch() -> None:
    [only] = stretches_of([(), (), (0,)], frozenset(), frozenset({1}))
    assert only.operators == (0, 2)


def test_the_record_is_json_and_names_every_operator() -> None:
    import torch
    from mlsys_nimble.native.executor import NativeExecutor
    from mlsys_nimble.operators import Convolution, Slice
    from mlsys_nimble.program import Operator, Program, ValueType

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
