"""Token ids to the states that enter the first layer."""

from __future__ import annotations

from collections.abc import Callable

from mlsys_orca.model.weights.quantized import Matrix, QuantizedMatrix
from torch import Tensor, nn
from torch.nn import functional


def look_up(table: Matrix, ids: Tensor) -> Tensor:
    """Return the rows ``ids`` [n] int64 of ``table``: of its dtype, or fp32 if it is quantised."""
    if isinstance(table, QuantizedMatrix):
        return table.rows(ids).dequantized()
    return functional.embedding(ids, table)


def set_matrix(module: nn.Module, name: str, matrix: Matrix) -> None:
    """Let a floating matrix be a buffer, and a quantised one, which is no tensor, an attribute."""
    if isinstance(matrix, Tensor):
        module.register_buffer(name, matrix, persistent=False)
    else:
        setattr(module, name, matrix)


class Embedding(nn.Module):
    """Token ids to the states that enter the first layer, fp32.

    Args:
        table: [vocab_size, hidden_size]; of a quantised one the rows are decoded that are looked up.
        scale: Multiplies what is looked up.
        positions: [max_positions, hidden_size], learned, added last.
    """

    table: Matrix
    positions: Tensor | None

    def __init__(self, table: Matrix, *, scale: float = 1.0, positions: Tensor | None = None) -> None:
        super().__init__()
        self.scale = scale
        set_matrix(self, "table", table)
        self.register_buffer("positions", positions, persistent=False)

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows_of: Callable[[Matrix, Tensor], Tensor] = look_up
    ) -> Tensor:
        """Embed ``token_ids`` at ``positions``, both [num_tokens] int64 -> fp32 [num_tokens, hidden_size].

        ``rows_of`` looks up rows of the table.
        """
        x = rows_of(self.table, token_ids).float()
        if self.scale != 1:
            x *= self.scale
        if self.positions is not None:
            x += functional.embedding(positions, self.positions)
        return x
