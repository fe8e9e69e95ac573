"""Options that this distribution adds to ``mlsys orca serve``: what a server writes down, to go on after its death."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_serving.extensions import ExtensionOptions


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(ExtensionOptions):
    """Options of the journal.

    Example:
        >>> GatewayOptions(journal=Path("journal")).folder
        PosixPath('journal')
    """

    panel: ClassVar[str] = "Journal"

    journal: Annotated[
        Path | None,
        typer.Option(
            help="A folder for streams, files and batches, which then outlive the server; by default they end with it."
        ),
    ] = None
    journal_fsync: Annotated[
        str, typer.Option(help="When the disk has what is written there: always, interval (a second), never.")
    ] = "interval"
    journal_size: Annotated[int, typer.Option(min=1, help="Bytes there at most; more is refused with 503.")] = 1 << 30
    journal_keep: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds that ended work stays: a day for batches and files, ten minutes for streams.",
        ),
    ] = None

    @cached_property
    def folder(self) -> Path:
        """The folder of files and batches; a new one that is deleted with the server where none was given."""
        return Path(tempfile.mkdtemp(prefix="mlsys-orca-")) if self.journal is None else self.journal

    @property
    def sync(self) -> str:
        """When the disk has what is written; what ends with the server need not be there."""
        return "never" if self.journal is None else self.journal_fsync

    def check(self, *, has_instances: bool) -> None:
        """Refuse a folder that cannot be written, or an unknown policy.

        Raises:
            InvalidInputError: as it says.
        """
        from mlsys_orca_gateway.log import SYNC_POLICIES, make_folder

        if self.journal_fsync not in SYNC_POLICIES:
            raise InvalidInputError(f"--journal-fsync is {', '.join(SYNC_POLICIES)}, not {self.journal_fsync!r}")
        if self.journal is not None:
            make_folder(self.journal)

    @contextmanager
    def hold(self, host: str) -> Iterator[None]:
        """Keep the folder for all fronts to come."""
        folder = self.folder
        try:
            yield
        finally:
            if self.journal is None:
                shutil.rmtree(folder, ignore_errors=True)

    def reach(self, step: str) -> None:
        """Take notice of a step of writing; tests override it."""
