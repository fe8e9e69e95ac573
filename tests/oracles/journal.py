"""Results of a long run, kept in a file: a run that was ended goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """Results by name, one JSON line each; processes may add to the same file. Without a path nothing is kept.

    A file belongs to one state of the sources: remove it after a change.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path else None

    def read(self) -> dict[str, Any]:
        """Return what is known. The last line may be torn: its result is then made again."""
        known: dict[str, Any] = {}
        if self._path is not None and self._path.is_file():
            for line in self._path.read_text().splitlines():
                try:
                    name, result = json.loads(line)
                except json.JSONDecodeError:
                    continue
                known[name] = result
        return known

    def add(self, name: str, result: Any) -> None:
        """Keep a result."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([name, result]) + "\n")
