"""Integer products in quantised graphs, which PT2E writes in floats: dequantise, product, quantise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mlsys_nimble.ir.checked import MAX_TERMS
from mlsys_nimble.ir.operators import (
    NOTHING,
    VIEWS,
    Aten,
    Codes,
    Concat,
    Convolution,
    Dequantise,
    IntegerProduct,
    Kind,
    Linear,
    Pointwise,
    Pool,
    Quantise,
    Step,
)
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.passes.rewrite import Rewriter

_WHOLE = {"uint8": (0, 255), "int8": (-128, 127)}
_PER_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"


def find_integers(program: Program) -> Program:
    """Compute convolutions and linears of dequantised values from the codes, with sums in int32.

    Weights are constant, int8 and symmetric, by tensor or by output channel. Activations are uint8; int8 ones become
    uint8 where nothing but such graphs reads them.
    """
    rewriter = Rewriter(program)
    if not any(isinstance(operator.kind, Dequantise) for operator in program.operators):
        return program
    _make_unsigned(rewriter, program)
    for position, operator in rewriter:
        if isinstance(operator.kind, Convolution | Linear):
            _form(rewriter, position, operator)
    return rewriter.build()


def fuse_codes(program: Program) -> Program:
    """Let products read and write codes: residuals, results, maxima, views and concatenations between them.

    What is rounded and used as floats again is rounded in floats, and its codes are not stored.
    """
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if isinstance(operator.kind, Quantise):
            _quantise_before(rewriter, position, operator, operator.kind)
        elif isinstance(operator.kind, IntegerProduct) and operator.kind.epilogue.has_residual:
            _read_residual(rewriter, position, operator, operator.kind)
    consumers = rewriter.build().consumers()
    for position, operator in rewriter:
        if isinstance(operator.kind, Dequantise):
            _expand(rewriter, position, operator, operator.kind, consumers)
    return rewriter.build()


def _make_unsigned(rewriter: Rewriter, program: Program) -> None:
    consumers = program.consumers()
    for position, operator in rewriter:
        value = operator.outputs[0]
        readers = [program.operators[index] for index in consumers.get(value, ())]
        is_inner = value not in rewriter.kept and all(isinstance(reader.kind, Dequantise) for reader in readers)
        if not isinstance(operator.kind, Quantise) or rewriter.type(value).dtype != "int8" or not is_inner:
            continue
        if operator.kind.is_dynamic:  # its zero point comes at the call
            continue
        rewriter.values[value] = ValueType(rewriter.type(value).shape, "uint8")
        rewriter.replace(position, replace(operator, kind=Quantise(_shifted(operator.kind.codes))))
        for index in consumers.get(value, ()):
            reader = rewriter.at(index)
            assert reader is not None
            assert isinstance(reader.kind, Dequantise)
            rewriter.replace(index, replace(reader, kind=Dequantise(_shifted(reader.kind.codes))))


def _shifted(codes: Codes) -> Codes:
    return Codes(codes.scale, codes.zero_point + 128, codes.least + 128, codes.most + 128)


def _form(rewriter: Rewriter, position: int, operator: Operator) -> None:
    kind = operator.kind
    assert isinstance(kind, Convolution | Linear)
    source = rewriter.producer(operator.inputs[0])
    if source is None or not isinstance(source.kind, Dequantise) or kind.epilogue != NOTHING:
        return
    weight = _weight(rewriter, operator.inputs[1])
    bias = rewriter.constant(operator.inputs[2]) if kind.has_bias else None
    if weight is None or rewriter.type(source.inputs[0]).dtype != "uint8":
        return
    if not 0 <= source.kind.codes.zero_point <= 255 or (
        kind.has_bias and (bias is None or bias.dtype != torch.float32)
    ):
        return
    product = IntegerProduct(kind, source.kind.codes, source.kind.is_dynamic)
    codes, scales = weight
    inputs = (source.inputs[0], codes, rewriter.add_constant(scales), *operator.inputs[2:], *source.inputs[1:])
    rewriter.replace(position, replace(operator, kind=product, inputs=inputs))


def _weight(rewriter: Rewriter, value: ValueId) -> tuple[ValueId, torch.Tensor] | None:
    """Return the codes of a dequantised weight and the scale of each output channel; None if it is none of ours."""
    source = rewriter.producer(value)
    if source is None:
        return None
    codes = rewriter.constant(source.inputs[0])
    if codes is None or codes.dtype != torch.int8 or codes[0].numel() > MAX_TERMS:
        return None
    scales = _scales(rewriter, source, codes)
    return None if scales is None else (source.inputs[0], scales.detach().float().contiguous())


def _scales(rewriter: Rewriter, source: Operator, codes: torch.Tensor) -> torch.Tensor | None:
    kind: Any = source.kind
    if isinstance(kind, Dequantise) and not kind.is_dynamic and kind.codes.zero_point == 0:
        return torch.full((codes.shape[0],), kind.codes.scale, dtype=torch.float32)
    if not isinstance(kind, Aten) or kind.target != _PER_CHANNEL or kind.arguments[3] != 0:
        return None
    scales, *zero_points = (rewriter.constant(value) for value in source.inputs[1:])
    is_symmetric = all(points is not None and not points.any() for points in zero_points)
    return scales if is_symmetric and scales is not None and scales.shape == codes.shape[:1] else None


def _quantise_before(rewriter: Rewriter, position: int, operator: Operator, kind: Quantise) -> None:
    if kind.is_dynamic:  # its scale comes at the call
        return
    before = rewriter.producer(operator.inputs[0])
    if before is not None and _gives(rewriter, before, kind.codes) and rewriter.kept.isdisjoint(operator.outputs):
        codes = before.inputs[0]
        if rewriter.type(codes) == rewriter.type(operator.outputs[0]):
            rewriter.substitute(operator, codes)
        return
    main = rewriter.sole_producer(operator.inputs[0])
    if main is None or rewriter.type(operator.outputs[0]).dtype != "uint8":
        return
    if isinstance(main.kind, IntegerProduct):
        if main.kind.result is None:
            made: Kind = replace(main.kind, result=kind.codes)
            rewriter.replace(position, replace(operator, name=main.name, kind=made, inputs=main.inputs))
            rewriter.drop(main)
        return
    is_maximum = isinstance(main.kind, Pool) and main.kind.op == "max" and main.kind.epilogue == NOTHING
    sources = [rewriter.producer(value) for value in main.inputs]
    if not is_maximum and not isinstance(main.kind, (*VIEWS, Concat)):
        return
    if all(source is not None and _gives(rewriter, source, kind.codes) for source in sources):
        read = tuple(source.inputs[0] for source in sources if source is not None)
        if all(rewriter.type(value).dtype == "uint8" for value in read):
            rewriter.replace(position, replace(operator, name=main.name, kind=main.kind, inputs=read))
            rewriter.drop(main)


def _gives(rewriter: Rewriter, source: Operator, codes: Codes) -> bool:
    """Return whether quantising the result gives the codes that ``source`` reads."""
    kind = source.kind
    is_same = isinstance(kind, Dequantise) and not kind.is_dynamic and kind.codes == codes
    return is_same and _are_within(rewriter, source.inputs[0], codes)


def _are_within(rewriter: Rewriter, value: ValueId, codes: Codes) -> bool:
    """Return whether no code of a value is beyond the least and the most: rounding again would bring it back."""
    if (codes.least, codes.most) == _WHOLE[rewriter.type(value).dtype]:
        return True
    source = rewriter.producer(value)
    if source is None:
        return False
    if isinstance(source.kind, (*VIEWS, Concat, Pool)):
        return all(_are_within(rewriter, read, codes) for read in source.inputs)
    made = source.kind.codes if isinstance(source.kind, Quantise) else getattr(source.kind, "result", None)
    return made is not None and codes.least <= made.least and made.most <= codes.most


def _read_residual(rewriter: Rewriter, position: int, operator: Operator, kind: IntegerProduct) -> None:
    source = rewriter.producer(operator.inputs[-1])
    if source is None or not isinstance(source.kind, Dequantise) or source.kind.is_dynamic or kind.residual:
        return
    if rewriter.type(source.inputs[0]).dtype == "uint8":
        made = replace(kind, residual=source.kind.codes)
        rewriter.replace(position, replace(operator, kind=made, inputs=(*operator.inputs[:-1], source.inputs[0])))


def _expand(
    rewriter: Rewriter, position: int, operator: Operator, kind: Dequantise, consumers: dict[ValueId, list[int]]
) -> None:
    """Round in floats where codes that are stored would only be made floats again."""
    source = rewriter.producer(operator.inputs[0])
    if source is None or not isinstance(source.kind, Quantise) or source.kind.is_dynamic or kind.is_dynamic:
        return
    value = operator.inputs[0]
    if value in rewriter.kept or len(consumers.get(value, ())) != 1:
        return
    codes = source.kind.codes
    steps = (
        Step("mul", (0, 1.0 / codes.scale)),
        Step("round", (-1,)),
        Step("add", (-2, float(codes.zero_point))),
        Step("clamp", (-3, float(codes.least), float(codes.most))),
        Step("sub", (-4, float(kind.codes.zero_point))),
        Step("mul", (-5, kind.codes.scale)),
    )
    rewriter.replace(position, replace(operator, kind=Pointwise(steps), inputs=source.inputs))
    rewriter.drop(source)
