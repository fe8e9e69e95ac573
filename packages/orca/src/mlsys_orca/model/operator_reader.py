"""Read a model's operators from a checkpoint by what they are for, whatever the layout calls their tensors.

Between a checkpoint and the families, which say "the query, key and value projections of layer 3, as one product".
Each tensor read must be there and have the shape that the configuration implies, and when the model is complete no
tensor may be left over, since a bias or a scale that nobody reads would change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm, StackedLinear
from mlsys_orca.model.weights.checkpoint import Checkpoint, Layout, Progress, WeightForm
from mlsys_orca.model.weights.quantized import GROUP_SIZES, Matrix, QuantizedMatrix, concatenate_rows
from torch import Tensor


class WeightReader:
    """Reader of ``checkpoint`` that counts the tensors it has read.

    Args:
        checkpoint: The open file or directory.
        progress: Called after each tensor with the bytes read so far and those in all.
    """

    def __init__(self, checkpoint: Checkpoint, *, progress: Progress | None = None) -> None:
        self.checkpoint = checkpoint
        self._progress = progress
        self._unread = set(checkpoint.names)
        self._nbytes = sum(map(checkpoint.nbytes, checkpoint.names))
        self._nbytes_read = 0

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill ``out`` with tensor ``name``.

        Raises:
            InvalidInputError: there is no such tensor, or its shape is not ``out``'s.
        """
        self.expect(name, tuple(out.shape))
        self.checkpoint.read_into(name, out)
        self._count(name)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        """Return tensor ``name`` as the file's codes and scales; None: it has none to keep, and is not read yet.

        Raises:
            InvalidInputError: there is no such tensor, or its shape is not ``shape``.
        """
        self.expect(name, shape)
        found = self.checkpoint.quantized(name)
        if found is not None:
            self._count(name)
        return found

    def expect(self, name: str, expected: tuple[int, ...]) -> None:
        """See that there is a tensor ``name`` of that shape, before memory is taken for it.

        Raises:
            InvalidInputError: there is none.
        """
        if name not in self._unread:
            raise InvalidInputError(f"the model file has no tensor {name!r}; is it complete, and of this architecture?")
        shape = self.checkpoint.shape(name)
        if shape != expected and not (self.checkpoint.layout == "gguf" and _trimmed(shape) == _trimmed(expected)):
            raise InvalidInputError(
                f"tensor {name!r} has shape {shape} where the configuration implies {expected}: "
                "the file's weights and its configuration do not belong together"
            )

    def _count(self, name: str) -> None:
        self._unread.remove(name)
        self._nbytes_read += self.checkpoint.nbytes(name)
        if self._progress:
            self._progress(self._nbytes_read, self._nbytes)

    def finish(self, is_ignorable: Callable[[str], bool]) -> None:
        """Say that the model is complete.

        Raises:
            InvalidInputError: the file has tensors that were not read and are not ``is_ignorable``.
        """
        if unread := sorted(name for name in self._unread if not is_ignorable(name)):
            shown = ", ".join(unread[:4]) + (f" and {len(unread) - 4} more" if len(unread) > 4 else "")
            raise InvalidInputError(f"the model file has tensors this architecture does not use: {shown}")
        if self._progress:
            self._progress(self._nbytes, self._nbytes)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``shape`` without outermost dimensions of 1, which some writers of GGUF leave out."""
    first = next((axis for axis, size in enumerate(shape) if size > 1), len(shape))
    return shape[first:]


Arrange = Callable[[Tensor], Tensor]  # rows of a weight or bias, in the file's order -> in the model's

_KEPT_FLOATING = {"router"}  # small, and what it gives is compared: an error changes which expert is chosen
# What int4 leaves at 8 bits, by the last part of a role. No layer makes good what the tables lose, and an error of
# scores moves what is attended to: in SmolLM2-135M those projections, 16 % of a layer, make 40 % of int4's divergence.
_STAND_APART = {"q", "k", "v"}  # roles of one product whose matrices keep their own types, where a file mixes these
_AT_LEAST_8_BITS = {"embedding", "head", "q", "k", "v", "qkv"}


class OperatorReader:
    """Reader of one model's operators.

    Args:
        reader: The open checkpoint.
        stems: Role -> tensor name without its ``.weight`` or ``.bias``; ``{}`` stands for the layer's number.
        dtype: Dtype of the weights that go into products.
        device: Where to put them.
        eps: Epsilon of every norm.
        weights: Storage form of matrices that go into products. Norms, biases and learned positions stay floating.
    """

    def __init__(
        self,
        reader: WeightReader,
        stems: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        eps: float,
        weights: WeightForm = "float",
    ) -> None:
        self.layout: Layout = reader.checkpoint.layout
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self._reader = reader
        self._stems = stems
        self._eps = eps
        # Some directories hold the bare decoder, whose names lack the first part ("model.", "transformer.").
        first = stems["embedding"].partition(".")[0] + "."
        named = any(name.startswith(first) for name in reader.checkpoint.names)
        self._absent_prefix = "" if named or self.layout == "gguf" else first

    def has(self, role: str, *, at: tuple[int, ...] = (), part: str = "weight") -> bool:
        """Return whether the file has a weight of that role; ``part``: the end of its name, empty where it has none."""
        return role in self._stems and self._name(role, at, part).removesuffix(".") in self._reader.checkpoint.names

    def tensor(
        self, role: str, shape: tuple[int, ...], *, at: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read the weight of that role.

        Args:
            role: A key of the stems.
            shape: The shape that the configuration implies.
            at: The layer's number, and the expert's.
            dtype: None: that of products.
        """
        return self._read(self._name(role, at, "weight"), shape, dtype)

    def unsuffixed(
        self, role: str, shape: tuple[int, ...], *, at: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read the tensor whose name is that role's stem, without ``.weight``; see :meth:`tensor`."""
        return self._read(self._name(role, at, "").removesuffix("."), shape, dtype)

    def matrix(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        at: tuple[int, ...] = (),
        arrange: Mapping[str, Arrange] | None = None,
    ) -> Matrix:
        """Read the weights of several roles, one below the other: [sum of rows, columns].

        Args:
            rows: Role -> how many rows it has.
            columns: Features that go in.
            at: The layer's number, and the expert's.
            arrange: Role -> how to bring its rows into this model's order.
        """
        if self.weights == "packed":
            pieces = (self._piece(role, count, columns, at, arrange or {}) for role, count in rows.items())
            return concatenate_rows(list(pieces))
        for role, count in rows.items():
            self._reader.expect(self._name(role, at, "weight"), (count, columns))
        fused = torch.empty((sum(rows.values()), columns), dtype=self._dtype_of(rows), device=self.device)
        self._fill(fused, rows, at, "weight", arrange or {})
        return self._quantized(fused, rows)

    def stack(self, role: str, number: int, rows: int, columns: int, *, at: tuple[int, ...] = ()) -> list[Matrix]:
        """Read ``number`` matrices [rows, columns] that the file has as one tensor."""
        if self.weights == "packed" and (found := self._packed(role, (number, rows, columns), at)) is not None:
            return [found.rows(slice(start, start + rows)) for start in range(0, number * rows, rows)]
        whole = self.tensor(role, (number, rows, columns), at=at, dtype=self._dtype_of([role]))
        return self.as_kept(role, whole)

    def as_kept(self, role: str, matrices: Iterable[Tensor]) -> list[Matrix]:
        """Return matrices of that role in the form in which this reader keeps them."""
        return [self._quantized(matrix.to(self._dtype_of([role])).clone(), [role]) for matrix in matrices]

    def linear(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        at: tuple[int, ...] = (),
        bias: bool = False,
        arrange: Mapping[str, Arrange] | None = None,
        transposed: bool = False,
    ) -> Linear:
        """Read one product for several projections, as :meth:`matrix`.

        Args:
            rows: Role -> how many rows it has.
            columns: Features that go in.
            at: The layer's number, and the expert's.
            bias: True if each role has one.
            arrange: Role -> how to bring its rows, weight and bias, into this model's order.
            transposed: True if the file has the weights as [in_features, out_features].
        """
        if transposed:
            dtype = self._dtype_of(rows)
            read = [self.tensor(role, (columns, count), at=at, dtype=dtype).T for role, count in rows.items()]
            matrices: list[Matrix] = [self._quantized(torch.cat(read).contiguous(), rows)]
        elif self.weights == "packed" and {role.rpartition(".")[2] for role in rows} <= _STAND_APART:
            pieces = [self._piece(role, count, columns, at, arrange or {}) for role, count in rows.items()]
            matrices = [concatenate_rows(run) for run in _runs_of_like(pieces)]
        else:
            matrices = [self.matrix(rows, columns, at=at, arrange=arrange)]
        if not bias:
            return _linear_of(matrices, [None] * len(matrices))
        shift = torch.empty(sum(rows.values()), dtype=self.dtype, device=self.device)
        self._fill(shift, rows, at, "bias", arrange or {})
        return _linear_of(matrices, torch.split(shift, [matrix.shape[0] for matrix in matrices]))

    def rms_norm(self, role: str, size: int, *, at: tuple[int, ...] = (), one_plus: bool = False) -> RMSNorm:
        """Read the norm of that role; ``one_plus`` where the file has its weight less one."""
        weight = self.tensor(role, (size,), at=at, dtype=torch.float32)
        return RMSNorm(weight + 1 if one_plus else weight, eps=self._eps, dtype=self.dtype)

    def layer_norm(self, role: str, size: int, *, at: tuple[int, ...] = (), bias: bool = True) -> LayerNorm:
        """Read the norm of that role, over ``size`` features; ``bias``: one goes with the weight."""
        weight = self.tensor(role, (size,), at=at, dtype=torch.float32)
        shift = self.bias(role, size, at=at) if bias else None
        return LayerNorm(weight, shift, eps=self._eps, dtype=self.dtype)

    def bias(self, role: str, size: int, *, at: tuple[int, ...] = ()) -> Tensor:
        """Read the bias [size] of that role, in fp32."""
        out = torch.empty(size, dtype=torch.float32, device=self.device)
        self._reader.read_into(self._name(role, at, "bias"), out)
        return out

    def bias_of(
        self, role: str, shape: tuple[int, ...], *, at: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read the biases of that role, of any shape: those of several products are one tensor."""
        return self._read(self._name(role, at, "bias"), shape, dtype)

    def head(self, table: Matrix, *, tied: bool) -> Linear:
        """Read the vocabulary projection, of the embedding table's shape.

        A tied floating one is prepacked anew: no row can be looked up in a prepacked table, and no product is fast in a
        plain one. A quantised table serves both.
        """
        if not tied:
            return self.linear({"head": table.shape[0]}, table.shape[1])
        return Linear(table)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        self._reader.expect(name, shape)  # before memory is taken for what a damaged configuration says
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._reader.read_into(name, out)
        return out

    def _name(self, role: str, at: tuple[int, ...], part: str) -> str:
        return f"{self._stems[role].format(*at)}.{part}".removeprefix(self._absent_prefix)

    def _bits(self, roles: Collection[str]) -> Literal[4, 8] | None:
        """Return the bits of the codes that matrices of ``roles`` are quantised to; None: they are not quantised."""
        parts = {role.rpartition(".")[2] for role in roles}
        if self.weights in ("float", "packed") or parts & _KEPT_FLOATING:
            return None
        return 8 if self.weights == "int8" or parts & _AT_LEAST_8_BITS else 4

    def _dtype_of(self, roles: Collection[str]) -> torch.dtype:
        """Return the dtype to read matrices of ``roles`` in: fp32 if they are quantised later, to lose nothing."""
        return self.dtype if self._bits(roles) is None else torch.float32

    def _quantized(self, matrix: Tensor, roles: Collection[str]) -> Matrix:
        """Quantise ``matrix`` as this reader keeps ``roles``; one whose rows no group divides stays floating."""
        bits = self._bits(roles)
        if bits is None:
            return matrix
        group_size = max((size for size in GROUP_SIZES if matrix.shape[1] % size == 0), default=None)
        if group_size is None:
            return matrix.to(self.dtype)
        from mlsys_orca.model.weights.quantize import quantize

        return quantize(matrix, bits=bits, group_size=group_size)

    def _packed(self, role: str, shape: tuple[int, ...], at: tuple[int, ...]) -> QuantizedMatrix | None:
        """Return the tensor of that role as the file has it, if that is quantised; its rows one below the other."""
        found = self._reader.quantized(self._name(role, at, "weight"), shape)
        if found is None or found.device.type == "meta":  # without memory: a packed copy has the values
            return found
        return found.map(lambda part: part.to(self.device))

    def _piece(
        self, role: str, count: int, columns: int, at: tuple[int, ...], arrange: Mapping[str, Arrange]
    ) -> Matrix:
        change: Arrange = arrange.get(role, _as_they_are)
        packed = self._packed(role, (count, columns), at)
        if packed is not None:
            # Without memory there is no order, and what torch does to such a tensor needs seconds of imports.
            return packed if packed.device.type == "meta" else packed.map(change)
        return change(self.tensor(role, (count, columns), at=at))

    def _fill(
        self, fused: Tensor, rows: Mapping[str, int], at: tuple[int, ...], part: str, arrange: Mapping[str, Arrange]
    ) -> None:
        for role, piece in zip(rows, torch.split(fused, list(rows.values())), strict=True):
            self._reader.read_into(self._name(role, at, part), piece)
            if role in arrange:
                piece.copy_(arrange[role](piece))


def _runs_of_like(pieces: Sequence[Matrix]) -> list[list[Matrix]]:
    """Return neighbouring pieces together that are one matrix without a change to either."""
    runs = [[pieces[0]]]
    for before, piece in pairwise(pieces):
        if isinstance(before, QuantizedMatrix) and isinstance(piece, QuantizedMatrix):
            is_like = before.is_like(piece)
        else:
            is_like = isinstance(before, Tensor) and isinstance(piece, Tensor)
        runs[-1].append(piece) if is_like else runs.append([piece])
    return runs


def _linear_of(matrices: Sequence[Matrix], biases: Sequence[Tensor | None]) -> Linear:
    parts = [Linear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
    return parts[0] if len(parts) == 1 else StackedLinear(parts)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows
