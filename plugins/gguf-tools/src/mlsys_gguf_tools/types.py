"""Which GGUF type each tensor of a file gets: the mixes of types that llama.cpp's file types stand for.

Pure: names and shapes in, types out. :mod:`.writing` plans a file with it before anything is read. Tensors whose loss
costs most get more bits: the vocabulary projection always, in the ``_M`` mixes half of the value and down projections
(those of the first and last eighth of the layers and a third of those between), as in llama.cpp's ``llama-quant.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from mlsys_core.errors import InvalidInputError

_T = GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class FileType:
    """One name of ``--type``."""

    id: LlamaFileType  # general.file_type
    base: GGMLQuantizationType  # of most matrices


FILE_TYPES: dict[str, FileType] = {
    "F32": FileType(LlamaFileType.ALL_F32, _T.F32),
    "F16": FileType(LlamaFileType.MOSTLY_F16, _T.F16),
    "BF16": FileType(LlamaFileType.MOSTLY_BF16, _T.BF16),
    "Q8_0": FileType(LlamaFileType.MOSTLY_Q8_0, _T.Q8_0),
    "Q6_K": FileType(LlamaFileType.MOSTLY_Q6_K, _T.Q6_K),
    "Q5_K_M": FileType(LlamaFileType.MOSTLY_Q5_K_M, _T.Q5_K),
    "Q5_K_S": FileType(LlamaFileType.MOSTLY_Q5_K_S, _T.Q5_K),
    "Q5_1": FileType(LlamaFileType.MOSTLY_Q5_1, _T.Q5_1),
    "Q5_0": FileType(LlamaFileType.MOSTLY_Q5_0, _T.Q5_0),
    "Q4_K_M": FileType(LlamaFileType.MOSTLY_Q4_K_M, _T.Q4_K),
    "Q4_K_S": FileType(LlamaFileType.MOSTLY_Q4_K_S, _T.Q4_K),
    "Q4_1": FileType(LlamaFileType.MOSTLY_Q4_1, _T.Q4_1),
    "Q4_0": FileType(LlamaFileType.MOSTLY_Q4_0, _T.Q4_0),
}
_FLOATS = (_T.F32, _T.F16, _T.BF16)
_K_QUANTS = {_T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1, _T.Q6_K: _T.Q8_0}  # and what stands in where 256 divides no row
_KEPT = ("ffn_gate_inp", "position_embd", "token_types", "attn_rel_b")  # small, or compared


def file_type(name: str) -> FileType:
    """Return the file type called ``name``, in whatever case.

    Raises:
        InvalidInputError: there is none.

    Example:
        >>> file_type("q4_k_m").base.name
        'Q4_K'
    """
    if name.upper() not in FILE_TYPES:
        raise InvalidInputError(f"the type {name!r} is not written; {', '.join(FILE_TYPES)} are")
    return FILE_TYPES[name.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The types of one file's tensors."""

    file_type: FileType
    num_layers: int
    num_experts: int  # 0: none
    has_head: bool  # False: the embedding table is the vocabulary projection

    def of(self, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        """Return the type of the tensor ``name`` of that shape, outermost dimension first.

        Example:
            >>> mix = Mix(
            ...     file_type=file_type("Q4_K_M"), num_layers=8, num_experts=0, has_head=True
            ... )
            >>> [mix.of(f"blk.{n}.ffn_down.weight", (512, 1024)).name for n in range(4)]
            ['Q6_K', 'Q4_K', 'Q4_K', 'Q6_K']
        """
        stem = name.removesuffix(".weight")
        is_matrix = len(shape) > 1 and stem != name and not stem.endswith("_norm")
        if not is_matrix or stem.rpartition(".")[2] in _KEPT:
            return _T.F32
        base = self.file_type.base
        kind = base if base in _FLOATS else self._wished(stem)
        if kind in _K_QUANTS and shape[-1] % 256:
            kind = _K_QUANTS[kind]
        return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else _T.F16

    def _wished(self, stem: str) -> GGMLQuantizationType:
        base, id_ = self.file_type.base, self.file_type.id
        if stem == "output" or (stem == "token_embd" and not self.has_head):
            return _T.Q8_0 if base == _T.Q8_0 else _T.Q6_K
        role, number = stem.rpartition(".")[2], _layer(stem)
        if number is None or base not in (_T.Q4_K, _T.Q5_K):
            return base
        is_medium = id_ in (LlamaFileType.MOSTLY_Q4_K_M, LlamaFileType.MOSTLY_Q5_K_M)
        gets_more = _gets_more_bits(number, self.num_layers)
        if self.num_experts == 8 and role in ("attn_v", "attn_k"):
            return _T.Q8_0  # little beside the experts
        if self.num_experts == 8 and role == "attn_output" and is_medium:
            return _T.Q5_K
        if role == "attn_v":
            if is_medium and gets_more:
                return _T.Q6_K
            return _T.Q5_K if id_ == LlamaFileType.MOSTLY_Q4_K_S and number < 4 else base
        if role == "attn_qkv" and is_medium:
            return _T.Q5_K if base == _T.Q4_K else _T.Q6_K
        if role in ("ffn_down", "ffn_down_exps"):
            if is_medium and gets_more:
                return _T.Q6_K
            is_first = number < self.num_layers // 8
            return _T.Q5_K if id_ == LlamaFileType.MOSTLY_Q4_K_S and is_first else base
        return base


def _layer(stem: str) -> int | None:
    """Return the number of the layer in ``stem``; None: it is in none."""
    parts = stem.split(".")
    return next((int(part) for part in parts if part.isdigit()), None)


def _gets_more_bits(number: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return number < eighth or number >= 7 * num_layers // 8 or (number - eighth) % 3 == 2
