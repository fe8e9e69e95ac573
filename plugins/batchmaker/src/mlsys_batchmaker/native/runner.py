"""A cell's packed weights, and the runner that computes several steps of it on rows of the state pool.

No gather and no scatter: the loops read and write the pool's rows where they lie. An input word's part of the gates
depends on the word alone, so for small vocabularies it is a table; larger ones multiply the embedding's rows in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from mlsys_core.memory.pages import advise_huge_pages
from mlsys_core.native import Kernel, Struct, bind, new
from numpy.typing import NDArray
from torch import Tensor

from mlsys_batchmaker.plan.planner import address_of

Kind = Literal["lstm", "gru", "tree-leaf", "tree-inner"]
GATES: dict[Kind, int] = {"lstm": 4, "gru": 3, "tree-leaf": 3, "tree-inner": 5}  # in the order of gates.h


@dataclass(frozen=True, slots=True, eq=False)
class LayerForm:
    """Weights of one layer as rows times [K, gates * h], float32; gates in the order of ``gates.h``."""

    hidden_size: int
    bias: Tensor  # [gates * h]; a GRU's is without the candidate's hidden part
    from_input: Tensor | None = None
    from_hidden: Tensor | None = None  # in a tree's inner node, weights of the left child
    from_other: Tensor | None = None  # weights of the right child
    hidden_bias: Tensor | None = None  # GRU: [gates * h], of which the candidate's part is used


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A whole cell. Ports are in the order of ``steps.cpp``: word or vector, then each layer's states."""

    kind: Kind
    layers: Sequence[LayerForm]
    embedding: Tensor | None = None  # [words, K]; None: inputs are vectors, or there are none
    projection: tuple[Tensor, Tensor] | None = None  # weight [words, h] and bias: the best word feeds the next step


@runtime_checkable
class HasForm(Protocol):
    """A cell that compiled loops can run."""

    def form(self) -> Form:
        """Return the cell's kind and weights."""
        ...


_HERE = Path(__file__).parent
STEPS = Kernel(_HERE / "steps.cpp", headers=tuple(sorted(_HERE.glob("*.h"))))


@cache
def load(flags: tuple[str, ...] = ()) -> Any:
    """Load the library; the first call ever compiles it for this machine.

    Args:
        flags: for the compiler, beside the usual ones: a test may ask for another machine's width.

    Raises:
        KernelUnavailableError: there is no library and no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    return bind(STEPS.load(flags))


Ints = NDArray[np.int64]
MAX_TABLE_BYTES = 64 << 20  # largest table of the words' part of the gates


class PackedCell:
    """Weights in the loops' order; shared by all workers, read only.

    Args:
        form: form of the cell; its tensors are float32.
        stop: a row that says this word drops out.
        max_table_bytes: a larger table of words is not made.

    Raises:
        KernelUnavailableError: there is no library and no C++ compiler.
    """

    def __init__(self, form: Form, *, stop: int | None = None, max_table_bytes: int = MAX_TABLE_BYTES) -> None:
        self._library = load()
        self._units: int = self._library.batchmaker_units()
        self._kept: list[Tensor] = []  # tensors that the structures point into
        self._gates = GATES[form.kind]
        self.kind = form.kind
        self.hidden_sizes = [layer.hidden_size for layer in form.layers]
        self.has_words = form.projection is not None
        layers = [self._layer(form, layer) for layer in form.layers]
        table = embedding = None
        if form.embedding is not None:
            first = form.layers[0]
            assert first.from_input is not None
            columns = -(-first.hidden_size // self._units) * self._units * self._gates
            if len(form.embedding) * columns * 4 <= max_table_bytes:
                with torch.no_grad():
                    table = self._keep(self._by_block(form.embedding @ first.from_input + first.bias, first))
                layers[0].from_input.panels, layers[0].from_input.K = None, 0
            else:
                embedding = self._keep(form.embedding)
        structs = self._library.structs
        self._layers = (structs["Layer"] * len(layers))(*layers)
        projection, word_bias, num_words = None, None, 0
        if form.projection is not None:
            weight, bias = form.projection
            num_words = len(weight)
            projection = self._pack(weight.t(), 1, num_words)
            padded = torch.zeros(-(-num_words // self._units) * self._units)
            padded[:num_words] = bias.detach()
            word_bias = self._keep(padded)
        self.structure = new(
            structs["Cell"],
            num_layers=len(layers),
            num_words=num_words,
            layers=addressof(self._layers),
            table=table,
            embedding=embedding,
            projection=projection,
            word_bias=word_bias,
            stop=-1 if stop is None else stop,
        )

    def _layer(self, form: Form, layer: LayerForm) -> Any:
        matrices = {
            name: None if weight is None else self._pack(weight, self._gates, layer.hidden_size)
            for name in ("from_input", "from_hidden", "from_other")
            for weight in [getattr(layer, name)]
        }
        hidden_bias = None if layer.hidden_bias is None else self._keep(self._by_block(layer.hidden_bias[None], layer))
        bias = self._keep(self._by_block(layer.bias[None], layer))
        struct: type[Struct] = self._library.structs["Layer"]
        kind = form.kind.replace("-", "_")
        return new(struct, kind=kind, hidden=layer.hidden_size, **matrices, bias=bias, hidden_bias=hidden_bias)

    def _by_block(self, rows: Tensor, layer: LayerForm) -> Tensor:
        """Pack [n, gates * h] as [n, blocks * gates * 16], with zeros beyond the last unit."""
        blocks = -(-layer.hidden_size // self._units)
        split = rows.detach().view(len(rows), self._gates, layer.hidden_size)
        padded = torch.nn.functional.pad(split, (0, blocks * self._units - layer.hidden_size))
        return padded.view(len(rows), self._gates, blocks, self._units).transpose(1, 2).reshape(len(rows), -1)

    def _pack(self, weight: Tensor, gates: int, units: int) -> dict[str, int]:
        source = weight.detach().contiguous()
        packed = torch.empty(-(-units // self._units) * gates, len(source), self._units)
        advise_huge_pages(packed.data_ptr(), packed.nbytes)
        self._library.batchmaker_pack(source.data_ptr(), packed.data_ptr(), len(source), gates, units)
        return {"panels": self._keep(packed), "K": len(source)}

    def _keep(self, tensor: Tensor) -> int:
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class Runner:
    """Runner of one cell's tasks, one after another, in one thread; each worker has its own.

    Args:
        cell: packed.
        in_banks: by input, the memory whose rows it reads: [rows, *shape], each row contiguous, kept by the caller.
        out_banks: by output.
    """

    def __init__(self, cell: PackedCell, in_banks: Sequence[Tensor], out_banks: Sequence[Tensor]) -> None:
        self.cell = cell
        self._library = load()
        self._handle = self._library.batchmaker_runner(byref(cell.structure))
        both = in_banks, out_banks
        self._banks = [(c_void_p * len(banks))(*(bank.data_ptr() for bank in banks)) for banks in both]
        self._task = self._library.structs["Task"]()  # the rest is of each task
        self._task.in_banks, self._task.out_banks = map(addressof, self._banks)
        self._strides = [(c_int64 * len(banks))(*(bank.stride(0) for bank in banks)) for banks in both]
        self._task.in_strides, self._task.out_strides = map(addressof, self._strides)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.batchmaker_free(self._handle)

    def run(self, in_rows: Ints, out_rows: Ints, lengths: Ints | None) -> int:
        """Compute a task.

        Args:
            in_rows: [steps, b, inputs] of the banks; of states only step 0 counts.
            out_rows: [b, outputs], written after each row's last step.
            lengths: [b] steps of each row; None: all have every step.

        Returns:
            Steps that were not computed, because their row had said the word that stops it.
        """
        if in_rows.strides[2] != 8:
            in_rows = np.ascontiguousarray(in_rows)
        if out_rows.strides[1] != 8:
            out_rows = np.ascontiguousarray(out_rows)
        task = self._task
        task.steps, task.rows, _ = in_rows.shape
        task.in_rows = address_of(in_rows)
        task.in_step, task.in_row = in_rows.strides[0] >> 3, in_rows.strides[1] >> 3
        task.out_rows, task.out_row = address_of(out_rows), out_rows.strides[0] >> 3
        if lengths is not None:
            lengths = np.ascontiguousarray(lengths)
        task.lengths = None if lengths is None else address_of(lengths)
        skipped: int = self._library.batchmaker_run(self._handle, byref(task))
        return skipped

    def carries(self, carry: Sequence[int]) -> bool:
        """Return whether it can run steps of chains with this carry: input -> output of the step before, or -1."""
        if self.cell.kind.startswith("tree"):
            return False
        states = len(self.cell.hidden_sizes) * (1 if self.cell.kind == "gru" else 2)
        words = int(self.cell.has_words)
        return tuple(carry) == (*((0,) if words else (-1,)), *range(words, words + states))

    def results(self, output: int, steps: Ints, rows: Ints) -> NDArray[np.generic]:
        """Return output ``output`` (a word or a hidden state) of the latest task, after those steps of those rows."""
        layer = self.layer_of(output)
        if not len(rows):
            return np.empty(
                (0, self.cell.hidden_sizes[layer]) if layer >= 0 else 0, np.float32 if layer >= 0 else np.int64
            )
        steps, rows = np.ascontiguousarray(steps), np.ascontiguousarray(rows)
        found: NDArray[np.generic]
        if layer < 0:
            found = np.empty(len(rows), dtype=np.int64)
        else:
            found = np.empty((len(rows), self.cell.hidden_sizes[layer]), dtype=np.float32)
        self._library.batchmaker_results(
            self._handle, layer, len(rows), address_of(steps), address_of(rows), address_of(found)
        )
        return found

    def layer_of(self, output: int) -> int:
        """Return the layer of the hidden state that an output is; -1 for the word."""
        number = output - int(self.cell.has_words)
        return number if number < 0 or self.cell.kind == "gru" else number // 2


def gives(cell: PackedCell, output: int) -> bool:
    """Return whether :meth:`Runner.results` has that output at every step: words and hidden states, not cell states."""
    return cell.kind == "gru" or output - int(cell.has_words) < 0 or (output - int(cell.has_words)) % 2 == 0


def pack_or_none(form: Form, *, stop: int | None = None) -> PackedCell | None:
    """Pack the cell; None where the weights are not float32 on the CPU."""
    tensors = [form.layers[0].bias, *(layer.from_hidden for layer in form.layers)]
    if any(each is not None and (each.dtype != torch.float32 or each.device.type != "cpu") for each in tensors):
        return None
    return PackedCell(form, stop=stop)
