"""Fastest kernel of each operator on this machine, kept on disk: the paper's kernel selection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlsys_core.profiling.files import atomic_write
from mlsys_nimble.backends.cpu import library
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.program import Operator, ValueId


class Choices:
    """Measured choices, in one file for each build of the kernels (and so for each kind of processor).

    Args:
        cache_dir: Folder with the file below ``nimble/``. If several processes write it, the last one's choices stay.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / "nimble" / f"{Path(library.load()._name).stem}.json"
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or damaged: kernels are measured again
            known = {}
        self.known: dict[str, str] = known if isinstance(known, dict) else {}

    @staticmethod
    def text(operator: Operator, views: Mapping[ValueId, View]) -> str:
        """Return the key of a choice: the operator's kind, and its tensors' shapes and strides."""
        tensors = (views[value] for value in (*operator.inputs, *operator.outputs))
        return f"{operator.kind} {[(view.shape, view.strides) for view in tensors]}"

    def learn(self, found: Mapping[str, str]) -> None:
        """Add choices, and save them; if the folder cannot be written to, later processes measure again."""
        self.known.update(found)
        if found:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._path) as file:
                    file.write(json.dumps(self.known, indent=0).encode())
            except OSError:
                pass
