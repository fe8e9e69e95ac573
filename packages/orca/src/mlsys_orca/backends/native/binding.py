"""Operators of a plan as the native program takes them: structs that point to packed weights.

Between :mod:`.lowering`, which writes the plan, and :mod:`.decoder`, which runs it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import Any

import torch
from mlsys_core.native import Struct, new
from mlsys_orca.backends.native.kept import Kept, is_without_memory
from mlsys_orca.backends.native.library import address
from mlsys_orca.backends.native.packing import PackedLinear, Rows, pack, pack_bias
from mlsys_orca.backends.native.plan import (
    Attend,
    Combine,
    Convolve,
    DecoderPlan,
    Gate,
    GatherRows,
    Gemm,
    Grouped,
    Normalise,
    Operator,
    Reduce,
    Route,
    Scan,
)
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm
from mlsys_orca.model.weights.quantized import QuantizedMatrix
from torch import Tensor


class Binder:
    """Binds the operators of one plan, and owns what they point to.

    Args:
        native: The library.
        plan: Whose operators are bound, in their order.
        config: The model's shape.
        dtype: Dtype of floating weights.
        activations: Form of rows that meet packed codes.
        copy: The copy that has the weights which linears only say the shapes of.

    Attributes:
        kept: What the operators point to.
        linears: Packed forms of the plan's products; None: one that was not quantised.
    """

    def __init__(
        self,
        native: Any,
        plan: DecoderPlan,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        activations: Rows,
        copy: Kept | None,
    ) -> None:
        self._native, self._config, self._dtype = native, config, dtype
        self._activations, self._copy = activations, copy
        self._widths = plan.widths
        self._number = {name: index for index, name in enumerate(plan.widths)}
        self.kept: list[Tensor | PackedLinear] = []
        self._arrays: list[Any] = []  # of addresses
        self.linears: list[PackedLinear | None] = []

    def bind(self, operator: Operator) -> Struct:
        """Return ``operator`` as the native program takes it; its linears lose their weights."""
        structs: dict[str, type[Struct]] = self._native.structs
        match operator:
            case Gemm():
                packed = self._packed(operator, operator.linear)
                self.kept.append(packed)
                shift = None if operator.is_partial else address(packed.bias)
                return new(structs["Gemm"], **self._product(operator, packed), bias=shift)
            case Grouped():
                return self._grouped(operator)
            case Route():
                choice = operator.choice
                return new(
                    structs["Route"],
                    source=self._number[operator.source],
                    routing=operator.routing,
                    num_experts=self._widths[operator.source],
                    num_chosen=choice.num_chosen,
                    scoring=choice.scoring,
                    sums_to_one=choice.sums_to_one,
                    scale=choice.scale,
                    preference=self._keep(choice.preference),
                    num_groups=choice.num_groups,
                    num_chosen_groups=choice.num_chosen_groups,
                    group_score=choice.group_score,
                )
            case Combine():
                return new(
                    structs["Combine"],
                    source=self._number[operator.source],
                    target=self._number[operator.target],
                    routing=operator.routing,
                    accumulates=operator.accumulates,
                    biases=self._keep(operator.biases),
                    stride=0 if operator.biases is None else operator.biases.shape[1],
                    shared=-1 if operator.shared is None else self._number[operator.shared],
                    gate=-1 if operator.gate is None else self._number[operator.gate],
                )
            case Attend():
                return new(structs["Attention"], **self._attention(operator))
            case Normalise():
                return new(
                    structs["Normalise"],
                    norm=self._norm(operator.norm),
                    source=self._number[operator.source],
                    target=self._number[operator.target],
                    column=operator.column,
                    target_column=operator.column if operator.target_column is None else operator.target_column,
                    accumulates=operator.accumulates,
                )
            case Convolve() | Scan() | Gate():
                from mlsys_orca.backends.native.recurrence import bind_recurrence

                return bind_recurrence(operator, structs, self._number, self._keep)
            case Reduce():
                bias = None if operator.linear is None else pack_bias(operator.linear, is_gated=False)
                if bias is not None:
                    self.kept.append(bias)
                return new(
                    structs["Reduce"],
                    bias=address(bias),
                    target=self._number[operator.target],
                    accumulates=operator.accumulates,
                )
            case GatherRows():
                return new(structs["GatherRows"], taken=self._number[operator.register])

    def _product(self, operator: Gemm | Grouped, packed: PackedLinear) -> dict[str, Any]:
        """Return all fields of the native ``Gemm`` but its bias."""
        linear = operator.linears[0] if isinstance(operator, Grouped) else operator.linear
        return {
            "matrix": packed.matrix(),
            "norm": self._norm(operator.norm),
            "source": self._number[operator.source],
            "target": self._number[operator.target],
            "activation": operator.activation or "identity",
            "is_gated": operator.is_gated,
            "accumulates": operator.accumulates,
            "num_slices": operator.num_slices,
            "is_partial": operator.is_partial,
            "column": operator.column,
            "num_columns": linear.out_features // (2 if operator.is_gated else 1),
            "limit": 0.0 if operator.limits is None else operator.limits.most,
            "slope": 0.0 if operator.limits is None else operator.limits.slope,
        }

    def _grouped(self, operator: Grouped) -> Struct:
        structs: dict[str, type[Struct]] = self._native.structs
        packed = [self._packed(operator, linear) for linear in operator.linears]
        self.kept += packed
        matrices = (structs["Matrix"] * len(packed))(*(new(structs["Matrix"], **each.matrix()) for each in packed))
        self._arrays.append(matrices)
        biases = None
        if operator.rows_of != "entries" and packed[0].bias is not None:  # Combine has those of entries
            biases = (c_void_p * len(packed))(*(address(each.bias) for each in packed))
            self._arrays.append(biases)
        return new(
            structs["Grouped"],
            gemm={**self._product(operator, packed[0]), "bias": None},
            matrices=ctypes.addressof(matrices),
            biases=None if biases is None else ctypes.addressof(biases),
            count=len(packed),
            rows_of=operator.rows_of,
            routing=operator.routing or 0,
            source_column=operator.source_column,
            source_step=operator.source_step,
            target_step=operator.target_step,
        )

    def _packed(self, operator: Gemm | Grouped, linear: Linear) -> PackedLinear:
        """Return the packed weight of a product: from the copy if that has it, else packed now."""
        is_gated, takes_bf16 = operator.is_gated, self._dtype == torch.bfloat16
        is_quantised = isinstance(linear.weight, QuantizedMatrix)
        if self._copy is not None and is_without_memory(linear.weight):
            bias = pack_bias(linear, is_gated=is_gated)
            packed = self._copy.linear(len(self.linears), bias, takes_bf16=takes_bf16)
            linear.take_weight()
        else:
            packed = pack(
                linear,
                is_gated=is_gated,
                takes_bf16=takes_bf16,
                activations=self._activations,
                num_slices=operator.num_slices,
            )
        self.linears.append(packed if is_quantised else None)
        return packed

    def _attention(self, operator: Attend) -> dict[str, Any]:
        attention, config = operator.attention, self._config
        norm = attention.qk_norm if isinstance(attention.qk_norm, RMSNorm | LayerNorm) else None
        shift = norm.bias if isinstance(norm, LayerNorm) else None
        num_before = attention.num_heads + config.num_kv_heads  # heads of queries and keys
        return {
            "source": self._number[operator.source],
            "target": self._number[operator.target],
            "layer": attention.index,
            "num_heads": attention.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": attention.head_dim,
            "rotary_dim": 0 if operator.rotary is None else config.rotary_dim or config.head_dim,
            "rotary": operator.rotary or 0,
            "window": attention.options.window or 0,
            "scale": attention.options.scale or attention.head_dim**-0.5,
            "softcap": attention.options.softcap or 0.0,
            "norm_eps": norm.eps if norm is not None else 0.0,
            "head_norm_kind": "layer_norm" if isinstance(norm, LayerNorm) else "rms_norm",
            "head_norm": self._keep(norm.weight) if norm is not None else None,
            "head_shift": self._keep(shift),
            "sinks": self._keep(attention.options.sinks),
            "value_column": num_before * attention.head_dim if operator.value_column is None else operator.value_column,
            "only_sampled": operator.only_sampled,
        }

    def _norm(self, norm: RMSNorm | LayerNorm | None) -> dict[str, Any] | None:
        if norm is None:
            return None
        if isinstance(norm, RMSNorm):
            fields = {"kind": "rms_norm", "size": norm.weight.numel(), "bias": None}
        else:
            fields = {"kind": "layer_norm", "size": norm.hidden_size, "bias": self._keep(norm.bias)}
        return {**fields, "eps": norm.eps, "weight": self._keep(norm.weight)}

    def _keep(self, values: Tensor | None) -> int | None:
        """Hold on to ``values`` as contiguous fp32, and say where they are."""
        if values is None:
            return None
        values = values.float().contiguous()
        self.kept.append(values)
        return address(values)
