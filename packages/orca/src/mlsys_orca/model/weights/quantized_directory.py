"""Directories whose matrices other tools have quantised: GPTQ, AWQ, FP8 in blocks, compressed-tensors, MXFP4.

Between :class:`~.safetensors_file.SafetensorsDirectory`, which has codes and scales as tensors of their own, and the
families, which ask for a ``.weight``. A matrix is made as it is read: ``scale * (code - zero)`` in fp32, then cast.
MXFP4's experts keep their codes.
Rows that the tool would quantise as well (FP8's) stay as they are. Layouts: AutoGPTQ's ``qlinear``, AutoAWQ's
``WQLinear_GEMM``, DeepSeek-V3's ``weight_scale_inv``, the formats of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import refuse
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Layout
from mlsys_orca.model.weights.gguf_blocks import fp4_codes, halves_of_exponents
from mlsys_orca.model.weights.quantized import QuantizedMatrix
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory
from torch import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where column i of eight stands in an int32
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_CODES = ("qweight", "weight_packed")
_OF_CODES = ("qzeros", "scales", "g_idx")  # GPTQ's and AWQ's
_OF_VALUES = (
    "weight_scale_inv",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
    "input_zero_point",
)
_BESIDE = (*_OF_CODES, *_OF_VALUES)


def check_quantization(settings: Mapping[str, Any]) -> None:
    """See that matrices quantised as a ``quantization_config`` says can be read.

    Raises:
        UnsupportedModelError: they cannot; the message names the method or the option.
    """
    method, bits = settings.get("quant_method"), settings.get("bits")
    known = ("gptq", "awq", "fp8", "compressed-tensors", "mxfp4")
    refuse(method not in known, f"weights quantised by other tools ({method}; {', '.join(known)}, floats and GGUF are)")
    refuse(method == "gptq" and bits not in (2, 4, 8), f"GPTQ's codes of {bits} bits (2, 4 and 8 are)")
    refuse(method == "awq" and bits != 4, f"AWQ's codes of {bits} bits (4 are)")
    version = str(settings.get("version", "gemm")).lower()
    refuse(method == "awq" and version != "gemm", f"AWQ's layout {version!r} (gemm is)")
    blocks = settings.get("weight_block_size")
    refuse(method == "fp8" and not _is_pair(blocks), f"FP8 with a weight_block_size of {blocks!r}")
    if method != "compressed-tensors":
        return
    for group in (settings.get("config_groups") or {}).values():
        _check_group(group.get("format") or settings.get("format"), group.get("weights") or {})
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    refuse(sparsity != "dense", f"compressed-tensors' sparse matrices ({sparsity})")


def _check_group(form: object, weights: Mapping[str, Any]) -> None:
    """See that a group of matrices of compressed-tensors can be read."""
    refuse(form not in _COMPRESSED, f"compressed-tensors' format {form!r} ({', '.join(_COMPRESSED)} are)")
    bits, is_float = weights.get("num_bits"), weights.get("type") == "float"
    refuse(is_float and bits != 8, f"compressed-tensors' floats of {bits} bits, other than 8 bits")
    refuse(not is_float and bits not in (4, 8), f"compressed-tensors' codes of {bits} bits (4 and 8 are)")
    refuse(
        weights.get("actorder") not in (None, False, "weight"), "compressed-tensors' groups in another order (actorder)"
    )
    refuse(form == "pack-quantized" and not weights.get("symmetric", True), "compressed-tensors' packed zero points")


def _is_pair(blocks: object) -> bool:
    return isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)


def open_weights(path: Path, raw: Mapping[str, Any]) -> Checkpoint:
    """Open the weights of directory ``path``, whose ``config.json`` is ``raw``.

    Raises:
        InvalidInputError: as :class:`SafetensorsDirectory`.
    """
    files, settings = SafetensorsDirectory(path), raw.get("quantization_config")
    return files if settings is None else QuantizedDirectory(files, settings)


class QuantizedDirectory:
    """The tensors of one model as if nothing had been quantised; a :class:`Checkpoint`.

    Args:
        files: The directory.
        settings: Its ``quantization_config``, as :func:`check_quantization` has passed.
    """

    layout: Layout = "huggingface"

    def __init__(self, files: SafetensorsDirectory, settings: Mapping[str, Any]) -> None:
        self._files, self._settings = files, settings
        self._read: dict[str, Callable[[str], Tensor]] = {"gptq": self._gptq, "awq": self._awq}
        names = files.names
        self._stems = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in _CODES}
        self._stems |= {
            name.rpartition(".")[0] for name in names if name.endswith((".weight_scale", ".weight_scale_inv"))
        }
        beside = {f"{stem}.{part}" for stem in self._stems for part in (*_BESIDE, *_CODES)}
        # MXFP4: [experts, rows, groups, 16] bytes and an exponent for each group, of a tensor [experts, rows, columns].
        self._in_fp4 = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
        if settings.get("quant_method") != "mxfp4":
            self._in_fp4 = set()
        beside |= {f"{stem}_{part}" for stem in self._in_fp4 for part in ("blocks", "scales")}
        self._names = frozenset(names - beside | {f"{stem}.weight" for stem in self._stems | self._in_fp4})

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        stem, _, part = name.rpartition(".")
        if part == "weight" and stem in self._in_fp4:
            *outer, groups, half = self._files.shape(f"{stem}_blocks")
            return *outer, groups * half * 2
        if part != "weight" or stem not in self._stems or name in self._files.names:
            return self._files.shape(name)
        if f"{stem}.weight_packed" in self._files.names:
            rows, packed = self._files.shape(f"{stem}.weight_packed")
            return rows, packed * (32 // self._packed_bits(stem))
        rows, columns = self._files.shape(f"{stem}.qweight")
        num_codes = 32 // int(self._settings["bits"])
        return (columns, rows * num_codes) if self._settings["quant_method"] == "gptq" else (columns * num_codes, rows)

    def nbytes(self, name: str) -> int:
        """Return the tensor's size in the file, in bytes, nearly."""
        stem, _, part = name.rpartition(".")
        if part == "weight" and stem in self._in_fp4:
            return self._files.nbytes(f"{stem}_blocks")
        codes = next((each for each in _CODES if f"{stem}.{each}" in self._files.names), "weight")
        return self._files.nbytes(f"{stem}.{codes}" if part == "weight" else name)

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Write the tensor, or part of it, dequantised and cast, into ``out``.

        Raises:
            InvalidInputError: codes and scales do not fit each other.
        """
        stem, _, part = name.rpartition(".")
        if part == "weight" and stem in self._in_fp4 and cut is None:
            out.copy_(self._fp4(stem).dequantized().view(out.shape))
            return
        if part != "weight" or stem not in self._stems:
            self._files.read_into(name, out, cut)
            return
        try:
            matrix = self._read.get(self._settings["quant_method"], self._scaled)(stem)
        except (RuntimeError, IndexError, ValueError) as error:
            raise InvalidInputError(
                f"the codes and scales of {name[:100]!r} do not belong together: {error}"
            ) from error
        start = 0
        for each in cut.ranges if cut is not None else (range(matrix.shape[0]),):
            axis = 0 if cut is None else cut.axis
            out.narrow(axis, start, len(each)).copy_(matrix.narrow(axis, each.start, len(each)))
            start += len(each)

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the codes and scales of a tensor in MXFP4, rows one below the other; None: others are dequantised."""
        stem, _, part = name.rpartition(".")
        return self._fp4(stem) if part == "weight" and stem in self._in_fp4 and cut is None else None

    def _fp4(self, stem: str) -> QuantizedMatrix:
        blocks, exponents = (self._files.tensor(f"{stem}_{part}") for part in ("blocks", "scales"))
        if blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8 or blocks.shape[:-1] != exponents.shape:
            raise InvalidInputError(
                f"the blocks {tuple(blocks.shape)} and scales {tuple(exponents.shape)} of {stem[:100]!r} do not belong "
                "together"
            )
        groups = exponents.shape[-1]
        nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1)
        codes, scales = fp4_codes(nibbles).view(-1, groups * 32), halves_of_exponents(exponents).view(-1, groups)
        return QuantizedMatrix(codes=codes, scales=scales, offsets=None).compact()

    def _gptq(self, stem: str) -> Tensor:
        bits, old = int(self._settings["bits"]), self._settings.get("checkpoint_format", "gptq") == "gptq"
        codes = _unpacked(self._tensor(stem, "qweight").T, bits).T  # [in, out]
        zeros = _unpacked(self._tensor(stem, "qzeros"), bits) + int(old)  # [groups, out]
        scales, size = self._tensor(stem, "scales").float(), self._settings.get("group_size", -1)
        groups = torch.arange(len(codes)) // (size if size > 0 else len(codes))
        if f"{stem}.g_idx" in self._files.names:
            groups = self._tensor(stem, "g_idx").long()
        return (scales[groups] * (codes - zeros[groups])).T

    def _awq(self, stem: str) -> Tensor:
        def in_order(codes: Tensor) -> Tensor:
            return codes.view(len(codes), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)

        codes, zeros = (in_order(_unpacked(self._tensor(stem, part), 4)) for part in ("qweight", "qzeros"))
        size = len(codes) // len(zeros)  # features of a group
        scales = self._tensor(stem, "scales").float()
        return (scales.repeat_interleave(size, 0) * (codes - zeros.repeat_interleave(size, 0))).T

    def _scaled(self, stem: str) -> Tensor:
        """Return codes of FP8 or int8, or packed ones, times the scales of their rows, groups or blocks."""
        if f"{stem}.weight_packed" in self._files.names:
            bits = self._packed_bits(stem)
            matrix = _unpacked(self._tensor(stem, "weight_packed"), bits) - (1 << (bits - 1))
        else:
            matrix = self._tensor(stem, "weight").float()
        is_inverse = f"{stem}.weight_scale_inv" in self._files.names
        scales = self._tensor(stem, "weight_scale_inv" if is_inverse else "weight_scale").float()
        if f"{stem}.weight_zero_point" in self._files.names:
            matrix = matrix - _spread(self._tensor(stem, "weight_zero_point").float(), matrix, None)
        return matrix * _spread(scales, matrix, self._settings.get("weight_block_size"))

    def _packed_bits(self, stem: str) -> int:
        packed = self._files.shape(f"{stem}.weight_packed")[1]
        shape = self._tensor(stem, "weight_shape").tolist()
        return max(1, 32 * packed // max(1, int(shape[1])))

    def _tensor(self, stem: str, part: str) -> Tensor:
        return self._files.tensor(f"{stem}.{part}")


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of int32 [rows, n] as int32 [rows, n * 32 / bits], the lowest bits of each first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed.to(torch.int32)[..., None] >> shifts & (1 << bits) - 1).flatten(1)


def _spread(scales: Tensor, matrix: Tensor, blocks: list[int] | None) -> Tensor:
    """Return ``scales`` of a whole matrix, of rows, of groups of a row or of blocks in a form that multiplies it."""
    if scales.ndim < 2:
        return scales.view(-1, 1) if scales.numel() > 1 else scales.view(1, 1)
    if blocks is None:
        return scales.repeat_interleave(matrix.shape[1] // scales.shape[1], 1)
    rows, columns = matrix.shape
    return scales.repeat_interleave(blocks[0], 0)[:rows].repeat_interleave(blocks[1], 1)[:, :columns]
