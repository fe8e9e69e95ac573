"""Products of bf16 pairs; ``cpu/pairs.py`` binds their kernel."""

from __future__ import annotations

from mlsys_nimble.backends.cpu import pairs
from mlsys_nimble.backends.cpu.library import SPACE, Kernel
from mlsys_nimble.backends.operators.convolution import pixels
from mlsys_nimble.backends.table import FLOAT32, Call, Family, Run, find, weights_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor

FAMILY = Family()


@FAMILY.meaning(kinds.Bf16Product)
def _product(kind: kinds.Bf16Product, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    meaning = find(type(kind.main)).meaning
    assert meaning is not None
    run = meaning(kind.main, inputs, result)

    def multiply(x: Tensor, *rest: Tensor) -> Tensor:
        made: Tensor = run(x.bfloat16().float(), *rest)
        return made

    return multiply


@FAMILY.lowering(kinds.Bf16Product, dtypes=FLOAT32, packs=weights_of)
def _lower_product(call: Call) -> Kernel | None:
    main: kinds.Convolution | kinds.Linear = call.kind.main
    weight, bias = call.weights[1], call.weights[2] if main.has_bias else None
    if weight is None or (main.has_bias and bias is None) or len(call.out.shape) > SPACE + 2:
        return None
    x, out = call.inputs[0], call.out
    residual = call.inputs[-1] if main.epilogue.has_residual else None
    if isinstance(main, kinds.Linear):
        x, out = pixels(x), pixels(out)
        residual = None if residual is None else pixels(residual)
        main, weight = kinds.Convolution((1,), ((0, 0),), (1,), 1, main.has_bias, main.epilogue), weight[:, :, None]
    return pairs.product(main, x, weight, bias, out, residual=residual)
