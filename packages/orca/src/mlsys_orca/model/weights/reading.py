"""Read a checkpoint's tensors into a model, and see that the two agree.

Used by every model family while loading: each tensor read must be there and have the shape the configuration implies,
and when the model is complete no tensor may be left over, since a bias or a scale that nobody reads would change the
text.
"""

from __future__ import annotations

from collections.abc import Callable

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress
from mlsys_orca.model.weights.quantized import QuantizedMatrix
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
