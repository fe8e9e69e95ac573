"""A journal: a file with a JSON line for each finished piece of work, so that a restart goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError


class Journal:
    """Finished records, in a file that begins with the setting they share.

    Args:
        path: The file; made, with its folder, by the first :meth:`add` or by :meth:`begin`.
        setting: JSON values that all records were made with.
        key: The field that names a record.

    Raises:
        InvalidInputError: the file was written with another setting, or is no journal.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any], *, key: str) -> None:
        self.path = path
        self.finished: dict[str, dict[str, Any]] = {}
        self._key, self._setting = key, json.loads(json.dumps(dict(setting)))
        if not path.exists():
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):  # a run ended within it
                lines.pop()
                path.write_text("".join(lines), encoding="utf-8")
            head, *records = [json.loads(line) for line in lines]
            known = head["setting"]
            self.finished = {record[key]: record for record in records}
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInputError(f"{path} is no journal of this benchmark: {error!r}") from error
        if known != self._setting:
            raise InvalidInputError(
                f"{path} was written with another setting, {known}; this run has {self._setting}. Name another file, "
                "or delete it."
            )

    def begin(self) -> None:
        """Make the file, before any work is done for it."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            head = {"setting": self._setting, "environment": describe_environment()}
            self.path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record, at once and for good."""
        self.begin()
        self.finished[record[self._key]] = dict(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(record), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
