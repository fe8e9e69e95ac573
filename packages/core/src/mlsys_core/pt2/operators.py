"""Operators that a ``.pt2`` file may name: those that compute tensors from tensors, and nothing else.

torch resolves a target by walking attributes from ``torch``, which reaches ``torch.os.system``. Its dispatcher has
operators, too, that write files (``aten::save``), map them (``aten::from_file``), follow pointers kept in tensors
(``aten::fbgemm_*``) or take strides on trust (``aten::_reshape_alias``).
"""

from __future__ import annotations

import importlib
import re
from functools import cache

from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.expressions import words

PYTHON = words(
    """
    add and_ eq floordiv ge getitem gt le lt mod mul ne neg or_ pos pow rshift sub truediv
""",
    prefix="_operator.",
)
SYMBOLIC = words("""
    math.ceil math.floor math.sqrt math.trunc torch._sym_sqrt torch.sym_float torch.sym_int
    torch.sym_ite torch.sym_max torch.sym_min torch.sym_not torch.sym_sum
""")
HIGHER_ORDER = words(
    """
    associative_scan cond map_impl scan while_loop wrap_with_autocast wrap_with_set_grad_enabled
""",
    prefix="torch.ops.higher_order.",
)
_TENSOR_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)\.([A-Za-z]\w*|_[A-Za-z]\w*|__\w+__)\.([A-Za-z]\w*)"
)
_REFUSED = re.compile(
    r"from_file|save|set_?|set_data|record_stream|_?resize_output_?|\w*backward\w*|\w*sparse\w*|\w*mkldnn\w*|"
    r"fbgemm_\w*|quantized_\w*|nested_\w*|cudnn_\w*|miopen_\w*|mps_\w*|warn|print"
)
# Names with a leading underscore are torch's own affair; these are in programs that users export.
_INTERNAL = words("""
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
    _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _addmm_activation _aminmax _assert_async
    _assert_scalar _assert_tensor_metadata _batch_norm_impl_index _batch_norm_no_update
    _batch_norm_with_update _batch_norm_with_update_functional _cast_Byte _cast_Char _cast_Double
    _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _cdist_forward _chunk_cat _conj
    _conj_physical _convolution _convolution_mode _ctc_loss _embedding_bag
    _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _functional_assert_async
    _functional_assert_scalar _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _fused_rms_norm _grouped_mm _int_mm _is_all_true
    _is_any_true _linalg_check_errors _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
    _linalg_svd _local_scalar_dense _log_softmax _logcumsumexp _masked_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _native_multi_head_attention _neg_view
    _pack_padded_sequence _pad_circular _pad_enum _pad_packed_sequence _pdist_forward _prelu_kernel
    _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_mm
    _shape_as_tensor _softmax _stack _thnn_fused_gru_cell _thnn_fused_lstm_cell _to_copy
    _transform_bias_rescale_qkv _transformer_encoder_layer_fwd _trilinear _unique _unique2
    _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_view _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _weight_int8pack_mm _weight_norm _weight_norm_interface
""")


def operator(target: str) -> str:
    """Return ``target`` if a file may name it.

    Raises:
        InvalidInputError: it is none of those listed here, or this torch lacks it.
    """
    if target in PYTHON or target in SYMBOLIC or target in HIGHER_ORDER:
        return target
    match = _TENSOR_OPERATOR.fullmatch(target)
    if match is not None:
        namespace, name, overload = match.groups()
        is_listed = name.rstrip("_") in _INTERNAL or name in _INTERNAL if name.startswith("_") else True
        if is_listed and not _REFUSED.fullmatch(name):
            if namespace == "torchvision":
                _register_torchvision(target)
            if f"{namespace}::{name}{'' if overload == 'default' else f'.{overload}'}" in _dispatched(namespace):
                return target
    raise InvalidInputError(f"{target[:120]!r} is no operator that computes tensors and that this torch knows")


@cache
def _dispatched(namespace: str) -> frozenset[str]:
    """Return the operators of torch's dispatcher, without those of TorchScript alone (strings, files)."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name for name in names if name.startswith(f"{namespace}::"))


def _register_torchvision(target: str) -> None:
    try:
        importlib.import_module("torchvision")
    except ImportError as error:
        raise InvalidInputError(f"{target!r} needs torchvision: pip install torchvision") from error
    _dispatched.cache_clear()
