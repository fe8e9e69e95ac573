"""Fusion of a graph net's messages: rows that are taken, scaled and added elsewhere are not written in between."""

from __future__ import annotations

from dataclasses import replace

from mlsys_nimble.ir.operators import Gather, Pointwise, ScatterAdd, Step
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.passes.rewrite import Rewriter


def fuse_messages(program: Program) -> Program:
    """Turn ``x.index_add(0, to, h[of] * scale)`` into one operator, with or without the factors ``[E, 1, ...]``."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if operator.kind != ScatterAdd() or rewriter.type(operator.outputs[0]).dtype != "float32":
            continue
        x, indices, source = operator.inputs
        product, scale = _scaled(rewriter, source)
        rows = rewriter.sole_producer(source if product is None else _other(product, scale))
        if rows is None or not isinstance(rows.kind, Gather) or len(rewriter.type(rows.inputs[1]).shape) != 1:
            continue
        factors = () if scale is None else (scale,)
        kind = ScatterAdd(rows.kind, has_scale=scale is not None)
        rewriter.replace(position, replace(operator, kind=kind, inputs=(x, indices, *rows.inputs, *factors)))
        for done in (product, rows):
            if done is not None:
                rewriter.drop(done)
    return rewriter.build()


def _scaled(rewriter: Rewriter, rows: ValueId) -> tuple[Operator | None, ValueId | None]:
    """Return the product that scales each row by one number, and the numbers; None for both if there is none."""
    product = rewriter.sole_producer(rows)
    if product is None or not isinstance(product.kind, Pointwise) or product.kind.dtype != "float32":
        return None, None
    if product.kind.steps not in ((Step("mul", (0, 1)),), (Step("mul", (1, 0)),)):
        return None, None
    wanted = rewriter.type(rows)
    one_each = (wanted.shape[0], *(1 for _ in wanted.shape[1:]))
    for scale in product.inputs:
        type_ = rewriter.type(scale)
        if type_.shape == one_each and type_.dtype == "float32" and rewriter.type(_other(product, scale)) == wanted:
            return product, scale
    return None, None


def _other(product: Operator, one: ValueId | None) -> ValueId:
    return product.inputs[product.inputs[0] == one]
